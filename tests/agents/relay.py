"""An environment of two players that writes down every step: in turns, at once, and in turns again; each must reply with its own token."""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
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


def lines_by_game(log: Path) -> dict[str, list[str]]:
    """Return the lines of a log by game, each of which must be possible at its place: a turn is played once, in order, by its roles."""
    games = defaultdict[str, list[str]](list)
    for line in log.read_text().splitlines():
        name, _, step = line.partition(" ")
        assert step in _possible(name, len(games[name])), f"{step!r} follows {games[name]} of {name}"
        games[name].append(step)
    return games


def _possible(name: str, number: int) -> set[str]:
    """Return the lines that a game's log may have at a place."""
    if number == 0:
        return {"0 reset"}
    if number > len(TURNS):
        return set()
    turn = sorted(TURNS[number - 1])
    played = " ".join([f"{number - 1} step", *turn, *(f"{name}:{role}" for role in turn)])
    return {played, *(f"{number - 1} forfeit {role}" for role in turn)}
