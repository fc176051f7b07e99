"""The queue's laws in transactions: what may become of rollouts, in whatever order things are told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from sqlalchemy import event

from runner.queue import rows
from runner.queue.endings import Endings, close_endings, not_running
from runner.queue.purge import expired
from runner.queue.rows import Defaults
from runner.queue.tables import ATTEMPTS, GROUPS, METADATA, ROLLOUTS, RUNS, QueueDatabase
from runner.queue.wire import ClosedEndings, Completion, Ending, Failure, LeaseRequest, RolloutSelector, RolloutState
from spangrad.database import Database, Owner, insert_new
from spangrad.errors import QueueError
from spangrad.http.queue_messages import DemandRequest
from spangrad.types import AttemptFailure
from tests.support.runners import new_rollouts

DEFAULTS = Defaults(lambda _: 300, max_attempts=2, lease_seconds=30)
LONG_AGO = 1.7e9
"""Time of the ends of rollouts that a test writes itself, in seconds since 1970."""
REASONS = st.sampled_from([AttemptFailure.CRASH, AttemptFailure.LOST, AttemptFailure.RELEASED, AttemptFailure.TIMEOUT])


def success(rollout_id: str, attempt: int = 0, calls: int | None = None, seconds: float | None = None) -> Completion:
    return Completion(rollout_id=rollout_id, attempt=attempt, rewards={"reward": 1.0}, calls=calls, seconds=seconds)


def failure(
    rollout_id: str, attempt: int, reason: AttemptFailure, calls: int | None = None, seconds: float | None = None, *, retry: bool = True
) -> Failure:
    detail = f"it failed by {reason}"
    return Failure(rollout_id=rollout_id, attempt=attempt, reason=reason, detail=detail, calls=calls, seconds=seconds, retry=retry)


class Story(RuleBasedStateMachine):
    """Anything may be told at any time, early, late and twice; the rows stay true, and a rollout succeeds once."""

    @initialize()
    def begin(self) -> None:
        self.database = Database(sa.make_url("sqlite://"), METADATA, Owner("it", "it", QueueError, "it.", 0, "It."))
        with self.database.transaction() as transaction:
            self.endings = Endings(transaction)
        self.count = 0
        self.attempts: set[tuple[str, int]] = set()
        """Attempts that were handed out, as (rollout id, attempt)."""
        self.taken: dict[tuple[str, int], Ending] = {}
        """The ending of each attempt that was accepted."""

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()

    @rule(count=st.integers(1, 4), priority=st.integers(-1, 1), attempts=st.integers(1, 3))
    def enqueue(self, count: int, priority: int, attempts: int) -> None:
        new = new_rollouts(count, f"{self.count}-", group_size=2, priority=priority, max_attempts=attempts)
        self.count += 1
        ids = [one.rollout_id or "" for one in new]
        with self.database.transaction() as transaction:
            assert rows.enqueue(transaction, "run", new, ids, DEFAULTS) == 0
            assert rows.enqueue(transaction, "run", new, ids, DEFAULTS) == count, "twice is once"

    @rule(count=st.integers(1, 5))
    def hand_out(self, count: int) -> None:
        with self.database.transaction() as transaction:
            waiting = self.rows(transaction, RolloutState.QUEUED)
            leases = rows.hand_out(transaction, LeaseRequest(run_id="run", worker="w", count=count), 30)
            assert rows.hand_out(transaction, LeaseRequest(run_id="other run", worker="w", count=count), 30) == []
        expected = sorted(waiting, key=lambda row: (-row.priority, row.seq))[:count]
        assert [(one.rollout_id, one.attempt) for one in leases] == [(row.rollout_id, row.attempt + 1) for row in expected]
        assert [one.last for one in leases] == [row.attempts_left == 1 for row in expected]
        self.attempts |= {(one.rollout_id, one.attempt) for one in leases}

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), reason=st.none() | REASONS, retry=st.booleans(), times=st.integers(1, 2))
    def end(self, data: st.DataObject, reason: AttemptFailure | None, retry: bool, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.attempts)))
        ending = success(*key, 3, 0.5) if reason is None else failure(*key, reason, 3, 0.5, retry=retry)
        with self.database.transaction() as transaction:
            before = {row.rollout_id: row for row in self.rows(transaction)}[key[0]]
            results = self.endings.end(transaction, [ending] * times)
            receipts = [not_running(transaction, [key])]
        accepted = before.state == RolloutState.RUNNING and before.attempt == key[1]
        if accepted:
            first = self.taken[key] = ending
        first = self.taken.get(key)
        same = (replace(first, retry=retry) if isinstance(first, Failure) else first) == ending or (
            key in self.taken and reason in {AttemptFailure.LOST, AttemptFailure.RELEASED} and self.taken[key].reason is reason
        )
        assert {result.refused is None for result in results} == {accepted or same}
        assert len({result.state for result in results}) == 1, "a repeat is answered as the first was"
        assert len(receipts[0]) == 1, "its worker learns that it is over"

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([f"{number}- group 0" for number in range(self.count)]))
        with self.database.transaction() as transaction:
            open_rows = [row for row in self.rows(transaction, RolloutState.QUEUED, RolloutState.RUNNING) if row.group_id == group]
            cancelled, held = self.endings.cancel(transaction, RolloutSelector(run_id="run", group_id=group))
        running = {(row.rollout_id, row.attempt) for row in open_rows if row.state == RolloutState.RUNNING}
        assert (cancelled.queued, cancelled.running, set(held)) == (len(open_rows) - len(running), len(running), running)
        for key in running:
            self.taken[key] = failure(*key, AttemptFailure.CANCELLED)

    @rule()
    def retry(self) -> None:
        with self.database.transaction() as transaction:
            dead = {row.rollout_id for row in self.rows(transaction, RolloutState.DEAD)}
            assert self.endings.retry(transaction, RolloutSelector(run_id="run")) == len(dead)
            assert {row.rollout_id for row in self.rows(transaction, RolloutState.QUEUED)} >= dead

    @invariant()
    def rows_are_true(self) -> None:
        if not hasattr(self, "database"):
            return
        with self.database.reading() as connection:
            rollouts = self.rows(connection)
            attempts = connection.execute(sa.select(ATTEMPTS)).all()
            groups = [bool(cancelled) for cancelled in connection.execute(sa.select(GROUPS.c.cancelled)).scalars()]
            demand = rows.demand(connection, "run")
            counts = {state: number for run in rows.counts(connection) for state, number in run.states.items()}
        assert counts == Counter(RolloutState(row.state) for row in rollouts)
        assert (demand.enqueued, demand.cancelled) == (groups.count(False), groups.count(True))
        ended = {(row.rollout_id, row.attempt): row for row in attempts}
        for row in rollouts:
            running = row.state == RolloutState.RUNNING
            numbers = sorted(number for name, number in ended if name == row.rollout_id)
            assert numbers == list(range(row.attempt + (not running))), "each attempt but the one under way has ended, once"
            assert (row.worker is not None) == running
            good = [number for number in numbers if ended[row.rollout_id, number].reason is None]
            assert len(good) == (row.state == RolloutState.SUCCEEDED), "it succeeded once, or not at all"
            assert 0 <= row.attempts_left <= row.max_attempts
            assert (row.ended is None) == (row.state in {RolloutState.QUEUED, RolloutState.RUNNING})
        ends = [row.ended for row in rollouts if row.ended is not None]
        assert len(set(ends)) == len(ends), "each end has a place of its own"
        assert {key: row.reason for key, row in ended.items()} == {key: ending.reason for key, ending in self.taken.items()}

    def rows(self, connection: sa.Connection, *states: RolloutState) -> list[Any]:
        query = sa.select(ROLLOUTS)
        return list(connection.execute(query.where(ROLLOUTS.c.state.in_(states)) if states else query))


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


class TestHandOut:
    """One statement, and as much work for a long queue as for a short one."""

    @pytest.fixture
    def database(self, queue_db: str) -> Iterator[QueueDatabase]:
        database = QueueDatabase(queue_db)
        yield database
        database.close()

    def test_hand_out_is_one_statement_that_reads_the_index(self, database: QueueDatabase) -> None:
        fill(database, 100_000)
        with database.transaction() as transaction:
            with self.statements(database) as seen:
                leases = rows.hand_out(transaction, LeaseRequest(run_id="run 7", worker="w", count=20), 30)
            ((statement, parameters),) = seen
            explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
            plan = "\n".join(str(row[-1]) for row in transaction.exec_driver_sql(f"{explain} {statement}", parameters))
        assert "rollouts_by_state" in plan
        assert "Seq Scan" not in plan
        assert "SCAN rollouts" not in plan
        assert "B-TREE" not in plan, "nothing is sorted"
        by_priority = [(one.priority, int(one.rollout_id)) for one in leases]
        assert by_priority == sorted(by_priority, key=lambda pair: (-pair[0], pair[1]))
        assert (len(leases), {one.priority for one in leases}) == (20, {9})

    @contextmanager
    def statements(self, database: QueueDatabase) -> Iterator[list[tuple[str, Any]]]:
        """Yield the list of statements that the driver executes, with their parameters."""
        seen: list[tuple[str, Any]] = []

        def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            seen.append((statement, parameters))

        event.listen(database.engine, "before_cursor_execute", note)
        try:
            yield seen
        finally:
            event.remove(database.engine, "before_cursor_execute", note)


PAGE: dict[str, Any] = {"group_id": None, "after": 0, "limit": 20}
DEMAND = DemandRequest(policy="policy", branch="main", groups=9, oldest_version=0, filled=1)
ASK = LeaseRequest(run_id="run 7", worker="w", count=20)
REPEATED: dict[str, Callable[[sa.Connection], object]] = {
    "hand-out": lambda c: rows.hand_out(c, ASK, 30),
    "enqueue": lambda c: rows.enqueue(c, "run 7", new_rollouts(8, "new"), [f"new {i}" for i in range(8)], DEFAULTS),
    "demand": lambda c: rows.demand(c, "run 7"),
    "want": lambda c: rows.want(c, "run 7", DEMAND),
    "queued": lambda c: rows.queued(c, "run 7", 50),
    "counts of a run": lambda c: rows.counts(c, "run 7"),
    "counts of all runs": lambda c: rows.counts(c),
    "beginning of a server": lambda c: (Endings(c), rows.running(c)),
    "endings": lambda c: Endings(c).end(c, [success(lease.rollout_id) for lease in rows.hand_out(c, ASK, 30)]),
    "cancellation of a group": lambda c: Endings(c).cancel(c, RolloutSelector(run_id="run 7", group_id="7")),
    "closed endings": lambda c: close_endings(c, ClosedEndings(run_id="run 7", cursor=1)),
    "purge of nothing": lambda c: expired(c, LONG_AGO - 1, None),
    "list of a group": lambda c: rows.listed(c, run_id="run 7", state=None, **{**PAGE, "group_id": "7"}),
    "ended": lambda c: rows.ended(c, "run 7", 0, 20),
    "list": lambda c: rows.listed(c, run_id="run 7", state=None, **PAGE),
    "list of all runs": lambda c: rows.listed(c, run_id=None, state=None, **PAGE),
    "list, newest first": lambda c: rows.listed(c, run_id="run 7", state=None, newest_first=True, **PAGE),
    "list of succeeded": lambda c: rows.listed(c, run_id="run 7", state=RolloutState.SUCCEEDED, newest_first=True, **PAGE),
    "list of succeeded, all runs": lambda c: rows.listed(c, run_id=None, state=RolloutState.SUCCEEDED, newest_first=True, **PAGE),
    "list of failed": lambda c: rows.listed(c, run_id="run 7", state=RolloutState.FAILED, **PAGE),
}
"""Statements that are repeated while a run goes on."""


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the steps of SQLite's machine for each of `REPEATED`: with 2,000 rollouts, of which half have ended, and with 102,000."""
    database = QueueDatabase(f"sqlite:///{tmp_path_factory.mktemp('queue')}/queue.db")
    steps: dict[str, list[int]] = {name: [] for name in REPEATED}
    for count in (1000, 50_000):
        fill(database, count)
        fill(database, count, state="succeeded")
        for name, act in REPEATED.items():
            with database.transaction() as transaction:
                driver: Any = transaction.connection.driver_connection
                steps[name].append(0)

                def count_step(name: str = name) -> int:
                    steps[name][-1] += 1
                    return 0

                done = transaction.begin_nested()
                driver.set_progress_handler(count_step, 1)
                act(transaction)
                driver.set_progress_handler(None, 1)
                done.rollback()  # each is done to the same rows
    database.close()
    return steps


@pytest.mark.parametrize("name", REPEATED)
def test_queue_statements_cost_no_more_after_fifty_times_as_many_rollouts(costs: dict[str, list[int]], name: str) -> None:
    few, many = costs[name]
    assert 0 < many <= 1.1 * few


def fill(database: QueueDatabase, count: int, state: str = "queued") -> None:
    """Put so many rollouts of ten runs into it, and their groups, without the queue's help."""
    numbers = (
        f"WITH RECURSIVE t(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM t WHERE i < {count - 1}) SELECT i FROM t"
        if database.is_sqlite
        else f"SELECT i FROM generate_series(0, {count - 1}) AS t(i)"
    )
    with database.transaction() as transaction:
        begun = transaction.execute(sa.select(sa.func.coalesce(sa.func.max(ROLLOUTS.c.seq), 0))).scalar_one()
        ended, ended_at = ("NULL", "NULL") if state == "queued" else (f"i + {begun}", LONG_AGO)
        transaction.exec_driver_sql(
            "INSERT INTO rollouts (rollout_id, run_id, task_id, input, mode, group_id, group_size, priority, timeout_seconds, "
            "max_attempts, attempts_left, state, attempt, ended, ended_at) "
            f"SELECT CAST(i + {begun} AS VARCHAR), 'run ' || CAST(i - i / 10 * 10 AS VARCHAR), 't', '1', 'train', "
            f"CAST((i + {begun}) / 8 AS VARCHAR), 8, i / 10 - i / 100 * 10, 60, 2, 2, '{state}', -1, {ended}, {ended_at} "
            f"FROM ({numbers}) AS numbers"
        )
        for run in {f"run {number}" for number in range(min(count, 10))}:
            insert_new(transaction, RUNS, [{"run_id": run}])
            rows.add_counts(transaction, run, {"rollouts": count // 10, **({} if state == "queued" else {state: count // 10})})
        groups = sa.select(ROLLOUTS.c.run_id, ROLLOUTS.c.group_id, ROLLOUTS.c.mode).distinct().where(ROLLOUTS.c.seq > begun)
        insert_new(transaction, GROUPS, [dict(row) for row in transaction.execute(groups).mappings()])


def test_ended_rollouts_are_listed_in_order_of_their_ends(queue_db: str) -> None:
    database = QueueDatabase(queue_db)
    names = [f"r{i}" for i in range(30)]
    order = random.Random(0).sample(names, 30)
    with database.transaction() as transaction:
        rows.enqueue(transaction, "run", new_rollouts(30), names, DEFAULTS)
        endings = Endings(transaction)
        rows.hand_out(transaction, LeaseRequest(run_id="run", worker="w", count=30), 30)
        for name in order[:10]:
            endings.end(transaction, [success(name)])
        endings.cancel(transaction, RolloutSelector(rollout_ids=order[10:20]))
        later = Endings(transaction)  # as a server that is started again does
        later.end(transaction, [failure(name, 0, AttemptFailure.CRASH, retry=False) for name in order[20:]])
        first = rows.ended(transaction, "run", 0, 15)
        rest = rows.ended(transaction, "run", first.cursor, 100)
    shown = [one.rollout_id for one in [*first.rollouts, *rest.rollouts]]
    assert (shown[:10], sorted(shown[10:20]), shown[20:]) == (order[:10], sorted(order[10:20]), order[20:])
    assert len(first.rollouts) == 15
    assert rest.cursor == rest.rollouts[-1].cursor
    database.close()


def test_ended_cursor_number_of_rollback_is_not_reused(queue_db: str) -> None:
    database = QueueDatabase(queue_db)
    with database.transaction() as transaction:
        rows.enqueue(transaction, "run", new_rollouts(2, max_attempts=1), ["r0", "r1"], DEFAULTS)
        endings = Endings(transaction)
        rows.hand_out(transaction, LeaseRequest(run_id="run", worker="w", count=2), 30)
        endings.end(transaction, [failure(name, 0, AttemptFailure.CRASH) for name in ("r0", "r1")])
        cursor = rows.ended(transaction, "run", 0, 100).cursor
        assert endings.retry(transaction, RolloutSelector(run_id="run")) == 2
        later = Endings(transaction)  # as a server that is started again does
        rows.hand_out(transaction, LeaseRequest(run_id="run", worker="w", count=2), 30)
        later.end(transaction, [success(name, 1) for name in ("r1", "r0")])
        ended = rows.ended(transaction, "run", cursor, 100).rollouts
    assert [one.rollout_id for one in ended] == ["r1", "r0"], "whoever waits for what ends after the first two hears of both"
    database.close()


def test_queue_reads_with_ending_between_their_statements_are_of_one_moment(queue_db: str) -> None:
    database = QueueDatabase(queue_db)
    with database.transaction() as transaction:
        rows.enqueue(transaction, "run", new_rollouts(2), ["r0", "r1"], DEFAULTS)
        rows.hand_out(transaction, LeaseRequest(run_id="run", worker="w", count=2), 30)
        endings = Endings(transaction)
    running = ["r0", "r1"]

    def end_after_rollouts_are_read(connection: sa.Connection, _: object, statement: str, *__: object) -> None:
        if running and statement.startswith("SELECT rollouts.") and "spangrad_reading" in connection.get_execution_options():
            name = running.pop()
            with database.transaction() as transaction:
                endings.end(transaction, [success(name)])

    event.listen(database.engine, "after_cursor_execute", end_after_rollouts_are_read)
    with database.reading() as connection:
        read = rows.rollout(connection, "r1")
    assert read
    assert [(attempt.attempt, attempt.ended_at) for attempt in read.attempts] == [(0, None)]
    assert running == ["r0"]
    database.close()


def test_queue_sqlite_commits_are_synchronous(tmp_path: Path) -> None:
    database = QueueDatabase(f"sqlite:///{tmp_path}/queue.db")
    with database.reading() as connection:
        pragmas = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("journal_mode", "synchronous")}
    database.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2}, "FULL: each commit waits for the log's fsync"


def test_queue_database_in_use_raises(queue_db: str) -> None:
    first = QueueDatabase(queue_db)
    with pytest.raises(QueueError, match=r"another `spangrad queue` serves from queue.db = \S+ Ask that one"):
        QueueDatabase(queue_db)
    first.close()
    QueueDatabase(queue_db).close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "mysql://host/name",
            "queue.db names 'mysql', which the queue's database does not know. Give sqlite:///FILE or postgresql://",
        ),
        ("nonsense", "queue.db is no URL of a database."),
        ("postgresql://u:p@h:54x/db", "queue.db is no URL of a database."),
        ("postgresql://me:secret@127.0.0.1:9/x", r"the queue's database postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/x failed"),
        ("sqlite:////proc/nowhere/x.db", "cannot be written"),
    ],
)
def test_queue_database_with_invalid_url_raises_without_secret(url: str, sentence: str) -> None:
    with pytest.raises(QueueError, match=sentence) as caught:
        QueueDatabase(url)
    assert "secret" not in str(caught.value)
