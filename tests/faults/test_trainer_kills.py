"""A trainer killed while it trains: the weights are those of a run that nothing disturbed, bit by bit (law 4).

The span store is fixed, the optimizer verl's, the trainer one process; it is killed at any instruction, its start included.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from spangrad.settings import Settings, StoreSettings
from spangrad.types import VersionStatus
from tests.support.built_rollouts import POISON, BuiltRollouts
from tests.support.policies import trainer_settings
from tests.support.processes import OF_VERL, Forked, forked
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import SkipReason
from trainer.ledger.tables import LedgerVersion
from trainer.publish import checkpoint

GROUPS = 2
"""A step."""
LOADED = "is loaded on"
"""Text of the log once the weights are loaded."""
TRAIN = """
import json, logging, sys
from spangrad.settings import Settings
from trainer.run import train
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
train(Settings.model_validate(json.loads(sys.argv[1])), follow=False)
"""


def start(settings: Settings, log: Path) -> Forked:
    """Begin to train, in a process of its own."""
    values = {"trainer": settings.trainer.model_dump(mode="json"), "store": settings.store.model_dump(mode="json")}
    with log.open("ab") as out:
        return forked(["-c", TRAIN, json.dumps(values)], out, out, {**os.environ, **OF_VERL, "SPANGRAD_CONFIG": ""}, kind="trainer")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "steps", "every"), [(3, 3, 2), pytest.param(50, 6, 1, marks=pytest.mark.slow), pytest.param(50, 6, 3, marks=pytest.mark.slow)]
)
def test_trainer_killed_at_random_points_ends_with_undisturbed_weights(
    kills: int,
    steps: int,
    every: int,
    store: StoreSettings,
    tiny_model: Path,
    tmp_path: Path,
    chance: Random,
    report: Callable[[str], None],
) -> None:
    run = f"kills-{uuid.uuid4().hex[:8]}"

    def settings(name: str) -> Settings:
        own = {"run_id": run, "branch": f"{run}-{name}", "model": tiny_model, "directory": tmp_path / name, "publish": False}
        learning = {
            "groups_per_batch": GROUPS,
            "learning_rate": 1e-3,
            "max_staleness": 99,
            "credit__scheme": "identical",
            "max_failed_share": 1.0,
        }
        # A trainer that starts anew compares old rows with the weights of their versions, which it reads from their checkpoints.
        return Settings(store=store, trainer=trainer_settings(**own, **learning, checkpoint__keep=99, checkpoint__every=every))  # type: ignore[arg-type]

    world = BuiltRollouts(settings("world"), tiny_model)
    poisoned = {reason: spoil for reason, spoil in POISON.items() if reason is not SkipReason.ALREADY_TRAINED}  # which needs a trained one
    first_in = dict(zip(range(0, steps * GROUPS, GROUPS), poisoned.items(), strict=False))
    for i in range(steps * GROUPS):
        if i in first_in:
            reason, spoil = first_in[i]
            world.group(f"g{i:02}-{reason}", [1.0, 0.0, 0.25], calls=({}, {}), spoil=partial(spoil, trained=""))
        world.group(f"g{i:02}", [1.0, 0.0, 0.25], calls=({}, {}))

    log = tmp_path / "log"
    whole = settings("whole")
    trainer = start(whole, log)
    wait_for_weights(log, 0)
    began = time.monotonic()
    assert trainer.wait() == 0, log.read_text()
    seconds = time.monotonic() - began
    expected = story(whole)
    assert len({checksum for checksum, _ in expected}) == steps + 1, "every step moves the weights"
    assert sorted(rollout for _, batch in expected for rollout in batch) == sorted(
        f"g{i:02}-{j}" for i in range(steps * GROUPS) for j in range(3)
    )

    fell = Counter[str]()
    runs = 0
    while fell.total() < kills:
        runs += 1
        killed = settings(f"killed-{runs}")
        while True:
            done = len(story(killed)) if (killed.trainer.directory / "ledger.db").exists() else 1
            seen = len(log.read_text())
            trainer = start(killed, log)
            if fell.total() < kills and done <= steps:
                resolve_targets(killed, log, seen, chance, seconds * (steps + 1 - done) / steps)
                trainer.kill()
            code = trainer.wait()
            if code == 0:
                break
            assert code == -signal.SIGKILL, log.read_text()[seen:]
            fell[place(killed)] += 1
        assert story(killed) == expected
        assert skipped(killed) == {f"g{i:02}-{reason}": reason for i, (reason, _) in first_in.items()}
        assert left_behind(killed) == set()
        assert mirrored(world, killed) == [(version.version, version.status) for version in versions(killed)]
    report(f"{fell.total()} kills in {runs} runs of {steps} steps ({seconds:.1f} s undisturbed): {dict(sorted(fell.items()))}")


def resolve_targets(settings: Settings, log: Path, seen: int, chance: Random, seconds: float) -> None:
    """Wait for the moment of a kill: a random one of the start or of all steps, or of the milliseconds around checkpoint and commit."""
    stage = chance.choice(["start", "steps", "checkpoint", "commit"])
    directory = checkpoint.branch_directory(settings.trainer)
    if stage == "start":
        time.sleep(chance.uniform(0, 1))
        return
    wait_for_weights(log, seen)
    if stage == "steps":
        time.sleep(chance.uniform(0, seconds))
        return
    there = set(directory.glob("*"))
    awaited = ".writing-*" if stage == "checkpoint" else "v*"
    end = time.monotonic() + 2 * seconds
    while time.monotonic() < end and not set(directory.glob(awaited)) - there:
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.02))


def wait_for_weights(log: Path, seen: int) -> None:
    end = time.monotonic() + 300
    while LOADED not in log.read_text()[seen:]:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.002)


def versions(settings: Settings) -> list[LedgerVersion]:
    ledger = Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)
    try:
        return ledger.versions()
    finally:
        ledger.close()


def story(settings: Settings) -> list[tuple[str, list[str]]]:
    """The checksum of each committed version, and the rollouts that made it; they are one line, and the last one's files are whole."""
    ledger = Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)
    committed = [version for version in ledger.versions() if version.status is VersionStatus.COMMITTED]
    assert [version.policy_version.parent for version in committed[1:]] == [version.version for version in committed[:-1]]
    if committed:
        assert ledger.frontier() == committed[-1]
        checkpoint.verify(Path(committed[-1].policy_version.path), committed[-1].policy_version.checksum)
    batches = [
        (version.policy_version.checksum, [row.rollout_id for row in ledger.batch(version.policy_version.batch_id or "")])
        for version in committed
    ]
    ledger.close()
    return batches


def skipped(settings: Settings) -> dict[str, SkipReason]:
    """The groups that the branch has skipped, and why."""
    ledger = Ledger(settings.trainer.directory, settings.trainer.policy, settings.trainer.branch)
    try:
        return {group.group_id: reason for group, reason in ledger.skips.reasons().items()}
    finally:
        ledger.close()


def left_behind(settings: Settings) -> set[str]:
    """Directories that no committed version has."""
    directory = checkpoint.branch_directory(settings.trainer)
    known = {f"v{version.version}" for version in versions(settings) if version.status is VersionStatus.COMMITTED}
    return {path.name for path in directory.iterdir()} - known


def mirrored(world: BuiltRollouts, settings: Settings) -> list[tuple[int, str]]:
    """Return the versions of the branch with their statuses, as the store has them."""
    query = "SELECT Version, Status FROM spangrad.policy_versions WHERE Branch = %(branch)s ORDER BY Version"
    return [
        (int(version), status) for version, status in world.client.query(query, parameters={"branch": settings.trainer.branch}).result_rows
    ]


def place(settings: Settings) -> str:
    """Return the point of its work at which a trainer was killed, as far as its files show."""
    if not (settings.trainer.directory / "ledger.db").exists():
        return "before there was a ledger"
    known = {version.version: version.status for version in versions(settings)}
    directory = checkpoint.branch_directory(settings.trainer)
    if None not in known.values():
        return "between two steps, or at its start"
    if any(directory.glob(".writing-*")):
        return "while it wrote a checkpoint"
    under_way = next(version for version, status in known.items() if status is None)
    return "between checkpoint and commit" if (directory / f"v{under_way}").exists() else "in a step"
