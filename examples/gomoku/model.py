"""Gomoku's model: it knows what a free cell is, and nothing else of the game.

In: a directory and a seed. Out: there, the model after supervised steps on games of two players that lay stones anywhere; each free cell is
taught to be as likely as another. Held-out openings are never shown.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from examples.gomoku.board import SMALL
from examples.gomoku.game import PASS, Gomoku
from examples.gomoku.task import trained_opening
from examples.learning.tiny import Transcript, make_model, model_command

WORDS = (*Gomoku.roles, "empty", PASS, *SMALL.cells, *(cell.upper() for cell in SMALL.cells))
STEPS = 1000
ROWS = 16
MOVES = 10
"""Most moves of a transcript. A model that has seen no later move names cells there that are not free, and training, whose games are short,
does not teach it better."""


def transcript(rng: random.Random) -> Transcript:
    """Play a game, and return what one of its players reads and replies."""
    game, reader = Gomoku(), rng.choice(Gomoku.roles)
    messages: list[Mapping[str, object]] = [{"role": "system", "content": game.system_prompt(reader)}]
    unread, turns, is_over = [game.reset(trained_opening(rng))[reader]], 0, False
    while not is_over and turns < MOVES:
        role, free = game.acting(), game.rules.free(game.stones)
        cell = rng.choice(free)
        if role == reader:
            odds = dict.fromkeys(free, 1 / len(free))
            messages += [{"role": "user", "content": "\n".join(unread)}, {"role": "assistant", "content": cell, "odds": odds}]
            unread, turns = [], turns + 1
        results = game.step({role: cell})
        is_over = any(result.done for result in results.values())
        unread += [result.observation for role, result in results.items() if role == reader and result.observation]
    return messages


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
