"""Steps after a long history: what a step asks of the ledger does not grow with the number of steps before it."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import event

from spangrad.settings import StoreSettings, TrainerSettings
from spangrad.types import VersionStatus
from tests.support.trainers import SPEC, FakeSource, settings, wired, write_base
from trainer.ledger.demand import Consumption
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.skipped_groups import SkippedGroup, SkippedGroups
from trainer.ledger.skips import SkipReason
from trainer.ledger.tables import BATCH_ROLLOUTS, HEADS, SKIPPED, VERSIONS, LedgerDatabase
from trainer.loop import Trainer

GROUPS = 4
"""Groups that each past step has trained, of two rollouts each; as many were skipped."""
INSTRUCTIONS = 10
"""Instructions of SQLite's machine that are counted at once."""
OF_BRANCH = {"policy": "policy", "branch": "main"}


def trainer_after(steps: int, directory: Path, max_staleness: int) -> Trainer:
    """Return a trainer whose branch has made so many steps; of the weights, the newest are still there."""
    directory.mkdir()
    chosen = settings(write_base(directory / "base"), directory / "own", max_staleness=max_staleness)
    first = wired(chosen, FakeSource(["a", "b"]))
    first.run(follow=False)
    facts = {**OF_BRANCH, "parent_branch": "main", "run_id": "run", "modes": "train", "status": VersionStatus.COMMITTED}
    head = first.ledger.frontier()
    assert head
    newest = Path(head.policy_version.path).with_name(f"v{steps}")
    shutil.copytree(head.policy_version.path, newest)
    versions: list[dict[str, Any]] = [
        {**facts, "version": number, "parent": number - 1, "batch_id": f"b{number}", "tokenizer_hash": head.tokenizer_hash}
        | {"path": str(newest) if number == steps else f"/gone/v{number}", "checksum": head.policy_version.checksum}
        for number in range(2, steps + 1)
    ]
    of_run = {**OF_BRANCH, "run_id": "run", "mode": "train", "build_spec": SPEC, "attempt": 0, "revision": 0}
    rollouts: list[dict[str, Any]] = [
        {**of_run, "batch_id": f"b{number}", "group_id": f"g{number}-{place // 2}", "rollout_id": f"g{number}-{place // 2}-{place % 2}"}
        for number in range(2, steps + 1)
        for place in range(2 * GROUPS)
    ]
    of_skip = {**OF_BRANCH, "run_id": "run", "mode": "train", "build_spec": SPEC, "reason": SkipReason.EQUAL.value, "detail": ""}
    skipped: list[dict[str, Any]] = [
        {
            **of_skip,
            "group_id": f"s{number}-{place}",
            "basis": first.ledger.skips.bases[SkipReason.EQUAL],
            "version": number,
            "committed": number - 1,
            "skipped_at": 0,
        }
        for number in range(2, steps + 1)
        for place in range(GROUPS)
    ]
    with first.ledger.database.transaction() as transaction:
        transaction.execute(VERSIONS.insert(), versions)
        transaction.execute(SKIPPED.insert(), skipped)
        transaction.execute(BATCH_ROLLOUTS.insert(), rollouts)
        transaction.execute(HEADS.update().values(version=steps))
    first.close()
    first.ledger.close()
    trainer = wired(chosen, FakeSource([], version=steps))
    train(trainer, "c", "d")  # history is read once
    return trainer


def train(trainer: Trainer, *names: str) -> None:
    """Make a step of two groups."""
    head = trainer.branch.head()
    assert isinstance(trainer.source, FakeSource)
    trainer.source.names, trainer.source.version = [*names], head.version
    trainer.source.changes = {name: {"TokenizerHash": head.tokenizer_hash} for name in names}
    trainer.run(follow=False)
    assert trainer.branch.steps() == head.version + 1


def work(database: LedgerDatabase, act: Callable[[], object]) -> int:
    """Do something, and return what SQLite did for it, in tens of instructions."""
    counted, lock = 0, threading.Lock()

    def count() -> int:
        nonlocal counted
        with lock:
            counted += 1
        return 0

    def watch(connection: Any, *_: object) -> None:
        connection.set_progress_handler(count, INSTRUCTIONS)

    def leave(connection: Any, *_: object) -> None:
        connection.set_progress_handler(None, INSTRUCTIONS)

    watched = {"checkout": watch, "checkin": leave}
    pool = database.engine.pool
    for name, handler in watched.items():
        event.listen(pool, name, handler)
    try:
        act()
    finally:
        for name, handler in watched.items():
            event.remove(pool, name, handler)
    return counted


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_step_asks_no_more_of_the_ledger_after_a_hundred_times_as_many_steps(tmp_path: Path, max_staleness: int) -> None:
    counts: list[int] = []
    for steps in (30, 3000):
        trainer = trainer_after(steps, tmp_path / f"{steps}", max_staleness)
        counts.append(work(trainer.ledger.database, partial(train, trainer, "e", "f")))
        # A machine that is busy meanwhile has heartbeats and looks in between: the lesser of two steps has few of them.
        counts[-1] = min(counts[-1], work(trainer.ledger.database, partial(train, trainer, "g", "h")))
        consumed = Consumption(trainer.ledger, trainer.settings.trainer, SPEC).read()
        assert (consumed.steps, consumed.trained) == (steps + 3, GROUPS * (steps - 1) + 8)
        assert trainer.demand.figures(0)["groups_wanted"] >= consumed.groups
        trainer.close()
        trainer.ledger.close()
    assert counts[0] > 0
    assert counts[1] <= 1.2 * counts[0], counts


def skips_of(steps: int, directory: Path) -> SkippedGroups:
    """Return the skipped groups of a branch of so many steps: some of each step, entered in any order."""
    facts = {**OF_BRANCH, "run_id": "run", "mode": "train", "build_spec": SPEC, "detail": "", "basis": "{}"}
    rows = [
        {
            **facts,
            "group_id": f"{number}-{place}",
            "reason": reason.value,
            "version": number,
            "committed": number,
            "skipped_at": 1000 * number + place // 2,
        }
        for number in range(steps)
        for place, reason in enumerate([SkipReason.STALE, *[SkipReason.EQUAL] * (GROUPS - 1)])
    ]
    database = LedgerDatabase(directory)
    with database.transaction() as transaction:
        transaction.execute(SKIPPED.insert(), random.Random(0).sample(rows, len(rows)))
    return SkippedGroups(database, OF_BRANCH, TrainerSettings())


def test_newest_skipped_groups_cost_the_same_after_many_steps(tmp_path: Path) -> None:
    costs: list[list[int]] = []
    for steps in (40, 4000):
        skips = skips_of(steps, tmp_path / f"{steps}")
        middle = skips.newest(limit=1, until=steps // 2)[0].place
        pages = [{"limit": 20}, {"limit": 20, "after": middle}, {"limit": 20, "since": 3, "until": 5}]
        costs.append([work(skips.database, partial(skips.newest, **page)) for page in pages])
        skips.database.close()
    few, many = costs
    assert all(0 < after <= 1.1 * before for before, after in zip(few, many, strict=True)), costs


def test_newest_skipped_groups_are_read_page_by_page_by_version(tmp_path: Path) -> None:
    skips = skips_of(5, tmp_path)
    everything = sorted(skips.read(), key=lambda row: row.place, reverse=True)
    pages: list[SkippedGroup] = []
    while page := skips.newest(limit=3, after=pages[-1].place if pages else ()):
        pages += page
    assert (pages, len(pages)) == (everything, 5 * GROUPS)
    between = [row for row in everything if row.version in {2, 3}]
    assert skips.newest(limit=100, since=2, until=4) == between
    assert skips.newest(limit=100, after=between[1].place, since=2, until=4) == between[2:]
    assert [*skips.counts(since=2, until=4).items()] == [(SkipReason.EQUAL, 2 * GROUPS - 2), (SkipReason.STALE, 2)]
    skips.database.close()


class WholeStore:
    """Store that has what the ledger has."""

    url = "http://store"

    def __init__(self, ledger: Ledger) -> None:
        rows = ledger.versions()
        # A NaN that comes from a store is another object than that of the ledger.
        metrics = [{name: float(str(value)) for name, value in row.metrics.items()} for row in rows]
        self._versions = [(row.version, row.status, row.policy_version.checksum, of) for row, of in zip(rows, metrics, strict=True)]
        self._batches = {batch: len(ledger.batch(batch)) for row in rows if (batch := row.policy_version.batch_id)}

    def query(self, sql: str, parameters: Mapping[str, object]) -> SimpleNamespace:
        return SimpleNamespace(result_rows=self._versions if "policy_versions" in sql else [*self._batches.items()])


def test_mirror_asks_for_all_batches_at_once(tmp_path: Path) -> None:
    counts = [statements_of_catching_up(tmp_path / f"{steps}", steps) for steps in (30, 600)]
    assert counts[0] == counts[1]
    assert max(counts[0]) < 12


def statements_of_catching_up(directory: Path, steps: int) -> list[int]:
    """Return the number of statements by which a mirror finds that the store lacks nothing: of all versions, and of the newest."""
    trainer = trainer_after(steps, directory, 0)
    store: Any = WholeStore(trainer.ledger)
    statements = list[str]()

    def note(_connection: object, _cursor: object, sql: str, *_: object) -> None:
        statements.append(sql)

    event.listen(trainer.ledger.database.engine, "before_cursor_execute", note)
    counts: list[int] = []
    for since in (0, steps):
        statements.clear()
        assert Mirror(store, StoreSettings(), trainer.ledger).catch_up(since) == 0
        counts.append(len(statements))
    trainer.close()
    trainer.ledger.close()
    return counts


def test_mirror_of_a_ledger_that_lacks_versions_of_the_store_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_after(2, tmp_path / "2", 0)
    store: Any = WholeStore(trainer.ledger)
    assert Mirror(store, StoreSettings(), trainer.ledger).catch_up() == 0
    assert "which the ledger lacks" not in caplog.text
    store._versions.append((9, "committed", "float32:1", {}))
    assert Mirror(store, StoreSettings(), trainer.ledger).catch_up() == 0
    trainer.close()
    trainer.ledger.close()
    assert "has version policy@9 on branch main, which the ledger lacks" in caplog.text


def test_mirror_metrics_that_are_no_numbers_are_written_once(tmp_path: Path) -> None:
    trainer = trainer_after(2, tmp_path / "2", 0)
    trainer.ledger.add_metrics(2, {"validate_return": float("nan")})
    store: Any = WholeStore(trainer.ledger)
    assert Mirror(store, StoreSettings(), trainer.ledger).catch_up() == 0
    trainer.close()
    trainer.ledger.close()


def test_mirror_row_written_before_newer_one_is_written_again(tmp_path: Path) -> None:
    trainer = trainer_after(2, tmp_path / "2", 0)
    rows: list[list[Any]] = []

    class Store:
        """Store into which another process writes a version's newer row while this one's first row is on its way."""

        url = "http://store"

        def insert(self, table: str, values: list[list[Any]], column_names: Sequence[str]) -> None:
            if table.endswith("policy_versions"):
                if not rows:
                    trainer.ledger.add_metrics(2, {"validate_return": float("nan")})
                    rows.extend([["the newer row"]])
                rows.extend(values)

    mirror = Mirror(cast("Any", Store()), StoreSettings(), trainer.ledger)
    mirror.write(trainer.ledger.version(2))
    assert ["validate_return" in row[-1] for row in rows[1:]] == [False, True]
    trainer.close()
    trainer.ledger.close()
