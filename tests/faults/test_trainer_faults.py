"""A trainer whose disk is full, whose store goes away, or who has a rival: nothing is trained twice, nothing is skipped (law 4).

Ledger, checkpoints and store are real; the optimizer is a fake that adds 1 to its weight at each step, so that the weight counts steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from spangrad.errors import CheckpointError, LedgerError, SpangradError, StoreError
from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.types import VersionStatus
from tests.support.built_rollouts import BuiltRollouts, trainer_over
from tests.support.policies import trainer_settings
from tests.support.servers import running_postgres, running_store, small_disk, start_store, store_answers, store_settings
from tests.support.trainers import Cutting, FakeOptimizer, FakeSource, Place, committed, settings, wired, write_base
from trainer import loop
from trainer.data.batch import Batch
from trainer.ledger.ledger import Ledger

DISK = 4
"""MiB."""


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK) as mount:
        yield mount


class Filling(FakeOptimizer):
    """Takes the room that is left on a disk, but for so many KiB, at its second step."""

    def __init__(self, disk: Path, left: int) -> None:
        super().__init__()
        self.disk, self.left = disk, left

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        metrics = super().step(batch, before_update)
        if self.weight == 2:
            free = os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_bsize
            (self.disk / "ballast").write_bytes(bytes(max(0, free - self.left * 1024)))
        return metrics

    def write(self, directory: Path) -> None:
        super().write(directory)
        (directory / "moments").write_bytes(bytes(256 * 1024))


@pytest.mark.parametrize("left", [0, 4, 64, 200], ids=lambda left: f"{left} KiB left")
def test_trainer_with_full_disk_at_checkpoint_repeats_step_once_there_is_room(small_disk: Path, tmp_path: Path, left: int) -> None:
    """A full disk stops the checkpoint, and at 0 KiB also the ledger; the step is repeated once there is room."""
    chosen = settings(write_base(tmp_path / "base"), small_disk / "policies", groups_per_batch=1)
    trainer = wired(chosen, FakeSource(["a", "b", "c"]), Filling(small_disk, left))
    with pytest.raises(SpangradError, match=r"No space left on device|disk is full|disk I/O error") as caught:
        trainer.run(follow=False)
    assert isinstance(caught.value, CheckpointError if left else CheckpointError | LedgerError)
    trainer.ledger.close()
    assert list(committed(trainer)) == [0, 1]
    (small_disk / "ballast").unlink()
    again = wired(chosen, FakeSource(["a", "b", "c"]))
    again.run(follow=False)
    assert [*committed(again).values()] == [[], ["a-0", "a-1"], ["b-0", "b-1"], ["c-0", "c-1"]]
    newest = Path(loop.newest_version(again.ledger).policy_version.path)
    assert (newest / "optimizer/weight").read_text() == "3.0"
    assert {path.name for path in newest.parent.iterdir()} == {f"v{version}" for version in committed(again) if version}


def test_trainer_whose_store_goes_away_within_step_commits_once(tiny_model: Path, tmp_path: Path) -> None:
    """The step is committed, and its copy is written when the store is back; nothing is trained twice."""
    run, store = uuid.uuid4().hex[:8], store_settings(tmp_path / "data")
    own = {"run_id": run, "branch": run, "model": tiny_model, "directory": tmp_path / "policies", "max_staleness": 9}
    chosen = Settings(store=store, trainer=trainer_settings(**own, groups_per_batch=1, publish=False))  # type: ignore[arg-type]
    child = start_store(store, tmp_path / "log")
    try:
        wait_until(lambda: store_answers(store), 60, "the store", [child], poll_seconds=0.05)
        world = BuiltRollouts(chosen, tiny_model)
        for name in "abc":
            world.group(name, [1.0, 0.0])
        trainer = trainer_over(world, chosen, Cutting(child.process.kill))
        with pytest.raises(StoreError, match="does not answer"):
            trainer.run(follow=False)
        assert trainer.ledger.committed_versions() == [0, 1, 2]
        trainer.ledger.close()
    finally:
        child.stop(grace_seconds=0)
    with running_store(store, tmp_path / "log"):
        world = BuiltRollouts(chosen, tiny_model)
        again = trainer_over(world, chosen)
        versions = "SELECT Version FROM spangrad.policy_versions WHERE Branch = %(run)s ORDER BY Version"
        assert world.rows(versions) == [(0,), (1,), (2,)], "the copy has caught up before anything is trained"
        again.run(follow=False)
        lineage = "SELECT Version, RolloutId FROM spangrad.lineage WHERE Branch = %(run)s ORDER BY Version, RolloutId"
        assert world.rows(lineage) == [(version, f"{name}-{i}") for version, name in enumerate("abc", 1) for i in range(2)]
        assert (Path(loop.newest_version(again.ledger).policy_version.path) / "optimizer/weight").read_text() == "3.0"
        again.ledger.close()


def test_trainer_whose_ledger_crashes_within_step_repeats_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is committed without it; once it is back, the step is done again."""
    with running_postgres() as server:
        url = SecretStr(server.schema("ledger"))
        chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", groups_per_batch=1, ledger_url=url)
        (tmp_path / "policies").mkdir()
        trainer = wired(chosen, FakeSource(["a", "b", "c"]), Cutting(server.crash))
        with pytest.raises(LedgerError, match=r"the ledger postgresql\+psycopg://spangrad@127.* failed \(.*\)\. See that the database"):
            trainer.run(follow=False)
        trainer.ledger.close()
        assert "failed" in caplog.text, "the lease could not be undone either, and that is said"
        server.start()
        assert list(committed(trainer)) == [0, 1]
        again = wired(chosen, FakeSource(["a", "b", "c"]))
        again.run(follow=False)
        assert committed(again) == {0: [], 1: ["a-0", "a-1"], 3: ["b-0", "b-1"], 4: ["c-0", "c-1"]}
        assert (Path(loop.newest_version(again.ledger).policy_version.path) / "optimizer/weight").read_text() == "3.0"
        for stopped in (trainer, again):
            stopped.ledger.close()


def test_trainer_waits_for_step_of_another_machine_and_takes_over_lost_step(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    where = place("policies")
    url = None if isinstance(where, Path) else SecretStr(where)
    directory = where if isinstance(where, Path) else tmp_path / "policies"
    chosen = settings(write_base(tmp_path / "base"), directory, groups_per_batch=1, ledger_url=url)
    directory.mkdir()
    trainer = wired(chosen, FakeSource(["a", "b"]))
    (batch,) = [trainer.source.load([group]) for group in trainer.source.ready()[:1]]
    elsewhere = Ledger(where, "policy", "main", lease_seconds=0.3, holder="other-host 7 123 other-boot/pid:[1]")
    lost = elsewhere.begin(batch.rollouts)
    assert lost
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 2: ["a-0", "a-1"], 3: ["b-0", "b-1"]}
    with pytest.raises(LedgerError, match="is gone"):
        elsewhere.commit(lost, checksum="", path="", tokenizer_hash="", metrics={})
    assert "process 7 on other-host makes a step of branch main: waiting for its end" in caplog.text
    assert "version 1 was never committed" in caplog.text
    trainer.ledger.close()
    elsewhere.close()


RIVAL = """
import os
import sys
import time
from pathlib import Path
from pydantic import SecretStr
from tests.support.trainers import FakeSource, settings, wired
base, directory, url, names = sys.argv[1:]
chosen = settings(Path(base), Path(directory), groups_per_batch=1, max_staleness=99, ledger_url=SecretStr(url) if url else None)
trainer = wired(chosen, FakeSource(names.split(",")))
step, made, turns = trainer.step, [], Path(base).with_name("turns")

def take_turn(batch):
    # A pause before each step: real ones last longer than the other's wait for its turn. After its first, a rival lets the other make one.
    time.sleep(0.05)
    made.append(step(batch))
    if made[-1]:
        (turns / str(os.getpid())).touch()
    while made[-1] and len(list(turns.iterdir())) < 2:
        time.sleep(0.01)
    return made[-1]

trainer.step = take_turn
print("ready", flush=True)
input()
trainer.run(follow=False)
print(sum(made))
"""


def test_trainers_of_one_branch_take_turns_without_repeating_a_step(place: Place, tmp_path: Path) -> None:
    """Two trainers share a ledger and a directory: each step continues from the one before, made by either of them."""
    names, where = [f"g{i:02}" for i in range(24)], place("policies")
    base, url = write_base(tmp_path / "base"), "" if isinstance(where, Path) else where
    directory = where if isinstance(where, Path) else tmp_path / "policies"
    directory.mkdir(exist_ok=True)
    # The fake gateway's file is there before either begins.
    (directory / "served.json").write_text("[0]")
    (tmp_path / "turns").mkdir()
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", RIVAL, str(base), str(directory), url, ",".join(names)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    rivals = [subprocess.Popen(command, text=True, env=env, **pipes) for _ in range(2)]
    for rival in rivals:
        assert rival.stdout
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        assert rival.stdin
        rival.stdin.write("go\n")
        rival.stdin.flush()
    ended = [(*rival.communicate(timeout=200), rival.returncode) for rival in rivals]
    assert [code for *_, code in ended] == [0, 0], ended
    assert all(int(out) for out, *_ in ended), "one made all the steps"
    ledger = Ledger(where, "policy", "main")
    versions = [version for version in ledger.versions() if version.status is VersionStatus.COMMITTED]
    assert [version.policy_version.parent for version in versions] == [None, *(version.version for version in versions[:-1])]
    trained = [row.rollout_id for version in versions for row in ledger.batch(version.policy_version.batch_id or "")]
    assert trained == [f"{name}-{i}" for name in names for i in range(2)]
    assert (Path(versions[-1].policy_version.path) / "optimizer/weight").read_text() == "24.0", "a step was lost, or done twice"
    ledger.close()
