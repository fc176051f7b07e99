"""Rollouts that ended long ago are forgotten: those alone, a few at a time, and nothing that still counts goes with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from runner.queue import purge
from runner.queue.tables import ATTEMPTS, ROLLOUTS
from runner.queue.wire import Purge, RolloutSelector, RolloutState
from spangrad.http.queue_messages import DemandState
from tests.support.runners import done, failed, new_rollouts, queue_settings, serving, until


async def test_purge_removes_ended_rollouts_only_and_reuses_no_number(queue_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "ROLLOUTS_PER_TRANSACTION", 3)
    monkeypatch.setattr(purge, "_TRANSACTIONS_PER_REQUEST", 2)
    settings = queue_settings(queue_db, max_attempts=1, queue__keep_days=None)
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(20, group_size=2))
        await client.enqueue("another run", new_rollouts(3, "other "))
        held = await client.lease("run", "worker", 12)
        await client.complete([done(one) for one in held[:8]])
        await client.fail([failed(one) for one in held[8:11]])
        await client.retry(RolloutSelector(rollout_ids=["r10"]))
        await client.cancel(RolloutSelector(rollout_ids=["r18", "r19"]))
        others = await client.lease("another run", "worker", 3)
        await client.complete([done(one) for one in others])
        before = await client.run("run"), await client.demand("run")
        assert await client.purge(3600) == 0
        first = await service.purge(Purge(older_than_seconds=0))
        assert (first.rollouts, first.more) == (6, True), "no more than it has time for"
        # 12 of a run have ended, 3 of the other one; of each the newest stays.
        assert await client.purge(0, run_id="run") + first.rollouts + await client.purge(0) == 11 + 2
        assert await client.purge(0) == 0
        run = await client.run("run")
        assert run.states == {RolloutState.QUEUED: 7, RolloutState.RUNNING: 1, RolloutState.CANCELLED: 1}
        assert (run.cursor, await client.demand("run")) == (before[0].cursor, before[1])
        assert before[1] == DemandState(groups=0, enqueued=9, cancelled=1, branches=[])
        assert (await client.run("another run")).states == {RolloutState.SUCCEEDED: 1}
        with service.database.reading() as connection:
            kept = set(connection.execute(sa.select(ROLLOUTS.c.rollout_id)).scalars())
            left = Counter(connection.execute(sa.select(ATTEMPTS.c.rollout_id)).scalars())
        assert set(left) <= kept
        assert left["r10"] == 1, "it was queued again, and its failed attempt is still told"
        (refused,) = await client.complete([done(held[0])])
        assert refused.refused == "the queue has no rollout r0. Lease one before you end it."
    async with serving(settings) as (client, _):
        (ended,) = await client.complete([done(held[11])])
        assert ended.refused is None
        news = await client.ended("run", after=run.cursor)
        assert [one.rollout_id for one in news.rollouts] == ["r11"]
        assert news.cursor > run.cursor


async def test_queue_server_purges_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "_PURGE_SECONDS", 0.02)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", queue__keep_days=0.1 / 86400)
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(6))
        await client.complete([done(one) for one in await client.lease("run", "worker", 4)])

        async def forgotten() -> bool:
            return (await client.run("run")).states == {RolloutState.QUEUED: 2, RolloutState.SUCCEEDED: 1}

        await until(forgotten)
