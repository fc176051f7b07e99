"""The real Collector killed under load, and the store behind it killed or away: what the Collector acknowledged is stored once.

Senders talk to the Collector alone; batches that it forms anew after a kill count once (law 1).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.deliveries import Pipeline, running_pipeline

KILLS = 20
STORE_KILLS = 3
AWAY_SECONDS = float(os.environ.get("FAULTS_AWAY_SECONDS", "20"))
"""Seconds for which the store is away; with 60 the test takes a minute and a half in all."""


@pytest.fixture
def delivery(tmp_path: Path) -> Iterator[Pipeline]:
    with running_pipeline(tmp_path) as delivery:
        yield delivery


@pytest.mark.slow
def test_collector_killed_20_times_loses_no_acknowledged_span(delivery: Pipeline, chance: Random, report: Callable[[str], None]) -> None:
    load = delivery.load(chance.randrange(2**32))
    store_too = set(chance.sample(range(KILLS), STORE_KILLS))
    began = time.monotonic()
    for kill in range(KILLS):
        time.sleep(chance.uniform(0.2, 2))
        if kill in store_too:
            delivery.kill("store")
            time.sleep(chance.uniform(0, 0.5))
        delivery.kill("collector")
        report(f"kill {kill + 1}, {load.tally.bodies} bodies acknowledged, {load.tally.broken} tries broken")
        if kill in store_too:
            delivery.start_store()
        delivery.start_collector()
    time.sleep(1)
    tally = load.stop()
    loaded = time.monotonic() - began
    verdict = delivery.judge(tally)
    report(f"{KILLS} kills, {STORE_KILLS} of the store, in {loaded:.0f} s: {tally.bodies} bodies, {verdict}")

    assert (tally.refused, verdict.faults) == ([], {})
    assert verdict.spans > 0


@pytest.mark.slow
def test_collector_while_store_is_away_loses_no_acknowledged_span(
    delivery: Pipeline, chance: Random, report: Callable[[str], None]
) -> None:
    load = delivery.load(chance.randrange(2**32))
    time.sleep(2)
    delivery.kill("store")
    before = load.tally.bodies
    time.sleep(AWAY_SECONDS)
    meanwhile = load.tally.bodies - before
    delivery.start_store()
    time.sleep(2)
    tally = load.stop()
    began = time.monotonic()
    verdict = delivery.judge(tally, build=False)
    took = time.monotonic() - began
    report(f"away for {AWAY_SECONDS:g} s: {meanwhile} bodies acknowledged meanwhile, drained in {took:.1f} s; {verdict}")

    # The Collector took bodies all the while.
    assert meanwhile > 0
    assert (tally.refused, verdict.faults) == ([], {})
