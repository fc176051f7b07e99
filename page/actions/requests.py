"""Requests for actions, as browsers send them.

In: JSON. Out: frozen structs. Invariant: an unknown field is refused, and every request names who asks.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spangrad.errors import JSON_ERRORS

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Version = Annotated[int, Meta(ge=0, lt=2**62)]
SET_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
"""Pattern of the name of a set of examples, which becomes a file's."""


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="action"):
    """Request of a person."""

    author: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"\S")]
    """Name of the person, as given."""


class VersionRequest(ActionRequest, frozen=True, kw_only=True):
    """Request about a policy version."""

    policy: Name
    branch: Name
    version: Version


class PublishRequest(VersionRequest, frozen=True, kw_only=True, tag="publish"):
    """Have the gateway serve a version."""


class RollbackRequest(VersionRequest, frozen=True, kw_only=True, tag="roll_back"):
    """Return to an older version: the next training step begins with it."""


class PinRequest(VersionRequest, frozen=True, kw_only=True, tag="pin"):
    """Keep a version's checkpoint."""


class UnpinRequest(VersionRequest, frozen=True, kw_only=True, tag="unpin"):
    """Keep a version's checkpoint no longer than others."""


class RestoreRequest(ActionRequest, frozen=True, kw_only=True, tag="restore"):
    """Make skipped groups trainable again."""

    policy: Name
    branch: Name
    groups: Annotated[list[Name], Meta(min_length=1, max_length=1000)]


class QueueRequest(ActionRequest, frozen=True, kw_only=True):
    """Request about rollouts in the queue."""

    rollout_ids: Annotated[list[Name], Meta(min_length=1, max_length=1000)]


class CancelRequest(QueueRequest, frozen=True, kw_only=True, tag="cancel"):
    """Cancel queued and running rollouts."""


class RetryRequest(QueueRequest, frozen=True, kw_only=True, tag="retry"):
    """Queue dead rollouts again."""


class RolloutRequest(ActionRequest, frozen=True, kw_only=True):
    """Request about a rollout."""

    rollout: Name


class LabelRequest(RolloutRequest, frozen=True, kw_only=True, tag="label"):
    """Give a rollout or a call a reward."""

    trace: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    span: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
    """Span that the reward is on: a call's, else the root of the rollout's last attempt."""
    name: Name
    """Name of the reward."""
    value: Annotated[float, Meta(ge=-1e9, le=1e9)]
    comment: Annotated[str, Meta(max_length=2000)] = ""


class CollectRequest(RolloutRequest, frozen=True, kw_only=True, tag="collect"):
    """Add a rollout's conversations to a file of examples."""

    set_name: Annotated[str, Meta(pattern=SET_NAME)]


class PlayRequest(RolloutRequest, frozen=True, kw_only=True, tag="play"):
    """Begin an episode that a person plays or watches."""

    rollout: Annotated[str, Meta(pattern=r"^play-[0-9a-f]{32}$")]
    """Id of the rollout, chosen by who asks: the same is not begun again."""
    environment: Name
    """Name of the handler whose environment it is."""
    task: Annotated[str, Meta(min_length=1, max_length=6000)]
    """Input of the task, as JSON."""
    person: bool
    """True if the person has a part; False if the policy plays alone."""
    role: Annotated[str, Meta(max_length=100)] = ""
    """Role of the person, in environments of several players."""
    policy: Annotated[str, Meta(max_length=200)] = ""
    """Policy of the gateway that plays, in place of the models of runner.episode; scripts stay. Empty: those models."""


Request = (
    PublishRequest
    | RollbackRequest
    | PinRequest
    | UnpinRequest
    | RestoreRequest
    | CancelRequest
    | RetryRequest
    | LabelRequest
    | CollectRequest
    | PlayRequest
)


def read_request(content: bytes) -> Request:
    """Return the request that a body holds.

    Raises:
        ValueError: it holds none.
    """
    try:
        return msgspec.json.decode(content, type=Request)
    except JSON_ERRORS as error:
        raise ValueError(f"the body is no action of the page: {error}") from None
