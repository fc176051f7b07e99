"""Gomoku as an environment of two players: the same class in training, validation, play and the warm start.

In: a task with the opening's stones by role, and cells. Out: the other player's moves, and rewards that add to 0. Invariant: a player reads
its own stones in lower case and the other's in upper case, whichever role it has; a reply that names no free cell passes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from examples.gomoku.board import LARGE, SMALL, Rules
from spangrad.episode.environment import StepResult

FIRST, SECOND = "first", "second"
PASS = "pass"
PASS_REWARD = -0.6
"""Reward of a reply that names no free cell. Of this and of all rewards the other player has the opposite."""
LINE_REWARD = 0.2
"""Reward of a stone that makes the longest line longer that is open to its player."""
Opening = dict[str, list[str]]
"""Stones that lie on the board before the first move, by role."""


class Gomoku:
    """Five by five cells; four in a row win."""

    roles: Sequence[str] = (FIRST, SECOND)
    rules: Rules = SMALL

    def system_prompt(self, role: str) -> str:
        """Return the role: which player moves first is all that the contexts do not show."""
        return role

    def reset(self, task: Opening) -> dict[str, str]:
        """Lay the opening's stones; each player reads them all."""
        self.stones = {cell: role for role in self.roles for cell in task[role]}
        self._moves = 0
        return {role: " ".join(_read_by(role, self.stones)) or "empty" for role in self.roles}

    def acting(self) -> str:
        """Return whose turn it is."""
        return self.roles[self._moves % 2]

    def parse(self, text: str) -> str:
        """Return the cell that a reply names."""
        return text.strip()

    def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        """Lay a stone; the other player reads where."""
        ((role, cell),) = actions.items()
        self._moves += 1
        other, move, reward = self.acting(), PASS, PASS_REWARD
        if cell in self.rules.lines and cell not in self.stones:
            before = self.rules.longest(self.stones, role)
            self.stones[cell] = role
            (move,) = _read_by(other, {cell: role})
            reward = LINE_REWARD * (self.rules.longest(self.stones, role) - before)
            if self.rules.has_won(self.stones, cell):
                return self._won(role, move)
        is_over = self._moves == len(self.rules.cells) or not self.rules.free(self.stones)
        if reward or is_over:
            return {role: StepResult(None, reward, is_over), other: StepResult(move, -reward, is_over)}
        return {other: StepResult(move)}

    def forfeit(self, role: str) -> dict[str, StepResult]:
        """End the game: a player that gives no reply has lost."""
        return self._won(next(other for other in self.roles if other != role), "forfeit")

    def _won(self, winner: str, move: str) -> dict[str, StepResult]:
        """Return the results of the last move."""
        return {role: StepResult(move, 1.0 if role == winner else -1.0, done=True) for role in self.roles}


class LargeGomoku(Gomoku):
    """Nine by nine cells, five in a row win; for models that read English."""

    rules = LARGE

    def system_prompt(self, role: str) -> str:
        """Return the rules."""
        return (
            f"This is gomoku on a board of {self.rules.size} x {self.rules.size} cells, from a1 in one corner to "
            f"{self.rules.cells[-1]} in the opposite one. {self.rules.row} stones in a row, a column or a diagonal win. You move {role}. "
            "Your stones are in lower case, the other player's in upper case. Reply with a free cell alone, such as e5."
        )


def opening(rng: random.Random, rules: Rules = SMALL, pairs: Sequence[int] = (1, 2)) -> Opening:
    """Draw an opening: as many stones of each role, of which none is about to win."""
    while True:
        count = rng.choice(pairs)
        cells = rng.sample(rules.cells, 2 * count)
        drawn = {FIRST: sorted(cells[:count]), SECOND: sorted(cells[count:])}
        stones = {cell: role for role, own in drawn.items() for cell in own}
        if not any(rules.completing(stones, role) for role in drawn):
            return drawn


def _read_by(role: str, stones: Mapping[str, str]) -> Iterator[str]:
    """Yield stones as a role reads them: its own first, in lower case."""
    yield from (cell for cell, owner in stones.items() if owner == role)
    yield from (cell.upper() for cell, owner in stones.items() if owner != role)
