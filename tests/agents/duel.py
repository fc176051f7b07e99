"""An environment of two players: each speaks once, white before black, and white's reward is black's loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.episode.environment import StepResult


class Duel:
    """White wins if it spoke at all."""

    roles = ("white", "black")

    def reset(self, task: dict[str, str]) -> dict[str, str]:
        self.spoken: list[str] = []
        return dict.fromkeys(self.roles, f"say {task['city']}")

    def acting(self) -> str:
        return self.roles[len(self.spoken)]

    def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        self.spoken += actions
        done = len(self.spoken) == len(self.roles)
        text = f"{self.spoken[-1]} spoke"
        return {role: StepResult(text, value if done else None, done) for role, value in (("white", 1.0), ("black", -1.0))}


def echo(messages: Sequence[Mapping[str, Any]]) -> str:
    """Say what was read last."""
    return str(messages[-1]["content"])
