"""Statements of the queue within the caller's transaction: enqueue, hand out, and read.

In: a connection in a transaction, and requests. Out: rows, or responses. Invariant: a hand-out is one statement that reads as many index
entries as it hands out rollouts, however long the queue is; a rollout that was enqueued before is not enqueued again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Raw

from runner.ids import require_short
from runner.queue.tables import ATTEMPTS, DEMANDS, GROUP_COUNTS, GROUPS, ROLLOUTS, RUNS
from runner.queue.wire import AttemptRecord, LeaseKey, LeaseRequest, QueuedRollout, RolloutLease, Rollouts, RolloutState, RunCounts
from spangrad.database import insert_new
from spangrad.http.announcements import NO_LIMITS, OWN_SAMPLING, CallLimits, SamplingParameters
from spangrad.http.queue_messages import DemandRequest, DemandState, NewRollout, TaskRow
from spangrad.leases import this_boot
from spangrad.settings import Settings
from spangrad.types import Mode, PromptVersion, SandboxRung

OPEN = (RolloutState.QUEUED.value, RolloutState.RUNNING.value)
"""States of rollouts that have not ended."""
CHUNK = 1000
"""Ids in one statement."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for rollouts and leases that do not set these values."""

    timeout_of: Callable[[str], float]
    """Time limit of one agent run, in seconds, by data source."""
    max_attempts: int
    lease_seconds: float

    @classmethod
    def of(cls, settings: Settings) -> Defaults:
        """Return the defaults that settings name."""
        return cls(settings.runner.timeout_of, settings.runner.max_attempts, settings.queue.lease_seconds)


@dataclass(frozen=True, slots=True)
class Running:
    """A running attempt, as its row records it."""

    rollout_id: str
    attempt: int
    lease_seconds: float
    timeout_seconds: float
    worker: str
    boot: str
    began: float
    """Beginning in seconds of the monotonic clock of that boot."""

    @property
    def key(self) -> LeaseKey:
        """Rollout id and number of the attempt."""
        return self.rollout_id, self.attempt


def enqueue(transaction: sa.Connection, run_id: str, rollouts: Sequence[NewRollout], ids: Sequence[str], defaults: Defaults) -> int:
    """Add rollouts; those with an id that is known stay as they are.

    Returns:
        Number of rollouts that were known.

    Raises:
        ValueError: a rollout of another run, task or input has one of the ids, or one is too long.
    """
    require_short(ids)
    known = {row["rollout_id"]: row for row in rows_among(transaction, _KNOWN, ids)}
    for name, row in known.items():
        if row["run_id"] != run_id:
            raise ValueError(f"rollout {name} belongs to run {row['run_id']} already. Give rollouts of run {run_id} ids of their own.")
    new: dict[str, dict[str, object]] = {}
    tasks: dict[str, tuple[str, str]] = {name: (row["task_id"], row["input"]) for name, row in known.items()}
    for name, new_rollout in zip(ids, rollouts, strict=True):
        task_input = bytes(new_rollout.input).decode()
        task, known_input = tasks.setdefault(name, (new_rollout.task_id, task_input))
        if task != new_rollout.task_id:
            raise ValueError(f"rollout {name} is of task {task} already, not of {new_rollout.task_id}. {_OTHER_ID}")
        if known_input != task_input and msgspec.json.decode(known_input) != msgspec.json.decode(task_input):
            raise ValueError(f"rollout {name} of task {task} has another input already. {_OTHER_ID}")
        if name not in known:
            attempts = new_rollout.max_attempts or defaults.max_attempts
            new.setdefault(
                name,
                {
                    "rollout_id": name,
                    "run_id": run_id,
                    **task_columns(new_rollout),
                    "mode": new_rollout.mode.value,
                    "group_id": new_rollout.group_id,
                    "group_size": new_rollout.group_size,
                    "priority": new_rollout.priority,
                    "timeout_seconds": new_rollout.timeout_seconds or defaults.timeout_of(new_rollout.data_source),
                    "max_attempts": attempts,
                    "sampling": _json(new_rollout.sampling, OWN_SAMPLING),
                    "limits": _json(new_rollout.limits, NO_LIMITS),
                    "image": new_rollout.image or None,
                    "attempts_left": attempts,
                    "state": RolloutState.QUEUED.value,
                    "attempt": -1,
                },
            )
    if new:
        transaction.execute(ROLLOUTS.insert(), list(new.values()))
        insert_new(transaction, RUNS, [{"run_id": run_id}])
        add_counts(transaction, run_id, {"rollouts": len(new)})
        _add_groups(transaction, run_id, {(str(row["group_id"]), str(row["mode"])) for row in new.values()})
    return len(ids) - len(new)


def add_counts(transaction: sa.Connection, run_id: str, numbers: Mapping[str, int]) -> None:
    """Add to numbers of a run's rollouts, by column of RUNS."""
    transaction.execute(_adding(tuple(numbers)), {"the_run": run_id, **{f"more_{name}": number for name, number in numbers.items()}})


@cache
def _adding(names: tuple[str, ...]) -> sa.Update:
    """Return the statement that adds to columns of RUNS; it is made once, which costs more than to run it."""
    values = {name: RUNS.c[name] + sa.bindparam(f"more_{name}") for name in names}
    return RUNS.update().where(RUNS.c.run_id == sa.bindparam("the_run")).values(values)


def _add_groups(transaction: sa.Connection, run_id: str, groups: set[tuple[str, str]]) -> None:
    """Add those groups (id and mode) that are not there yet, and count them."""
    of_run = sa.select(GROUPS.c.group_id, GROUPS.c.mode).where(GROUPS.c.run_id == run_id)
    for part in chunks([group for group, _ in groups]):
        groups = groups - {tuple(row) for row in transaction.execute(of_run.where(GROUPS.c.group_id.in_(part)))}
    if groups:
        transaction.execute(GROUPS.insert(), [{"run_id": run_id, "group_id": group, "mode": mode} for group, mode in groups])
    for mode, count in Counter(mode for _, mode in groups).items():
        key = {"run_id": run_id, "mode": mode}
        insert_new(transaction, GROUP_COUNTS, [{**key, "groups": 0, "cancelled": 0}])
        same = [GROUP_COUNTS.c[name] == value for name, value in key.items()]
        transaction.execute(GROUP_COUNTS.update().where(*same).values(groups=GROUP_COUNTS.c.groups + count))


def hand_out(transaction: sa.Connection, request: LeaseRequest, seconds: float) -> list[RolloutLease]:
    """Lease the first rollouts: those of the highest priority, then the oldest. One statement."""
    clocks = {"boot": this_boot(), "began": time.monotonic(), "began_at": time.time()}
    facts = {"worker": request.worker, "lease_seconds": seconds, **clocks}
    values = {"run": request.run_id, "count": request.count, **{f"the_{name}": value for name, value in facts.items()}}
    rows: Sequence[Any] = transaction.execute(HAND_OUT, values).all()
    return [
        RolloutLease(
            **task_facts(row),
            **_rollout_facts(row),
            attempt=row.attempt,
            last=row.attempts_left == 0,
            lease_seconds=seconds,
            sampling=msgspec.json.decode(row.sampling, type=SamplingParameters) if row.sampling else OWN_SAMPLING,
            limits=msgspec.json.decode(row.limits, type=CallLimits) if row.limits else NO_LIMITS,
            image=row.image or "",
        )
        for row in sorted(rows, key=lambda row: (-row.priority, row.seq))
    ]


def running(connection: sa.Connection) -> list[Running]:
    """Return every running attempt."""
    attempts = connection.execute(sa.select(*_RUNNING).where(ROLLOUTS.c.state == RolloutState.RUNNING))
    return [Running(*row) for row in attempts]


def extend(transaction: sa.Connection, attempts: Iterable[tuple[str, int]], seconds: float) -> None:
    """Record the time for which leases hold from now on, for a server that is started again."""
    rows = [{"id": name, "number": attempt, "seconds": seconds} for name, attempt in attempts]
    if rows:
        transaction.execute(_EXTEND, rows)


def demand(connection: sa.Connection, run_id: str) -> DemandState:
    """Return the demand for a run, and the number of groups enqueued."""
    order = (DEMANDS.c.policy, DEMANDS.c.branch)
    branches = [
        DemandRequest(policy=row.policy, branch=row.branch, groups=row.groups, oldest_version=row.oldest_version, filled=row.filled or 0)
        for row in connection.execute(sa.select(DEMANDS).where(DEMANDS.c.run_id == run_id).order_by(*order))
    ]
    of_run = (GROUP_COUNTS.c.run_id == run_id, GROUP_COUNTS.c.mode == Mode.TRAIN)
    groups, cancelled = connection.execute(sa.select(GROUP_COUNTS.c.groups, GROUP_COUNTS.c.cancelled).where(*of_run)).first() or (0, 0)
    level = max((branch.groups for branch in branches), default=0)
    return DemandState(groups=level, enqueued=groups - cancelled, cancelled=cancelled, branches=branches)


def want(transaction: sa.Connection, run_id: str, branch_demand: DemandRequest) -> DemandState:
    """Record the demand of a branch; fewer groups than it demanded before is an outdated request, and changes nothing."""
    key = {"run_id": run_id, "policy": branch_demand.policy, "branch": branch_demand.branch}
    values = {"groups": branch_demand.groups, "oldest_version": branch_demand.oldest_version, "filled": branch_demand.filled}
    same_branch = [DEMANDS.c[name] == value for name, value in key.items()]
    insert_new(transaction, DEMANDS, [{**key, **values}])
    transaction.execute(DEMANDS.update().where(*same_branch, DEMANDS.c.groups <= branch_demand.groups).values(values))
    return demand(transaction, run_id)


def counts(connection: sa.Connection, run_id: str | None = None) -> list[RunCounts]:
    """Count the rollouts of each run, or of one run, by state."""
    query = _COUNTS if run_id is None else _COUNTS.where(RUNS.c.run_id == run_id)
    return [_counts(row) for row in connection.execute(query).mappings()]


def queued(connection: sa.Connection, run_id: str, most: int) -> int:
    """Count the queued rollouts of a run, up to a number."""
    of_run = sa.select(sa.literal(1)).where(ROLLOUTS.c.state == RolloutState.QUEUED.value, ROLLOUTS.c.run_id == run_id).limit(most)
    return connection.execute(sa.select(sa.func.count()).select_from(of_run.subquery())).scalar_one()


def rollout(connection: sa.Connection, rollout_id: str) -> QueuedRollout | None:
    """Return one rollout with all its attempts. None: the id is unknown."""
    row = connection.execute(sa.select(*_SHOWN).where(ROLLOUTS.c.rollout_id == rollout_id)).first()
    if row is None:
        return None
    attempts = connection.execute(sa.select(ATTEMPTS).where(ATTEMPTS.c.rollout_id == rollout_id).order_by(ATTEMPTS.c.attempt)).mappings()
    return _rollout(row, [_attempt(one) for one in attempts])


def listed(
    connection: sa.Connection,
    *,
    run_id: str | None,
    state: RolloutState | None,
    group_id: str | None,
    after: int,
    limit: int,
    newest_first: bool = False,
) -> Rollouts:
    """Return rollouts in order of arrival, or the newest first, each with its last attempt."""
    seq = ROLLOUTS.c.seq
    place, order = (seq < after if after else sa.true(), seq.desc()) if newest_first else (seq > after, seq)
    query = sa.select(*_SHOWN).where(place).order_by(order).limit(limit)
    filters = {ROLLOUTS.c.run_id: run_id, ROLLOUTS.c.state: state, ROLLOUTS.c.group_id: group_id}
    if state is not None and state not in OPEN:
        query = query.where(ROLLOUTS.c.ended.is_not(None))  # the condition of the index
    rows = connection.execute(query.where(*[column == value for column, value in filters.items() if value is not None])).all()
    return Rollouts(rollouts=_with_last(connection, rows), cursor=rows[-1].seq if rows else after)


def ended(connection: sa.Connection, run_id: str, after: int, limit: int) -> Rollouts:
    """Return a run's rollouts in the order in which they ended, each with its last attempt."""
    where = (ROLLOUTS.c.run_id == run_id, ROLLOUTS.c.ended > after)
    rows = connection.execute(sa.select(*_SHOWN).where(*where).order_by(ROLLOUTS.c.ended).limit(limit)).all()
    return Rollouts(rollouts=_with_last(connection, rows), cursor=rows[-1].ended if rows else after)


def ended_among(connection: sa.Connection, ids: Sequence[str]) -> list[QueuedRollout]:
    """Return those of these rollouts that have ended, each with its last attempt."""
    query = sa.select(*_SHOWN).where(_WITH_ID, ROLLOUTS.c.ended.is_not(None))
    return _with_last(connection, [row for part in chunks(ids) for row in connection.execute(query, {"ids": part})])


def rows_among(connection: sa.Connection, query: sa.Executable, ids: Sequence[str]) -> Iterator[sa.RowMapping]:
    """Yield the rows of a query whose parameter `ids` takes a part of a list at a time."""
    for part in chunks(ids):
        yield from connection.execute(query, {"ids": part}).mappings()


def chunks(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    """Yield parts of a list that fit into one statement."""
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def _with_last(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[QueuedRollout]:
    last = {row.rollout_id: row.attempt for row in rows}
    attempts: dict[str, AttemptRecord] = {}
    for attempt_row in rows_among(connection, ATTEMPTS_AMONG, list(last)):
        if attempt_row["attempt"] == last[attempt_row["rollout_id"]]:
            attempts[attempt_row["rollout_id"]] = _attempt(attempt_row)
    return [_rollout(row, [attempts[row.rollout_id]] if row.rollout_id in attempts else []) for row in rows]


def _rollout(row: sa.Row[Any], attempts: list[AttemptRecord]) -> QueuedRollout:
    if row.state == RolloutState.RUNNING:
        running_attempt = AttemptRecord(attempt=row.attempt, worker=row.worker, began_at=row.began_at, ended_at=None,
            reason=None, detail="", rewards=None, calls=None, seconds=None)  # fmt: skip
        attempts = [*attempts, running_attempt]
    return QueuedRollout(
        **_rollout_facts(row),
        task_id=row.task_id,
        state=RolloutState(row.state),
        attempts_left=row.attempts_left,
        worker=row.worker,
        cursor=row.ended,
        attempts=attempts,
        data_source=row.data_source or "",
    )


def _counts(row: sa.RowMapping) -> RunCounts:
    numbers = {state: row[state] for state in RolloutState if state is not RolloutState.QUEUED}
    states = {RolloutState.QUEUED: row["rollouts"] - sum(numbers.values()), **numbers}
    return RunCounts(
        run_id=row["run_id"], states={state: number for state, number in states.items() if number}, cursor=row["newest_end"] or 0
    )


def _json(value: msgspec.Struct, default: msgspec.Struct) -> str | None:
    """Return a value as JSON. None: it is the default."""
    return None if value == default else msgspec.json.encode(value).decode()


def task_columns(task: TaskRow) -> dict[str, object]:
    """Return the columns that tasks and rollouts have in common."""
    return {
        "task_id": task.task_id,
        "input": bytes(task.input).decode(),
        "prompt_name": task.prompt and task.prompt.name,
        "prompt_version": task.prompt and task.prompt.version,
        "least_sandbox": task.least_sandbox,
        "data_source": task.data_source or None,
    }


def task_facts(row: Any) -> dict[str, Any]:
    """Return the fields of a task that a row of tasks or rollouts holds, except its prompt: tasks and leases differ in its type."""
    return {
        "task_id": row.task_id,
        "input": Raw(row.input.encode()),
        "least_sandbox": SandboxRung(row.least_sandbox) if row.least_sandbox else None,
        "data_source": row.data_source or "",
    }


def _rollout_facts(row: sa.Row[Any]) -> dict[str, Any]:
    """Return the fields of a lease and of a listed rollout that are columns."""
    names = ("run_id", "rollout_id", "group_id", "group_size", "priority", "timeout_seconds")
    return {"mode": Mode(row.mode), "prompt": prompt_of(row), **{name: getattr(row, name) for name in names}}


def prompt_of(row: sa.Row[Any]) -> PromptVersion | None:
    """Return the prompt version of a row of rollouts or tasks. None: it names none."""
    return PromptVersion(row.prompt_name, row.prompt_version) if row.prompt_name is not None else None


def _attempt(row: sa.RowMapping) -> AttemptRecord:
    facts = {name: row[name] for name in AttemptRecord.__struct_fields__}
    return msgspec.convert({**facts, "rewards": row["rewards"] and json.loads(row["rewards"])}, AttemptRecord)


NEWEST_END = (
    sa.select(sa.func.max(ROLLOUTS.c.ended)).where(ROLLOUTS.c.ended.is_not(None), ROLLOUTS.c.run_id == RUNS.c.run_id).scalar_subquery()
)
"""Place in the order of endings of a run's newest one, in a statement of RUNS."""
_RUNNING_NOW = sa.select(sa.func.count()).where(ROLLOUTS.c.state == RolloutState.RUNNING.value, ROLLOUTS.c.run_id == RUNS.c.run_id)
_COUNTS = (
    sa.select(RUNS, _RUNNING_NOW.scalar_subquery().label("running"), NEWEST_END.label("newest_end"))
    .where(RUNS.c.rollouts > 0)
    .order_by(RUNS.c.run_id)
)
_OTHER_ID = "Give rollouts of other tasks or inputs another id, a request another key."
_WITH_ID = ROLLOUTS.c.rollout_id.in_(sa.bindparam("ids", expanding=True))
ATTEMPTS_AMONG = sa.select(ATTEMPTS).where(ATTEMPTS.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
_KNOWN = sa.select(*[ROLLOUTS.c[name] for name in ("rollout_id", "run_id", "task_id", "input")]).where(_WITH_ID)
_SHOWN = [column for column in ROLLOUTS.c if column.name != "input"]
_RUNNING = [ROLLOUTS.c[name] for name in ("rollout_id", "attempt", "lease_seconds", "timeout_seconds", "worker", "boot", "began")]
_FIRST = (
    sa.select(ROLLOUTS.c.seq)
    .where(ROLLOUTS.c.state == RolloutState.QUEUED.value, ROLLOUTS.c.run_id == sa.bindparam("run"))
    .order_by(ROLLOUTS.c.priority.desc(), ROLLOUTS.c.seq)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
HAND_OUT = (
    ROLLOUTS.update()
    .where(ROLLOUTS.c.seq.in_(_FIRST))
    .values(
        state=RolloutState.RUNNING.value,
        attempt=ROLLOUTS.c.attempt + 1,
        attempts_left=ROLLOUTS.c.attempts_left - 1,
        **{name: sa.bindparam(f"the_{name}") for name in ("worker", "lease_seconds", "boot", "began", "began_at")},
    )
    .returning(
        *[
            ROLLOUTS.c[name]
            for name in (
                "seq", "run_id", "rollout_id", "attempt", "attempts_left", "task_id", "input", "mode", "group_id", "group_size", "priority",
                "timeout_seconds", "prompt_name", "prompt_version", "least_sandbox", "sampling", "limits", "data_source", "image",
            )
        ]
    )
)  # fmt: skip
"""Statement of a hand-out."""
_EXTEND = (
    ROLLOUTS.update()
    .where(
        ROLLOUTS.c.rollout_id == sa.bindparam("id"),
        ROLLOUTS.c.attempt == sa.bindparam("number"),
        ROLLOUTS.c.state == RolloutState.RUNNING.value,
    )
    .values(lease_seconds=sa.bindparam("seconds"))
)
