"""Forgets rollouts that ended long ago, with their attempts, a bounded number at a time.

In: before when they ended. Out: how many are gone. Invariant: what has not ended stays, and so does each run's newest ending: places in the
order of endings, and of arrival, are never given twice. Groups stay counted, so that a run's demand finds what it had enqueued.

It is the only part of the queue that reads a time of day: a clock that is set wrong lets ended rollouts be forgotten too early or too late,
and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import sqlalchemy as sa

from runner.queue.tables import ATTEMPTS, ROLLOUTS
from runner.queue.wire import Purge, Purged
from spangrad.errors import QueueError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AT_ONCE = 500
"""Rollouts in one transaction."""
_TIMES = 20
"""Transactions in one answer."""
_EVERY_SECONDS = 60.0
"""Between two looks at what is old enough."""


class Access(Protocol):
    """Runs a function of a connection."""

    def __call__(self, work: Callable[[sa.Connection], T], /) -> Awaitable[T]:
        """Give its value."""
        ...


async def purge(read: Access, write: Access, asked: Purge) -> Purged:
    """Forget what is old enough, as much as one answer has time for.

    Args:
        read: beside transactions.
        write: in a transaction of the queue's.
        asked: what to forget.
    """
    before = time.time() - asked.older_than_seconds
    gone = 0
    for _ in range(_TIMES):
        found = await read(lambda connection: _old(connection, before, asked.run_id))
        if not found:
            return Purged(rollouts=gone, more=False)
        gone += await write(lambda transaction, found=found: _forget(transaction, found, before))
    return Purged(rollouts=gone, more=True)


async def keep_tidy(work: Callable[[Purge], Awaitable[Purged]], keep_seconds: float) -> None:
    """Forget what is old enough now and then, until cancelled."""
    while True:
        try:
            gone = 0
            while (done := await work(Purge(older_than_seconds=keep_seconds))).more:
                gone += done.rollouts
            if gone := gone + done.rollouts:
                logger.info(
                    "%d rollouts that ended more than %g days ago are forgotten (runner.queue_keep_days)", gone, keep_seconds / 86400
                )
        except QueueError as error:
            logger.warning("%s", error)
        await asyncio.sleep(_EVERY_SECONDS)


def _old(connection: sa.Connection, before: float, run_id: str | None) -> list[int]:
    """Rollouts that may go, by their place in the order of arrival: of each run those that ended first, up to the first that is too new."""
    newest = connection.execute(sa.select(sa.func.max(ROLLOUTS.c.seq))).scalar()
    found: list[int] = []
    run = run_id if run_id is not None else connection.execute(_NEXT_RUN, {"after": ""}).scalar()
    while run is not None and len(found) < AT_ONCE:
        last = connection.execute(_LAST, {"run": run}).scalar()
        rows = connection.execute(_FIRST, {"run": run, "count": AT_ONCE - len(found)})
        found += [row.seq for row in rows if row.ended != last and row.seq != newest and row.ended_at < before]
        run = connection.execute(_NEXT_RUN, {"after": run}).scalar() if run_id is None else None
    return found


def _forget(transaction: sa.Connection, places: Sequence[int], before: float) -> int:
    # Somebody may have queued a dead one again since it was found.
    gone = ROLLOUTS.delete().where(ROLLOUTS.c.seq.in_(places), ROLLOUTS.c.ended_at < before).returning(ROLLOUTS.c.rollout_id)
    names = list(transaction.execute(gone).scalars())
    transaction.execute(ATTEMPTS.delete().where(ATTEMPTS.c.rollout_id.in_(names)))
    return len(names)


_HAS_ENDED = ROLLOUTS.c.ended.is_not(None)
_NEXT_RUN = sa.select(sa.func.min(ROLLOUTS.c.run_id)).where(_HAS_ENDED, ROLLOUTS.c.run_id > sa.bindparam("after"))
_LAST = sa.select(sa.func.max(ROLLOUTS.c.ended)).where(_HAS_ENDED, ROLLOUTS.c.run_id == sa.bindparam("run"))
_FIRST = (
    sa.select(ROLLOUTS.c.seq, ROLLOUTS.c.ended, ROLLOUTS.c.ended_at)
    .where(_HAS_ENDED, ROLLOUTS.c.ended_at.is_not(None), ROLLOUTS.c.run_id == sa.bindparam("run"))
    .order_by(ROLLOUTS.c.ended)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
"""The statements go along the index of endings, run by run, however many rollouts there are."""
