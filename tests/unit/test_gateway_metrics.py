"""`/metrics`: what is counted of calls, spans, backends and publications, and what counting costs."""

from __future__ import annotations

import asyncio
import time
import timeit
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.meter import CALIBRATION_MS, calibration
from gateway.metrics import GatewayMetrics
from gateway.pool.backend import Backend, EngineInfo
from gateway.pool.upstream import Upstream
from spangrad.settings import BackendSettings
from tests.support.fake_engine import ANSWER_TOKENS, PROMPT_IDS, FakeEngine
from tests.support.gateways import Stage, ask, models, staged

CHAT = "/v1/chat/completions"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape by its name, without our prefix, and its labels."""
    return {
        (sample.name.removeprefix("spangrad_gateway_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(stage: Stage) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with stage.client.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return samples(await answer.text())


def of_call(policy: str, status: str, error: str, dialect: str = CHAT) -> tuple[str, tuple[tuple[str, str], ...]]:
    return "calls_total", (("dialect", dialect), ("error_type", error), ("policy", policy), ("status", status))


async def test_metrics_calls_are_counted_by_outcome() -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        assert (await stage.chat())[0] == 200
        assert (await stage.chat(stream=True, n=2))[0] == 200
        stage.engine.status = 400
        assert (await stage.chat())[0] == 400
        assert (await stage.chat(model="nobody's"))[0] == 400
        await stage.spans(4)
        seen = await scrape(stage)
    assert {key: value for key, value in seen.items() if key[0] == "calls_total"} == {
        of_call("policy", "200", ""): 2,
        of_call("policy", "400", "400"): 1,
        of_call("", "400", "400"): 1,
    }
    labels = (("dialect", CHAT), ("policy", "policy"))
    assert seen["tokens_in_total", labels] == 2 * len(PROMPT_IDS)
    assert seen["tokens_out_total", labels] == 3 * len(ANSWER_TOKENS)
    assert seen["call_seconds_count", labels] == 3
    assert seen["first_byte_seconds_count", labels] == 2
    assert 0 < seen["first_byte_seconds_sum", labels] <= seen["call_seconds_sum", labels]
    assert seen["call_seconds_bucket", (*labels[:1], ("le", "+Inf"), *labels[1:])] == 3
    assert seen["spans_recorded_total", ()] == 4
    assert seen["calls_in_flight", ()] == 0


async def test_metrics_show_calls_in_flight_and_backends() -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.go_on.clear()
        stage.engine.arrived.clear()
        call = asyncio.create_task(stage.chat(stream=True))
        await stage.engine.arrived.wait()
        seen = await scrape(stage)
        assert (seen["calls_in_flight", ()], seen["calls_waiting", ()]) == (1, 0)
        backend = (("backend", "policy-0"), ("policy", "policy"))
        assert (seen["backend_in_flight", backend], seen["backend_version", backend]) == (1, 0)
        assert seen["backends", (("policy", "policy"), ("status", "serving"))] == 1
        stage.engine.go_on.set()
        await call
        assert (await scrape(stage))["calls_in_flight", ()] == 0


async def test_metrics_client_disconnect_counts_as_aborted() -> None:
    async with staged() as stage:
        stage.engine.go_on.clear()
        call = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        call.cancel()
        await stage.spans()
        assert (await scrape(stage))[of_call("policy", "", "aborted")] == 1


async def test_metrics_spans_are_waiting_until_delivered() -> None:
    async with staged(export_delay_seconds=30) as stage:
        await stage.chat()
        seen = await scrape(stage)
        assert (seen["spans_recorded_total", ()], seen["spans_delivered_total", ()]) == (1, 0)
        assert seen["spans_waiting_bytes", ()] >= seen["spans_memory_bytes", ()] > 500
    async with staged() as stage:
        await stage.chat()
        await stage.spans()
        async with asyncio.timeout(30):
            while (seen := await scrape(stage))["spans_delivered_total", ()] < 1:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        assert (seen["spans_waiting_bytes", ()], seen["spans_refused_total", ()]) == (0, 0)


async def test_metrics_publications_are_timed_by_outcome(tmp_path: Path) -> None:
    async with staged(FakeEngine()) as stage:
        await stage.readiness("serving")
        order = {"version": 1, "path": str(tmp_path), "checksum": "float32:00"}
        async with stage.client.post("/admin/policies/policy/versions", json=order) as answer:
            assert answer.status >= 400
        seen = await scrape(stage)
    assert seen["publication_seconds_count", (("outcome", "failed"), ("policy", "policy"))] == 1


async def test_metrics_publication_is_counted_by_its_end_where_its_trainer_disconnects(tmp_path: Path) -> None:
    async with staged(FakeEngine()) as stage:
        await stage.readiness("serving")
        stage.engine.hold_reload.clear()
        order = {"version": 1, "path": str(models(tmp_path, 1)[0])}
        publishing = asyncio.create_task(ask(stage, "POST", "/admin/policies/policy/versions", order))
        await stage.engine.reloading.wait()
        publishing.cancel()
        await asyncio.sleep(0.1)
        stage.engine.hold_reload.set()
        async with asyncio.timeout(30):
            while not (counted := await _publications(stage)):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
    assert counted == {"ok": 1}


async def _publications(stage: Stage) -> dict[str, float]:
    """The number of publications by outcome."""
    return {
        dict(labels)["outcome"]: value for (name, labels), value in (await scrape(stage)).items() if name == "publication_seconds_count"
    }


def test_gateway_metrics_registry_contains_no_process_metrics() -> None:
    other = Upstream("b-0", BackendSettings(url="http://b", policy="b"))
    other._busy_seconds = 1.5
    engine = Backend("a-0", BackendSettings(url="http://a", policy="a"), mock.Mock(), 1)
    engine.serve(EngineInfo("a", 7, "cafe", warm=True), None)
    engine.in_flight = 2
    exporter = mock.Mock(delivered=3, refused=1, waiting_bytes=10, memory_bytes=4)
    metrics = GatewayMetrics(mock.Mock(backends=[other, engine], waiting=5), exporter)
    metrics.published("a", "ok", 2.0)
    text = generate_latest(metrics).decode()
    assert "python_info" not in text
    assert {key: value for key, value in samples(text).items() if "bucket" not in key[0]} == {
        ("controller_up", ()): 1,
        ("followers", ()): 0,
        ("followers_dropped_total", ()): 0,
        ("calls_refused_late_total", ()): 0,
        ("calls_in_flight", ()): 0,
        ("calls_waiting", ()): 5,
        ("spans_recorded_total", ()): 0,
        ("spans_delivered_total", ()): 3,
        ("spans_refused_total", ()): 1,
        ("spans_waiting_bytes", ()): 10,
        ("spans_memory_bytes", ()): 4,
        ("backends", (("policy", "b"), ("status", "down"))): 1,
        ("backends", (("policy", "a"), ("status", "serving"))): 1,
        ("backend_in_flight", (("backend", "b-0"), ("policy", "b"))): 0,
        ("backend_in_flight", (("backend", "a-0"), ("policy", "a"))): 2,
        ("backend_busy_seconds_total", (("backend", "b-0"), ("policy", "b"))): 1.5,
        ("backend_busy_seconds_total", (("backend", "a-0"), ("policy", "a"))): 0,
        ("backend_version", (("backend", "a-0"), ("policy", "a"))): 7,
        ("publication_seconds_count", (("outcome", "ok"), ("policy", "a"))): 1,
        ("publication_seconds_sum", (("outcome", "ok"), ("policy", "a"))): 2,
    }


@pytest.mark.slow
def test_counting_a_call_costs_less_than_five_microseconds_of_a_fast_day() -> None:
    metrics = GatewayMetrics(mock.Mock(), mock.Mock())

    def count() -> None:
        metrics.began()
        metrics.ended("policy", CHAT, "200", "", tokens_in=900, tokens_out=300, first_byte_seconds=0.03, seconds=1.7)

    calls = 10_000
    in_turn = [timeit.timeit(count, timer=time.process_time, number=calls) / calls / calibration() for _ in range(10)]
    assert median(in_turn) * CALIBRATION_MS < 5e-6
