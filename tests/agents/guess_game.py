"""An environment with reset and step in which everything that may go wrong can be asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spangrad.episode.environment import StepResult


class Guess:
    """Guess the number."""

    system_prompt = "Guess the number."
    log: str | None = None

    def reset(self, task: dict[str, Any] | None) -> str:
        self.secret = (task or {}).get("secret", 3)
        self.log = (task or {}).get("log")
        self.played: list[object] = []
        return "Your guess?"

    def parse(self, text: str) -> int | str:
        if text == "unreadable":
            raise ValueError("no guess")
        return int(text) if text.strip().isdigit() else text

    def step(self, action: int | str) -> StepResult:
        self.played.append(action)
        if self.log:
            with Path(self.log).open("a") as log:
                log.write(f"{self.secret} {action}\n")
        match action:
            case "crash":
                os._exit(3)
            case "raise":
                raise ValueError("bad luck")
            case "sleep":
                time.sleep(0.5)
            case "hang":
                time.sleep(60)
            case _:
                pass
        if action == self.secret:
            return StepResult("Right.", 1.0, True, {"guesses": len(self.played)})
        return StepResult({"played": [*self.played]}, 0.25)

    def close(self) -> None:
        if self.log:
            with Path(self.log).open("a") as log:
                log.write(f"{self.secret} closed\n")


class AsyncGuess(Guess):
    """Guess the number, without blocking."""

    async def reset(self, task: dict[str, Any] | None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(task)

    async def step(self, action: int | str) -> StepResult:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(action)
