"""An environment of two players that writes down every step: in turns, at once, and in turns again; each must reply with its own token."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from spangrad.episode.environment import StepResult

TURNS = (("white",), ("black",), ("black", "white"), ("white",), ("black",))


class Relay:
    """Token of a player: name of the object, and the role."""

    roles = ("white", "black")

    def reset(self, task: object) -> dict[str, str]:
        self.name, self.at = uuid.uuid4().hex, 0
        self._write("reset")
        return {role: f"{self.name}:{role}" for role in self.roles}

    def acting(self) -> tuple[str, ...]:
        return TURNS[self.at]

    def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        self._write(" ".join(["step", *sorted(actions), *(text for _, text in sorted(actions.items()))]))
        return self._next(1.0 if self.at % 2 else -0.5)

    def forfeit(self, role: str) -> dict[str, StepResult]:
        self._write(f"forfeit {role}")
        return self._next(1.0)

    def _next(self, reward: float) -> dict[str, StepResult]:
        self.at += 1
        rewards = {"white": reward, "black": -reward}
        return {role: StepResult(f"{self.name}:{role}", rewards[role], self.at == len(TURNS)) for role in self.roles}

    def _write(self, text: str) -> None:
        with Path(os.environ["RELAY_LOG"]).open("a") as log:
            log.write(f"{self.name} {self.at} {text}\n")
