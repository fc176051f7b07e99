"""Announcements to the gateway: of an attempt, with the limits and the sampling of its calls, and of the start of each of its stages.

In: what a request, settings and the runner ask for. Out: frozen messages that queue, runner and gateway share. Invariant: a value without a
meaning is refused, and so is an unknown field.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from spangrad.types import Stage

RolloutName = Annotated[str, Meta(min_length=1)]
AttemptNumber = Annotated[int, Meta(ge=0, le=9999)]
_Count = Annotated[int, Meta(ge=1, lt=2**53)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of the messages."""


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


class AnnouncedAttempt(Message, frozen=True):
    """An attempt that is about to begin."""

    rollout_id: RolloutName
    attempt: AttemptNumber
    run_id: str
    mode: str
    traceparent: str | None = None
    """Context of the attempt's root span, which becomes the parent of its calls. None: it has none."""
    limits: CallLimits = NO_LIMITS
    sampling: SamplingParameters = OWN_SAMPLING


class AnnouncementRequest(Message, frozen=True):
    """Body of POST /attempts of the gateway."""

    attempts: list[AnnouncedAttempt]


class StartedStage(Message, frozen=True):
    """A stage of an attempt that is about to begin; it takes the place of the stage before."""

    rollout_id: RolloutName
    attempt: AttemptNumber
    stage: Stage
    seconds: Annotated[float, Meta(gt=0)]
    """Time limit of the stage, in seconds."""


class StageRequest(Message, frozen=True):
    """Body of POST /attempts/stages of the gateway."""

    attempts: list[StartedStage]
