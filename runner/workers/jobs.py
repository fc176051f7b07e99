"""Messages between the runner and an agent host: the job of one attempt, and its answer.

In, out: frozen values. Invariant: an answer has rewards, or a failure (which may have a reward of its own), or an output that is still to
be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spangrad.agent.reward_values import Rewards
from spangrad.text_sanitizer import storable
from spangrad.types import AttemptFailure


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt, as it is sent to an agent host."""

    id: str
    input: object
    traceparent: str
    baggage: str
    endpoint: str | None
    """Base URL of the policy for this attempt alone. None: there is no gateway."""
    log: str | None = None
    """Directory for the output of the attempt. None: the output goes to the host's log."""
    environment: object = None
    """Value of the instance that was leased for the attempt. None: no instance was leased, or its value is null."""
    image: str | None = None
    """Container image of the agent. None: the host's own."""

    def message(self) -> dict[str, object]:
        """Return the job as JSON's types; `dataclasses.asdict` would copy the whole input."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Result of an attempt: rewards, or a failure."""

    rewards: Rewards | float | None
    """None if it failed for a reason that the policy did not cause, or while its output is still to be evaluated; empty if the agent has
    recorded its rewards on its own spans."""
    failure: AttemptFailure | None
    """None: it succeeded."""
    detail: str = ""
    """Explanation of the failure for people; of an attempt that succeeded, the exception after which its result is partial, or empty."""
    output: object = None
    """Output of the agent, for a reward service to evaluate."""

    def storable(self) -> AttemptOutcome:
        """Return the answer with texts that the span store and the queue accept, whatever the agent or a service has written."""
        rewards = self.rewards
        if isinstance(rewards, Mapping):
            rewards = {storable(name): _storable(value) for name, value in rewards.items()}
        return replace(self, rewards=rewards, detail=storable(self.detail))


def _storable(value: float | Mapping[str, float]) -> float | Mapping[str, float]:
    return {storable(role): number for role, number in value.items()} if isinstance(value, Mapping) else value
