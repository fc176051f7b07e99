"""Nim for two players: each takes 1 to 3 sticks, and the player that takes the last wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spangrad.episode.environment import StepResult


class Nim:
    """Sticks, of which the players take in turn; a reply that is no number of sticks loses."""

    roles = ("first", "second")

    def system_prompt(self, role: str) -> str:
        return f"You are {role}."

    def reset(self, task: dict[str, Any]) -> dict[str, str]:
        self.sticks, self.turns = task["sticks"], 0
        return dict.fromkeys(self.roles, f"{self.sticks} sticks{task.get('more', '')}")

    def acting(self) -> str:
        return self.roles[self.turns % 2]

    def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        ((role, text),) = actions.items()
        print("taken:", text)  # is not a line of the episode's
        taken = int(text) if text.strip() in {"1", "2", "3"} else self.sticks + 1
        self.sticks, self.turns = self.sticks - taken, self.turns + 1
        if self.sticks > 0:
            return {other: StepResult(f"{role} left {self.sticks}") for other in self.roles}
        won = 1.0 if self.sticks == 0 else -1.0
        return {other: StepResult("over", won if other == role else -won, done=True) for other in self.roles}
