"""Gomoku's model: it knows what a free cell is, and looks for a sensible one at one move in ten.

In: a directory and a seed. Out: there, the model after supervised steps on games of two such players, which are taught as the odds of each
cell. Held-out openings are never shown.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from examples.gomoku.board import SMALL, Rules
from examples.gomoku.game import PASS, Gomoku
from examples.gomoku.task import trained_opening
from examples.learning.tiny import Transcript, make_model, model_command

WORDS = (*Gomoku.roles, "empty", PASS, *SMALL.cells, *(cell.upper() for cell in SMALL.cells))
SENSIBLE = 0.1
STEPS = 1000
ROWS = 32
MOVES = 5
"""Most moves of a transcript: later ones are rare in training, and cost as much as others here."""


def sensible(rules: Rules, stones: Mapping[str, str], role: str) -> list[str]:
    """Return the free cells on a line with the most stones of a role, of the lines without any of the other."""
    free, counts = rules.free(stones), rules.counts(stones, role)
    longest = {cell: max(counts[line] for line in rules.lines[cell]) for cell in free}
    most = max(longest.values())
    return [cell for cell in free if longest[cell] == most]


def transcript(rng: random.Random) -> Transcript:
    """Play a game, and return what one of its players reads and replies."""
    game, reader = Gomoku(), rng.choice(Gomoku.roles)
    messages: list[Mapping[str, object]] = [{"role": "system", "content": game.system_prompt(reader)}]
    unread, moves, is_over = [game.reset(trained_opening(rng))[reader]], 0, False
    while not is_over and moves < MOVES:
        role, free = game.acting(), game.rules.free(game.stones)
        best = sensible(game.rules, game.stones, role)
        odds = {cell: (1 - SENSIBLE) / len(free) + SENSIBLE * (cell in best) / len(best) for cell in free}
        (cell,) = rng.choices(free, list(odds.values()))
        if role == reader:
            messages += [{"role": "user", "content": "\n".join(unread)}, {"role": "assistant", "content": cell, "odds": odds}]
            unread, moves = [], moves + 1
        results = game.step({role: cell})
        is_over = any(result.done for result in results.values())
        unread += [result.observation for role, result in results.items() if role == reader and result.observation]
    return messages


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
