"""Opponents without a model: they complete a line or block one if they see it, and otherwise lay a stone anywhere.

In: a player's messages. Out: a cell. Invariant: the board is read from the messages alone, as a model reads it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.gomoku.board import LARGE, SMALL, Rules

SEES = 0.1
OWN, OTHER = "own", "other"


@dataclass(frozen=True)
class Script:
    """Opponent that sees each of its chances, and each of the other's threats, with a probability."""

    rules: Rules
    sees: float = SEES
    """Probability of a look for a line to complete, and of one for a line to block, at each move."""
    rng: random.Random = field(default_factory=random.Random)

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the cell of the next stone."""
        stones = stones_of(self.rules, messages)
        for role in (OWN, OTHER):
            cells = self.rules.completing(stones, role)
            if cells and self.rng.random() < self.sees:
                return self.rng.choice(cells)
        return self.rng.choice(self.rules.free(stones))


def stones_of(rules: Rules, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the stones that a player's messages name: its own are in lower case, also those that it laid."""
    words = [word for message in messages for word in str(message["content"]).split()]
    return {word.lower(): OWN if word.islower() else OTHER for word in words if word.lower() in rules.lines}


small = Script(SMALL)
large = Script(LARGE)
