"""Deaths at every boundary of the training loop, which a program of its own forks: Polars starts threads, which do not survive a fork."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.phases import PLAYERS, PhaseTable
from tests.support.processes import left_by_crashes, survives
from tests.support.trainers import TRANSACTION, FakeSource, committed, settings, wired, write_base
from trainer import commits, loop, phases, step
from trainer.loop import Trainer
from trainer.publish import checkpoint, publishing

COMMITS = {"begun", "take", "hand_on", "_take", "submit", "settle", "settled", "_commit_pending", "_commit"}
"""Functions of `trainer.commits` at whose every line a process may die, in the main thread or in that of the follow-ups."""


@pytest.mark.parametrize(("max_staleness", "states"), [pytest.param(9, 12, marks=pytest.mark.slow), (0, 6)])
def test_training_loop_killed_at_any_boundary_recovers(tmp_path: Path, max_staleness: int, states: int):
    """Law 4 over ledger, checkpoint and gateway together.

    With older rollouts, a version is written beside the next step; without, after its own.
    """
    command = [sys.executable, "-m", "tests.integration.test_trainer_loop_deaths", tmp_path, str(max_staleness)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    boundaries = [int(boundary) for boundary in ended.stdout.split()]
    assert boundaries[-1] > 90, "the boundaries were not found"
    assert len(boundaries) >= states, "deaths fell before, within and after each step"


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_trainers_in_phases_killed_at_any_boundary_resume_the_phase(tmp_path: Path, every: int) -> None:
    """Every boundary, or every third of those whose deaths leave something else, so that each stage of an update has one."""
    command = [sys.executable, "-m", "tests.integration.test_trainer_loop_deaths", tmp_path, "phases", str(every)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    boundaries = [int(boundary) for boundary in ended.stdout.split()]
    assert boundaries[-1] > 100, "the boundaries were not found"
    assert len(boundaries) >= 24 // every, "deaths fell before, within and after each update, and before and after each publication"


def die_in_phases(directory: Path, every: int) -> list[int]:
    """Train two policies in phases, and go on from what deaths at the boundaries leave, of those that left something else every nth."""
    base, own = write_base(directory / "base"), directory / "policies"

    def table_of_run() -> PhaseTable:
        table = PhaseTable(base, own)
        for name in "ab":
            table.source.play(name, dict.fromkeys(PLAYERS, 0))
        return table

    def train() -> None:
        table = table_of_run()
        for policy in (*PLAYERS, *PLAYERS):
            table.trainers[policy].run(follow=False)

    def go_on() -> None:
        table = table_of_run()
        updated = all(table.heads().values())
        assert updated or not any(table.served().values()), "a version was served before all policies were updated"
        for policy in (*PLAYERS, *PLAYERS):
            table.trainers[policy].run(follow=False)
        assert table.served() == table.heads()
        for trainer in table.trainers.values():
            assert list(committed(trainer).values()) == [[], ["a-0", "a-1", "b-0", "b-1"]]
        table.play("c", "d")
        assert [table.turn(policy) for policy in PLAYERS] == [True, True], "the next phase is open for both"

    functions = {
        loop.__file__: {"run", "_step", "_publish"},
        step.__file__: TRANSACTION,
        phases.__file__: {"advance", "enter"},
        publishing.__file__: {"publish", "collect_or_retry", "_attempt"},
    }
    boundaries = list[int]()
    for boundary in itertools.islice(left_by_crashes(train, functions, own), 0, None, every):
        survives(go_on)
        boundaries.append(boundary)
    return boundaries


def die_at_every_boundary(directory: Path, max_staleness: int) -> list[int]:
    """Train, and go on from what a death at each boundary leaves; return those boundaries that left something else.

    Two batches where the first one's version is written beside the second step, else one. There the optimizer's state is written at the end
    alone, so that a start replays steps.
    """
    batches = [[], ["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]][: 3 if max_staleness else 2]
    base, own = write_base(directory / "base"), directory / "trainer"

    def trainer_of_run() -> Trainer:
        chosen = settings(base, own, max_staleness=max_staleness, checkpoint__every=9 if max_staleness else 1)
        return wired(chosen, FakeSource([*"abcd"][: 2 * len(batches) - 2]))

    def train() -> None:
        trainer_of_run().run(follow=False)

    def go_on() -> None:
        trainer = trainer_of_run()
        trainer.run(follow=False)
        trained = committed(trainer)
        assert list(trained.values()) == batches
        newest = loop.newest_version(trainer.ledger)
        weight = (Path(newest.policy_version.path) / "optimizer/weight").read_text()
        assert float(weight) == len(batches) - 1, "a step was repeated or skipped"
        names = {one.name for one in (own / "policy/main").iterdir()}
        assert names == {f"v{version}" for version in trained if version}, "an uncommitted version was left"
        assert json.loads((own / "served.json").read_text())[-1] == newest.version

    functions = {loop.__file__: {"run", "step", "_step", "_train"}, commits.__file__: COMMITS, checkpoint.__file__: {"add_state"}}
    boundaries = list[int]()
    for boundary in left_by_crashes(train, functions if max_staleness else {**functions, step.__file__: TRANSACTION}, own):
        survives(go_on)
        boundaries.append(boundary)
    return boundaries


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    place, case = Path(sys.argv[1]), sys.argv[2]
    print(*die_in_phases(place, int(sys.argv[3])) if case == "phases" else die_at_every_boundary(place, int(case)))
