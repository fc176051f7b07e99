"""The maze's model: it takes a legal action, and seldom the one back; the maze itself it has never seen.

In: a directory and a seed. Out: there, the model after supervised steps on walks through made-up mazes, which are taught as the odds of
each action.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from examples.learning.tiny import Transcript, make_model, model_command

SIZE = 8
WALLS = 0.35
"""Share of the cells of a made-up maze that are walls."""
MOVES = {2: (-1, 0), 3: (1, 0), 0: (0, -1), 1: (0, 1)}
"""Column and row that an action adds, in OpenEnv's order: left, right, up, down."""
BACK, ILLEGAL = 0.05, 0.05
"""Shares of moves that go back if they may, and of those that are any action."""
PROMPT = "MazeEnvironment environment\n\nReply with action: an integer. Only that."
STEPS = 300
ROWS = 16
LONGEST = 10
"""Moves of a transcript; an episode has more."""
_NUMBERS = [form.format(number) for number in range(SIZE) for form in ("[{}],", "[{},", "{},", "{}],", "{}]}}")]
_NAMES = ('{"current_position":', '"legal_actions":', '"previous_position":')
WORDS = (*PROMPT.split(), *(str(action) for action in MOVES), *_NAMES, "[],", *_NUMBERS)

Cell = tuple[int, int]
"""Column and row."""


def legal_moves(free: frozenset[Cell], cell: Cell) -> dict[int, Cell]:
    """Return the cell that each legal action leads to."""
    return {action: to for action, (right, down) in MOVES.items() if (to := (cell[0] + right, cell[1] + down)) in free}


def observation(cell: Cell, previous: Cell, legal: Mapping[int, Cell]) -> str:
    """Return an observation as the policy reads it."""
    return json.dumps({"current_position": cell, "legal_actions": list(legal), "previous_position": previous})


def transcript(rng: random.Random) -> Transcript:
    """Walk through a made-up maze."""
    cells = [(column, row) for column in range(SIZE) for row in range(SIZE)]
    free = frozenset(cell for cell in cells if rng.random() >= WALLS)
    starts = [cell for cell in sorted(free) if legal_moves(free, cell)]
    if not starts:
        return transcript(rng)
    cell = previous = rng.choice(starts)
    messages: list[Mapping[str, object]] = [{"role": "system", "content": PROMPT}]
    for _ in range(LONGEST):
        legal = legal_moves(free, cell)
        forward = [action for action, to in legal.items() if to != previous] or list(legal)
        odds = {
            str(action): ILLEGAL / len(MOVES)
            + BACK * (action in legal) / len(legal)
            + (1 - BACK - ILLEGAL) * (action in forward) / len(forward)
            for action in MOVES
        }
        (word,) = rng.choices(list(odds), list(odds.values()))
        messages += [
            {"role": "user", "content": observation(cell, previous, legal)},
            {"role": "assistant", "content": word, "odds": odds},
        ]
        if int(word) in legal:
            previous, cell = cell, legal[int(word)]
    return messages


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
