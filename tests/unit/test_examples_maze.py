"""The maze of OpenEnv's examples: its files are OpenEnv's own, and the warm start has the form of its observations."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from examples.maze.__main__ import EXAMPLE, HELD_OUT, questions
from examples.maze.model import SIZE, WORDS, legal_moves, observation, transcript

MAZE = Path(__file__).parents[2] / "examples" / "maze" / "maze_env"
BLOBS = {
    "__init__.py": "4283462a6dea57b8fc0ee1a5e55586e482f9dd3d",
    "client.py": "914d1a67afaa2128ad5c9d9c65b956d0a2561e73",
    "models.py": "c1350fecac258efff300722bedbf0721b923f030",
    "openenv.yaml": "3886cc8900f08595aa060c1db935dc70da94e257",
    "server/__init__.py": "ba7c9bc12a5f27317256ea2c25741d79bdf8939e",
    "server/maze.py": "c2e8b9f3c70aa051fdb7f72efff8c038d820d84f",
    "server/maze_env_environment.py": "0aa1bbe19427730b1ae048e4e4ef81f1625b058c",
}
"""Git's names of the files in commit 385de5eb of huggingface/OpenEnv, folder envs/maze_env."""


@pytest.fixture(scope="module")
def maze() -> ModuleType:
    """Their rules, which need nothing of OpenEnv."""
    spec = importlib.util.spec_from_file_location("openenv_maze", MAZE / "server" / "maze.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_maze_files_are_openenvs_own_byte_by_byte() -> None:
    contents = {name: (MAZE / name).read_bytes() for name in BLOBS}
    assert {name: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() for name, data in contents.items()} == BLOBS


def test_legal_moves_are_those_of_the_maze_in_its_order(maze: ModuleType) -> None:
    import numpy as np

    rng = random.Random(0)
    walls = np.array([[int(rng.random() < 0.35) for _ in range(SIZE)] for _ in range(SIZE)])
    walls[0, 0] = walls[-1, -1] = 0
    game = maze.Maze(walls)
    free = frozenset((column, row) for column in range(SIZE) for row in range(SIZE) if not walls[row, column])
    assert {cell: list(legal_moves(free, cell)) for cell in free} == {cell: [*map(int, game.possible_actions(cell))] for cell in free}


def test_maze_transcripts_have_known_words_and_odds_of_all_actions() -> None:
    seen: set[str] = set()
    for seed in range(200):
        system, *turns = transcript(random.Random(seed))
        seen |= {word for message in (system, *turns) for word in str(message["content"]).split()}
        for shown, reply in zip(turns[::2], turns[1::2], strict=True):
            legal = json.loads(shown["content"])["legal_actions"]
            assert sum(reply["odds"].values()) == pytest.approx(1)
            assert min(reply["odds"][str(action)] for action in legal) > min(reply["odds"].values()) or len(legal) == 4
    assert seen <= set(WORDS)
    assert {word for cell in range(SIZE) for word in observation((cell, cell), (cell, cell), {}).split()} <= set(WORDS)


def test_maze_questions_held_out_are_other_seeds() -> None:
    drawn = questions(0, 100)
    assert (len(drawn.train), len(drawn.held_out)) == (100, HELD_OUT)
    assert not [question for question in drawn.train if question in drawn.held_out]
    assert (EXAMPLE.environment, EXAMPLE.role) == (None, "")
