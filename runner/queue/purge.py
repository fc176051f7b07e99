"""Deletes rollouts that ended long ago, with their attempts and callbacks, a bounded number at a time.

In: an age. Out: the number of deleted rollouts. Invariant: a rollout that has not ended stays, and so does the newest ending of each run,
so that numbers of endings and of arrivals are never given twice. Groups stay counted, so that a run's demand finds what was enqueued.

This is the only part of the queue that reads the time of day: with a wrong clock, ended rollouts are deleted too early or too late, and
nothing else goes wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sqlalchemy as sa

from runner.queue.rows import NEWEST_END, add_counts
from runner.queue.tables import ATTEMPTS, CALLBACKS, ROLLOUTS, RUNS
from runner.queue.wire import Purge, Purged
from spangrad.errors import QueueError

logger = logging.getLogger(__name__)

Access = Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]]
"""Runs a function of a connection, and returns its value."""
ROLLOUTS_PER_TRANSACTION = 500
"""Rollouts in one transaction."""
_TRANSACTIONS_PER_REQUEST = 20
"""Transactions per request."""
_PURGE_SECONDS = 60.0
"""Pause between two purges by age, in seconds."""


async def purge(read: Access, write: Access, request: Purge) -> Purged:
    """Delete rollouts that are old enough, up to a fixed number per request."""
    before = time.time() - request.older_than_seconds
    deleted = 0
    for _ in range(_TRANSACTIONS_PER_REQUEST):
        sequence_numbers = await read(lambda connection: expired(connection, before, request.run_id))
        if not sequence_numbers:
            return Purged(rollouts=deleted, more=False)
        deleted += await write(lambda transaction, sequence_numbers=sequence_numbers: _delete(transaction, sequence_numbers, before))
    return Purged(rollouts=deleted, more=True)


async def purge_periodically(work: Callable[[Purge], Awaitable[Purged]], keep_seconds: float) -> None:
    """Delete rollouts that are old enough at regular intervals, until cancelled."""
    while True:
        try:
            deleted = 0
            while (done := await work(Purge(older_than_seconds=keep_seconds))).more:
                deleted += done.rollouts
            if deleted := deleted + done.rollouts:
                logger.info("%d rollouts that ended more than %g days ago are deleted (queue.keep_days)", deleted, keep_seconds / 86400)
        except Exception as error:  # also for want of threads: the next purge deletes it
            logger.warning("%s", error, exc_info=not isinstance(error, QueueError))
        await asyncio.sleep(_PURGE_SECONDS)


def expired(connection: sa.Connection, before: float, run_id: str | None) -> list[int]:
    """Return the places of rollouts that may be deleted: of each run the first that ended, up to a number, unless the first is too new."""
    newest = connection.execute(sa.select(sa.func.max(ROLLOUTS.c.seq))).scalar()
    runs = _RUNS if run_id is None else _RUNS.where(RUNS.c.run_id == run_id)
    sequence_numbers: list[int] = []
    for run, last in connection.execute(runs, {"before": before}).all():
        if room := ROLLOUTS_PER_TRANSACTION - len(sequence_numbers):
            rows = connection.execute(_FIRST, {"run": run, "count": room})
            sequence_numbers += [row.seq for row in rows if row.ended != last and row.seq != newest and row.ended_at < before]
    return sequence_numbers


def _delete(transaction: sa.Connection, sequence_numbers: Sequence[int], before: float) -> int:
    # A dead rollout may have been queued again since it was selected.
    deleted = ROLLOUTS.delete().where(ROLLOUTS.c.seq.in_(sequence_numbers), ROLLOUTS.c.ended_at < before)
    rows = transaction.execute(deleted.returning(ROLLOUTS.c.rollout_id, ROLLOUTS.c.run_id, ROLLOUTS.c.state)).all()
    for (run_id, state), number in Counter((row.run_id, row.state) for row in rows).items():
        add_counts(transaction, run_id, {"rollouts": -number, state: -number})
    names = [row.rollout_id for row in rows]
    for table in (ATTEMPTS, CALLBACKS):
        transaction.execute(table.delete().where(table.c.rollout_id.in_(names)))
    return len(names)


_HAS_ENDED = ROLLOUTS.c.ended.is_not(None)
_FIRST = (
    sa.select(ROLLOUTS.c.seq, ROLLOUTS.c.ended, ROLLOUTS.c.ended_at)
    .where(_HAS_ENDED, ROLLOUTS.c.run_id == sa.bindparam("run"))
    .order_by(ROLLOUTS.c.ended)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
_OLDEST_AT = (
    sa.select(ROLLOUTS.c.ended_at)
    .where(_HAS_ENDED, ROLLOUTS.c.run_id == RUNS.c.run_id)
    .order_by(ROLLOUTS.c.ended)
    .limit(1)
    .scalar_subquery()
)
_RUNS = sa.select(RUNS.c.run_id, NEWEST_END).where(sa.bindparam("before") > _OLDEST_AT).order_by(RUNS.c.run_id)
"""The statements use the index of endings, run by run, however many rollouts there are."""
