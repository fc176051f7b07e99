"""Ends attempts and rollouts: by their worker's report, by a timeout, or by cancellation.

Invariant: an attempt ends once. The same ending reported again gets the same result; a different ending is refused, with the reason, and
changes nothing. No number of an ending is given twice, so a client that reads on from a number misses none.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from runner.queue.rows import ATTEMPTS_AMONG, NEWEST_END, OPEN, add_counts, chunks, rows_among
from runner.queue.tables import ATTEMPTS, ENDED, GROUP_COUNTS, GROUPS, ROLLOUTS, RUNS
from runner.queue.wire import AttemptReceipt, Cancelled, ClosedEndings, Ending, LeaseKey, RolloutSelector, RolloutState
from spangrad.agent.reward_values import Rewards
from spangrad.database import insert_new
from spangrad.types import AttemptFailure


class Endings:
    """Ends attempts, and numbers the endings of rollouts."""

    def __init__(self, connection: sa.Connection) -> None:
        newest = sa.select(NEWEST_END.label("newest")).select_from(RUNS).subquery()
        highest = [connection.execute(sa.select(sa.func.max(column))).scalar() or 0 for column in (newest.c.newest, ENDED.c.highest)]
        self._next = max(highest) + 1

    def end(self, transaction: sa.Connection, endings: Sequence[Ending]) -> list[AttemptReceipt]:
        """End attempts, which may have ended already, or never existed; return results in the order of the endings."""
        wall = time.time()
        rows = _rollouts(transaction, [ending.rollout_id for ending in endings])
        stopped = [ending.rollout_id for ending in endings if not _is_running(rows.get(ending.rollout_id), ending.attempt)]
        recorded = _ended(transaction, stopped)
        updates: list[dict[str, object]] = []
        new: list[dict[str, object]] = []
        ended = Counter[tuple[str, str]]()
        results: list[AttemptReceipt] = []
        for ending in endings:
            row, recorded_row = rows.get(ending.rollout_id), recorded.get(ending.key)
            if row is None or not _is_running(row, ending.attempt):
                results.append(_receipt(ending.key, row, recorded_row, ending))
                continue
            row["state"], row["attempts_left"] = self._next_state(ending, row)
            row["ended"], row["ended_at"] = (self._next, wall) if row["state"] not in OPEN else (None, None)
            updates.append({f"the_{name}": row[name] for name in ("seq", "state", "attempts_left", "ended", "ended_at")})
            recorded[ending.key] = attempt = _attempt_row(ending, row, wall)
            new.append(attempt)
            results.append(AttemptReceipt(rollout_id=ending.rollout_id, attempt=ending.attempt, state=RolloutState(row["state"])))
            if row["ended"] is not None:
                self._next += 1
                ended[row["run_id"], row["state"]] += 1
        if updates:
            transaction.execute(_UPDATE, updates)
            transaction.execute(ATTEMPTS.insert(), new)
        for (run_id, state), number in ended.items():
            add_counts(transaction, run_id, {state: number})
        return results

    def cancel(self, transaction: sa.Connection, which: RolloutSelector) -> tuple[Cancelled, list[LeaseKey]]:
        """Cancel queued and running rollouts; return the counts, and the attempts that were running."""
        held: list[LeaseKey] = []
        number, wall = 0, time.time()
        highest = transaction.execute(sa.select(sa.func.max(ROLLOUTS.c.seq))).scalar() or 0
        for condition in _condition(which):
            running = sa.select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.attempt).where(condition, ROLLOUTS.c.state == RolloutState.RUNNING.value)
            held += [(row.rollout_id, row.attempt) for row in transaction.execute(running)]
            matches = (condition, ROLLOUTS.c.state.in_(OPEN))
            groups = sa.select(ROLLOUTS.c.run_id, ROLLOUTS.c.group_id).where(*matches)
            _cancel_groups(transaction, sa.tuple_(GROUPS.c.run_id, GROUPS.c.group_id).in_(groups))
            transaction.execute(ATTEMPTS.insert().from_select(_COPIED, _copies(condition, wall)))
            cancelled: dict[str, Any] = {
                "state": RolloutState.CANCELLED.value, "worker": None, "ended": self._next + ROLLOUTS.c.seq, "ended_at": wall,
            }  # fmt: skip
            number += _recount(transaction, matches, RolloutState.CANCELLED, 1)
            transaction.execute(ROLLOUTS.update().where(*matches).values(cancelled))
        self._next += highest + 1
        return Cancelled(queued=number - len(held), running=len(held)), held

    def retry(self, transaction: sa.Connection, which: RolloutSelector) -> int:
        """Queue dead letters again, each with its full number of attempts; return how many."""
        # Their rows lose their numbers of endings: a server that is started again must know that these were used.
        transaction.execute(ENDED.delete())
        transaction.execute(ENDED.insert().values(highest=self._next - 1))
        again = {"state": RolloutState.QUEUED.value, "ended": None, "ended_at": None, "attempts_left": ROLLOUTS.c.max_attempts}
        queued = 0
        for condition in _condition(which):
            matches = (condition, ROLLOUTS.c.state == RolloutState.DEAD.value)
            queued += _recount(transaction, matches, RolloutState.DEAD, -1)
            transaction.execute(ROLLOUTS.update().where(*matches).values(again))
        return queued

    def _next_state(self, ending: Ending, row: Mapping[str, Any]) -> tuple[str, int]:
        """Return the rollout's state and the number of attempts left, after one of its attempts ended."""
        left = row["attempts_left"]
        if ending.reason is None:
            return RolloutState.SUCCEEDED.value, left
        if ending.rewards is not None:
            return RolloutState.FAILED.value, left
        if ending.reason is AttemptFailure.RELEASED:
            return RolloutState.QUEUED.value, left + 1
        return (RolloutState.QUEUED if ending.retry and left > 0 else RolloutState.DEAD).value, left


def close_endings(transaction: sa.Connection, closed: ClosedEndings) -> ClosedEndings:
    """Record up to which ending lost attempts of a run have root spans in the store; return the furthest that was recorded."""
    of_run = RUNS.c.run_id == closed.run_id
    insert_new(transaction, RUNS, [{"run_id": closed.run_id}])
    transaction.execute(RUNS.update().where(of_run, RUNS.c.closed < closed.cursor).values(closed=closed.cursor))
    return replace(closed, cursor=transaction.execute(sa.select(RUNS.c.closed).where(of_run)).scalar_one())


def _cancel_groups(transaction: sa.Connection, which: sa.ColumnElement[bool]) -> None:
    marked = GROUPS.update().where(which, GROUPS.c.cancelled.is_(False)).values(cancelled=True).returning(GROUPS.c.run_id, GROUPS.c.mode)
    for (run_id, mode), count in Counter(map(tuple, transaction.execute(marked))).items():
        same = (GROUP_COUNTS.c.run_id == run_id, GROUP_COUNTS.c.mode == mode)
        transaction.execute(GROUP_COUNTS.update().where(*same).values(cancelled=GROUP_COUNTS.c.cancelled + count))


def _recount(transaction: sa.Connection, matches: Sequence[sa.ColumnElement[bool]], state: RolloutState, change: int) -> int:
    """Add a change to the number of a state for each rollout that the conditions select; return how many these are."""
    by_run = sa.select(ROLLOUTS.c.run_id, sa.func.count().label("number")).where(*matches).group_by(ROLLOUTS.c.run_id)
    numbers = {row.run_id: row.number for row in transaction.execute(by_run)}
    for run_id, number in numbers.items():
        add_counts(transaction, run_id, {state.value: change * number})
    return sum(numbers.values())


def _rollouts(transaction: sa.Connection, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {row["rollout_id"]: dict(row) for row in rows_among(transaction, _SELECT_STATES, ids)}


def _ended(transaction: sa.Connection, rollout_ids: Sequence[str]) -> dict[LeaseKey, Any]:
    return {(row["rollout_id"], row["attempt"]): row for row in rows_among(transaction, ATTEMPTS_AMONG, rollout_ids)}


def _is_running(row: Mapping[str, Any] | None, attempt: int) -> bool:
    return row is not None and row["state"] == RolloutState.RUNNING and row["attempt"] == attempt


def _receipt(
    key: LeaseKey, row: Mapping[str, Any] | None, recorded_row: Mapping[str, Any] | None, ending: Ending | None = None
) -> AttemptReceipt:
    """Build the result for an attempt that is not running; `ending` is the report that it answers. None: it answers none."""
    rollout_id, attempt = key
    name = f"attempt {attempt} of rollout {rollout_id}"
    receipt = AttemptReceipt(rollout_id=rollout_id, attempt=attempt, state=RolloutState(row["state"]) if row is not None else None)
    if row is None:
        return replace(receipt, refused=f"the queue has no rollout {rollout_id}. Lease one before you end it.")
    if recorded_row is None:
        refused = f"{name} has not been handed out: the newest is {row['attempt']}. Lease one before you end it."
        return replace(receipt, refused=refused)
    if ending is not None and _is_recorded(ending, recorded_row):
        return replace(receipt, state=RolloutState(recorded_row["state"]))
    outcome = f"failed ({recorded_row['reason']}: {recorded_row['detail']})" if recorded_row["reason"] else "succeeded"
    newest = f"; attempt {row['attempt']} is {row['state']}" if row["attempt"] != attempt else ""
    return replace(
        receipt,
        refused=f"{name} has ended: it {outcome}{newest}. Later reports of it are ignored.",
        ended=AttemptFailure(recorded_row["reason"]) if recorded_row["reason"] else None,
    )


def _is_recorded(ending: Ending, row: Mapping[str, Any]) -> bool:
    if ending.reason in {AttemptFailure.LOST, AttemptFailure.RELEASED}:
        return row["reason"] == ending.reason
    facts = (ending.reason, ending.detail, _json(ending.rewards), ending.calls, ending.seconds)
    return facts == (row["reason"], row["detail"], row["rewards"], row["calls"], row["seconds"])


def not_running(connection: sa.Connection, attempts: Sequence[LeaseKey]) -> list[AttemptReceipt]:
    """Return a result for each of these attempts that is not running, though its worker holds it to be; none for those that run."""
    ids = [rollout_id for rollout_id, _ in attempts]
    rows, recorded = _rollouts(connection, ids), _ended(connection, ids)
    return [_receipt(key, rows.get(key[0]), recorded.get(key)) for key in attempts if not _is_running(rows.get(key[0]), key[1])]


def _attempt_row(ending: Ending, row: Mapping[str, Any], wall: float) -> Any:
    return {
        "rollout_id": ending.rollout_id,
        "attempt": ending.attempt,
        "worker": row["worker"],
        "began_at": row["began_at"],
        "ended_at": wall,
        "reason": ending.reason.value if ending.reason else None,
        "detail": ending.detail,
        "rewards": _json(ending.rewards),
        "calls": ending.calls,
        "seconds": ending.seconds,
        "state": row["state"],
    }


def _json(rewards: Rewards | None) -> str | None:
    return None if rewards is None else json.dumps(rewards, sort_keys=True)


def _condition(which: RolloutSelector) -> list[sa.ColumnElement[bool]]:
    """Build the conditions that select the rollouts; several where one statement cannot hold all ids."""
    if which.rollout_ids is not None:
        return [ROLLOUTS.c.rollout_id.in_(part) for part in chunks(which.rollout_ids)]
    in_run = ROLLOUTS.c.run_id == which.run_id
    return [in_run if which.group_id is None else sa.and_(in_run, ROLLOUTS.c.group_id == which.group_id)]


_COPIED = ["rollout_id", "attempt", "worker", "began_at", "ended_at", "reason", "detail", "state"]


def _copies(which: sa.ColumnElement[bool], wall: float) -> sa.Select[Any]:
    constants = (AttemptFailure.CANCELLED.value, "the rollout was cancelled", RolloutState.CANCELLED.value)
    return sa.select(
        *[ROLLOUTS.c[name] for name in ("rollout_id", "attempt", "worker", "began_at")],
        sa.literal(wall),
        *[sa.literal(word) for word in constants],
    ).where(which, ROLLOUTS.c.state == RolloutState.RUNNING.value)


_SELECT_STATES = sa.select(
    *[ROLLOUTS.c[name] for name in ("seq", "rollout_id", "run_id", "attempt", "attempts_left", "state", "worker", "began_at", "ended")]
).where(ROLLOUTS.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
_UPDATE = (
    ROLLOUTS.update()
    .where(ROLLOUTS.c.seq == sa.bindparam("the_seq"))
    .values(
        worker=None, **{name: sa.bindparam(f"the_{name}") for name in ("state", "attempts_left", "ended", "ended_at")}
    )
)  # fmt: skip
