"""A store that stands still, or that is sent more than it may hold: senders are kept waiting, and nothing is lost or counted twice."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from tests.support.deliveries import Load, exported, judge
from tests.support.load_spans import PROTOBUF, Body, Held, Rollouts
from tests.support.processes import forget_height, height_mib, resident_mib
from tests.support.servers import running_store, store_settings

STILL_SECONDS = 6


@pytest.mark.slow
def test_store_that_is_suspended_loses_no_span_and_counts_resent_spans_once(
    tmp_path: Path, chance: Random, report: Callable[[str], None]
) -> None:
    """Senders give up after two seconds and send again: what they gave up is stored, too, once the store goes on."""
    store, run = store_settings(tmp_path / "data"), uuid.uuid4().hex[:8]
    with running_store(store, tmp_path / "log") as child:
        load = Load(store.otlp_http_port, store.otlp_grpc_port, Rollouts(chance.randrange(2**32), run).bodies, timeout=2)
        wait_until(lambda: load.tally.bodies > 50, 30, "some bodies", [child])
        before = resident_mib(child.process.pid)
        forget_height(child.process.pid)
        for _ in range(2):
            child.process.send_signal(signal.SIGSTOP)
            time.sleep(STILL_SECONDS)
            child.process.send_signal(signal.SIGCONT)
            time.sleep(2)
        tally = load.stop()
        height = height_mib(child.process.pid)
        verdict = judge(store, run, tally.held)
    report(f"{tally.broken} tries given up, resident {before} -> {height} MiB at most; {verdict}")

    assert (tally.refused, verdict.faults) == ([], {})
    assert tally.broken > 0
    # Bodies given up arrive all the same; they are held within the queue's bytes.
    assert verdict.delivered > verdict.spans
    assert height - before < store.queue_bytes // 2**20 + 512


def test_store_with_full_queue_answers_resource_exhausted(tmp_path: Path, chance: Random) -> None:
    # A body lies until the store's stop in a queue that holds no other beside it.
    store, run = store_settings(tmp_path / "data", queue_bytes=100_000, linger_ms=60_000), uuid.uuid4().hex[:8]
    rollouts = Rollouts(chance.randrange(2**32), run)
    bodies = [rollouts.traces([span for _ in range(160) for span in rollouts.rollout()[0]]) for _ in range(6)]
    assert min(len(body.plain) for body in bodies) > store.queue_bytes
    with running_store(store, tmp_path / "log") as child, ThreadPoolExecutor(len(bodies)) as pool:
        sent = [pool.submit(_answer, store, body) for body in bodies]
        wait_until(lambda: sum(future.done() for future in sent) == len(bodies) - 1, 60, "the refusals", [child])
        refused = _refused_by_grpc(store, bodies[0])
        child.stop(60)
        answers = [future.result() for future in sent]
    with running_store(store, tmp_path / "log"):
        taken = [body.held for body, (status, _) in zip(bodies, answers, strict=True) if status == 200]
        verdict = judge(store, run, Held.of(taken), build=False)

    assert sorted(answers) == [(200, ""), *[(429, "1")] * (len(bodies) - 1)]
    # Nothing of what was refused was stored.
    assert (verdict.faults, verdict.delivered) == ({}, verdict.spans)
    assert refused == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)


def _answer(store: StoreSettings, body: Body) -> tuple[int, str]:
    """Status, and when to come again."""
    request = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body.plain, {"Content-Type": PROTOBUF})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"]


def _refused_by_grpc(store: StoreSettings, body: Body) -> tuple[grpc.StatusCode, int]:
    """Send what is refused: code, and seconds after which to come again."""
    with pytest.raises(grpc.RpcError) as caught:
        exported(store.otlp_grpc_port, body)
    trailers: dict[str, bytes] = dict(caught.value.trailing_metadata())  # type: ignore[attr-defined]
    detail = RetryInfo()
    Status.FromString(trailers["grpc-status-details-bin"]).details[0].Unpack(detail)
    return caught.value.code(), detail.retry_delay.seconds  # type: ignore[attr-defined]
