"""What an agent host is given for one attempt, and how the attempt ended.

In, out: frozen values. Invariant: an answer has rewards, or a failure (which may have a reward of its own), or an output that is still to
be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spangrad.agent.reward_values import Rewards
from spangrad.text_sanitizer import storable
from spangrad.types import AttemptFailure


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt, as an agent host is told of it."""

    id: str
    input: object
    traceparent: str
    baggage: str
    endpoint: str | None
    """The attempt's own endpoint of the policy. None: there is no gateway."""
    log: str | None = None
    """Directory that what the attempt prints is written to. None: it goes to the host's log."""
    environment: object = None
    """What the instance that was leased for it has given. None: none was, or it gave nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an attempt ended: with rewards, or with a failure."""

    rewards: Rewards | float | None
    """None when it failed for no doing of the policy, and while its output is still to be judged; empty when the agent has rewarded itself
    on its own spans."""
    failure: AttemptFailure | None
    """None when it succeeded."""
    detail: str = ""
    """What happened, for people."""
    output: object = None
    """What the agent gave, for a reward service to judge."""

    def storable(self) -> Answer:
        """The answer in texts that span store and queue take, whatever an agent, a service or a dying process has said."""
        rewards = self.rewards
        if isinstance(rewards, Mapping):
            rewards = {storable(name): _storable(value) for name, value in rewards.items()}
        return replace(self, rewards=rewards, detail=storable(self.detail))


def _storable(value: float | Mapping[str, float]) -> float | Mapping[str, float]:
    return {storable(role): number for role, number in value.items()} if isinstance(value, Mapping) else value
