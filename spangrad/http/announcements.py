"""Messages to the gateway about attempts: their announcement, with the limits and the sampling of their calls, stages, counts, and ends.

In: what a request, settings and the runner ask for. Out: frozen messages that queue, runner and gateway share. Invariant: a value without a
meaning is refused, and so is an unknown field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from spangrad.types import Stage

RolloutName = Annotated[str, Meta(min_length=1)]
AttemptNumber = Annotated[int, Meta(ge=0, le=9999)]
_Count = Annotated[int, Meta(ge=1, lt=2**53)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of the messages."""


class AttemptKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An attempt of a rollout, as the gateway counts it."""

    rollout_id: RolloutName
    attempt: AttemptNumber


class AttemptMessage(Message, frozen=True):
    """Base class of the messages about one attempt."""

    rollout_id: RolloutName
    attempt: AttemptNumber

    @property
    def key(self) -> AttemptKey:
        """Return the attempt."""
        return AttemptKey(self.rollout_id, self.attempt)


class CallLimits(Message, frozen=True):
    """Limits of an attempt's calls."""

    max_calls: _Count | None = None
    """Number of calls after which the gateway refuses more. None: no limit."""
    max_output_tokens: _Count | None = None
    """Number of tokens from engines of ours after which the gateway refuses more calls. None: no limit."""

    def within(self, others: CallLimits) -> CallLimits:
        """Return these limits, and those of `others` where there is none."""
        return CallLimits(
            max_calls=self.max_calls or others.max_calls, max_output_tokens=self.max_output_tokens or others.max_output_tokens
        )


class SamplingParameters(Message, frozen=True):
    """Sampling parameters of an attempt's calls to engines, whatever its agent asks for."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """None: the agent's."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Probability mass that tokens are sampled from. None: the agent's."""
    top_k: _Count | None = None
    """Number of most likely tokens that are sampled from. None: the agent's."""
    max_tokens: _Count | None = None
    """Largest number of tokens of each answer. None: the agent's."""


NO_LIMITS = CallLimits()
OWN_SAMPLING = SamplingParameters()
"""Sampling parameters that are all the agent's."""


class AnnouncedAttempt(AttemptMessage, frozen=True):
    """An attempt that is about to begin."""

    run_id: str
    mode: str
    traceparent: str | None = None
    """Context of the attempt's root span, which becomes the parent of its calls. None: it has none."""
    limits: CallLimits = NO_LIMITS
    sampling: SamplingParameters = OWN_SAMPLING


class AnnouncementRequest(Message, frozen=True):
    """Body of POST /attempts of the gateway."""

    attempts: list[AnnouncedAttempt]


class StartedStage(AttemptMessage, frozen=True):
    """A stage of an attempt that is about to begin; it takes the place of the stage before."""

    stage: Stage
    seconds: Annotated[float, Meta(gt=0)]
    """Time limit of the stage, in seconds."""


class StageRequest(Message, frozen=True):
    """Body of POST /attempts/stages of the gateway."""

    attempts: list[StartedStage]


class CountRequest(Message, frozen=True):
    """Body of POST /attempts/calls of the gateway."""

    attempts: list[AttemptKey]
    wait: bool = True
    """True if the response waits for calls in flight, for some seconds at most."""


class CountedAttempt(msgspec.Struct, frozen=True):
    """Number of policy calls of an attempt."""

    calls: int | None
    """Number of accepted calls. None: the attempt was not announced to this process."""
    overflowed: bool
    """True if the last call that ended was refused because its prompt was longer than the model's context."""
    in_flight: int
    """Number of those calls that have not ended."""
    closed: str
    """Reason for which the attempt was closed, such as `token_budget`, or calls of its last stage were refused; empty: neither."""


class CountedAttempts(msgspec.Struct, frozen=True):
    """Numbers of policy calls, in the order of the request."""

    attempts: list[CountedAttempt]


class ClosedAttempt(AttemptMessage, frozen=True):
    """An attempt that has ended, whatever its agent still does."""

    reason: str
    """Reason of the end, such as `cancelled`."""

    def message(self) -> str:
        """Return the sentence that the attempt's calls are answered with."""
        return f"attempt {self.attempt} of rollout {self.rollout_id} has ended ({self.reason}). No more of its calls are answered."


class ClosingRequest(Message, frozen=True):
    """Body of POST /attempts/close of the gateway: attempts end, whatever their agents still do."""

    attempts: Sequence[ClosedAttempt]
