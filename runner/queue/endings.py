"""How attempts end, and rollouts with them: by their worker's word, by time, or because somebody does not want them any more.

In: a connection in a transaction, and endings. Out: what became of each. Invariant: an attempt ends once. The same ending told again is
answered as it was the first time; any other one is refused, with the reason, and changes nothing. No number of an ending is given twice,
so that whoever waits for those after a number misses none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from runner.queue.rows import chunks
from runner.queue.tables import ATTEMPTS, ENDED, GROUPS, ROLLOUTS
from runner.queue.wire import Cancelled, Completion, Failure, Result, State, Which
from spangrad.agent.reward_values import Rewards
from spangrad.text_sanitizer import storable
from spangrad.types import AttemptFailure

OPEN = (State.QUEUED.value, State.RUNNING.value)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an attempt."""

    rollout_id: str
    attempt: int
    reason: AttemptFailure | None
    """None: it succeeded."""
    detail: str = ""
    rewards: Rewards | None = None
    calls: int | None = None
    seconds: float | None = None
    retry: bool = True

    @staticmethod
    def of(told: Completion | Failure) -> Ending:
        """What a worker tells."""
        if isinstance(told, Completion):
            return Ending(told.rollout_id, told.attempt, None, "", told.rewards, told.calls, told.seconds)
        detail = storable(told.detail)
        return Ending(told.rollout_id, told.attempt, told.reason, detail, told.rewards, told.calls, told.seconds, told.retry)

    def same(self, row: sa.RowMapping) -> bool:
        """Whether a row of ATTEMPTS tells of this very ending."""
        if self.reason in {AttemptFailure.LOST, AttemptFailure.RELEASED}:
            return row["reason"] == self.reason
        facts = (self.reason, self.detail, _json(self.rewards), self.calls, self.seconds)
        return facts == (row["reason"], row["detail"], row["rewards"], row["calls"], row["seconds"])


class Endings:
    """Ends attempts, and numbers the ends of rollouts."""

    def __init__(self, connection: sa.Connection) -> None:
        """Go on where the database is."""
        highest = [connection.execute(sa.select(sa.func.max(column))).scalar() or 0 for column in (ROLLOUTS.c.ended, ENDED.c.highest)]
        self._next = max(highest) + 1

    def end(self, transaction: sa.Connection, endings: Sequence[Ending], wall: float) -> list[Result]:
        """End attempts; answers in the order of the endings.

        Args:
            transaction: to do it in.
            endings: of attempts that may be over already, or have never been.
            wall: seconds since 1970, for people, and for how long it is kept.
        """
        rows = _rollouts(transaction, [one.rollout_id for one in endings])
        told = _ended(transaction, [one for one in endings if not _under_way(rows.get(one.rollout_id), one.attempt)])
        updates: list[dict[str, object]] = []
        new: list[dict[str, object]] = []
        results: list[Result] = []
        for one in endings:
            row, before = rows.get(one.rollout_id), told.get((one.rollout_id, one.attempt))
            if row is None or not _under_way(row, one.attempt):
                results.append(_answer(one, row, before))
                continue
            row["state"], row["attempts_left"] = self._next_state(one, row)
            row["ended"], row["ended_at"] = (self._number(), wall) if row["state"] not in OPEN else (None, None)
            updates.append({f"the_{name}": row[name] for name in ("seq", "state", "attempts_left", "ended", "ended_at")})
            told[one.rollout_id, one.attempt] = made = _attempt_row(one, row, wall)
            new.append(made)
            results.append(Result(rollout_id=one.rollout_id, attempt=one.attempt, state=State(row["state"])))
        if updates:
            transaction.execute(_UPDATE, updates)
            transaction.execute(ATTEMPTS.insert(), new)
        return results

    def cancel(self, transaction: sa.Connection, which: Which, wall: float) -> tuple[Cancelled, list[tuple[str, int]]]:
        """Cancel what is queued or running; the attempts that were running are given too."""
        wanted = _condition(which)
        held = [
            (row.rollout_id, row.attempt)
            for one in wanted
            for row in transaction.execute(
                sa.select(ROLLOUTS.c.rollout_id, ROLLOUTS.c.attempt).where(one, ROLLOUTS.c.state == State.RUNNING.value)
            )
        ]
        queued = 0
        highest = transaction.execute(sa.select(sa.func.max(ROLLOUTS.c.seq))).scalar() or 0
        for one in wanted:
            mine = (one, ROLLOUTS.c.state.in_(OPEN))
            groups = sa.select(ROLLOUTS.c.run_id, ROLLOUTS.c.group_id).where(*mine)
            transaction.execute(GROUPS.update().where(sa.tuple_(GROUPS.c.run_id, GROUPS.c.group_id).in_(groups)).values(cancelled=True))
            transaction.execute(ATTEMPTS.insert().from_select(_COPIED, _copies(one, wall)))
            gone: dict[str, Any] = {
                "state": State.CANCELLED.value, "worker": None, "ended": self._next + ROLLOUTS.c.seq, "ended_at": wall,
            }  # fmt: skip
            queued += transaction.execute(ROLLOUTS.update().where(*mine).values(gone)).rowcount
        self._next += highest + 1
        return Cancelled(queued=queued - len(held), running=len(held)), held

    def retry(self, transaction: sa.Connection, which: Which) -> int:
        """Queue dead letters again, each for as many attempts as it had; how many."""
        # Their numbers go from their rows: a server that is started again must know that they were given.
        transaction.execute(ENDED.delete())
        transaction.execute(ENDED.insert().values(highest=self._next - 1))
        again = {"state": State.QUEUED.value, "ended": None, "ended_at": None, "attempts_left": ROLLOUTS.c.max_attempts}
        dead = ROLLOUTS.c.state == State.DEAD.value
        return sum(transaction.execute(ROLLOUTS.update().where(one, dead).values(again)).rowcount for one in _condition(which))

    def _next_state(self, ending: Ending, row: Mapping[str, Any]) -> tuple[str, int]:
        """The rollout's state, and the attempts that it has left, after an attempt of it ended."""
        left = row["attempts_left"]
        if ending.reason is None:
            return State.SUCCEEDED.value, left
        if ending.rewards is not None:
            return State.FAILED.value, left
        if ending.reason is AttemptFailure.RELEASED:
            return State.QUEUED.value, left + 1
        return (State.QUEUED if ending.retry and left > 0 else State.DEAD).value, left

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def _rollouts(transaction: sa.Connection, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for part in chunks(ids):
        found.update((row["rollout_id"], dict(row)) for row in transaction.execute(_STANDING, {"ids": part}).mappings())
    return found


def _ended(transaction: sa.Connection, endings: Sequence[Ending]) -> dict[tuple[str, int], Any]:
    """Rows of ATTEMPTS of rollouts that endings name."""
    found: dict[tuple[str, int], Any] = {}
    for part in chunks([one.rollout_id for one in endings]):
        rows = transaction.execute(sa.select(ATTEMPTS).where(ATTEMPTS.c.rollout_id.in_(part))).mappings()
        found.update(((row["rollout_id"], row["attempt"]), row) for row in rows)
    return found


def _under_way(row: Mapping[str, Any] | None, attempt: int) -> bool:
    return row is not None and row["state"] == State.RUNNING and row["attempt"] == attempt


def _answer(ending: Ending, row: Mapping[str, Any] | None, before: sa.RowMapping | None) -> Result:
    """What to say of an attempt that is not under way."""
    name = f"attempt {ending.attempt} of rollout {ending.rollout_id}"
    if row is None:
        refused = f"the queue has no rollout {ending.rollout_id}. Lease one before you end it."
        return Result(rollout_id=ending.rollout_id, attempt=ending.attempt, state=None, refused=refused)
    if before is None:
        refused = f"{name} has not been handed out: the newest is {row['attempt']}. Lease one before you end it."
        return Result(rollout_id=ending.rollout_id, attempt=ending.attempt, state=State(row["state"]), refused=refused)
    if ending.same(before):
        return Result(rollout_id=ending.rollout_id, attempt=ending.attempt, state=State(before["state"]))
    how = f"failed ({before['reason']}: {before['detail']})" if before["reason"] else "succeeded"
    newest = f"; attempt {row['attempt']} is {row['state']}" if row["attempt"] != ending.attempt else ""
    return Result(
        rollout_id=ending.rollout_id,
        attempt=ending.attempt,
        state=State(row["state"]),
        refused=f"{name} is over: it {how}{newest}. What is told of it now counts for nothing.",
        ended=AttemptFailure(before["reason"]) if before["reason"] else None,
    )


def over(connection: sa.Connection, attempts: Sequence[tuple[str, int]]) -> list[Result]:
    """What to say to a worker that believes it holds these; nothing of those that it does hold."""
    asked = [Ending(name, attempt, None, seconds=-1) for name, attempt in attempts]  # equal to no ending that was told
    rows, told = _rollouts(connection, [name for name, _ in attempts]), _ended(connection, asked)
    lost = [one for one in asked if not _under_way(rows.get(one.rollout_id), one.attempt)]
    return [_answer(one, rows.get(one.rollout_id), told.get((one.rollout_id, one.attempt))) for one in lost]


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


def _condition(which: Which) -> list[sa.ColumnElement[bool]]:
    """What selects the rollouts: several conditions where one statement cannot name them all."""
    if which.rollout_ids is not None:
        return [ROLLOUTS.c.rollout_id.in_(part) for part in chunks(which.rollout_ids)]
    mine = ROLLOUTS.c.run_id == which.run_id
    return [mine if which.group_id is None else sa.and_(mine, ROLLOUTS.c.group_id == which.group_id)]


_COPIED = ["rollout_id", "attempt", "worker", "began_at", "ended_at", "reason", "detail", "state"]


def _copies(which: sa.ColumnElement[bool], wall: float) -> sa.Select[Any]:
    """Rows of ATTEMPTS for attempts under way that are cancelled."""
    told = (AttemptFailure.CANCELLED.value, "the rollout was cancelled", State.CANCELLED.value)
    return sa.select(
        *[ROLLOUTS.c[name] for name in ("rollout_id", "attempt", "worker", "began_at")],
        sa.literal(wall),
        *[sa.literal(word) for word in told],
    ).where(which, ROLLOUTS.c.state == State.RUNNING.value)


_STANDING = sa.select(
    *[ROLLOUTS.c[name] for name in ("seq", "rollout_id", "attempt", "attempts_left", "state", "worker", "began_at", "ended")]
).where(ROLLOUTS.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
_UPDATE = (
    ROLLOUTS.update()
    .where(ROLLOUTS.c.seq == sa.bindparam("the_seq"))
    .values(
        worker=None, **{name: sa.bindparam(f"the_{name}") for name in ("state", "attempts_left", "ended", "ended_at")}
    )
)  # fmt: skip
