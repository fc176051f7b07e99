"""A full disk: what cannot be written is not acknowledged, questions are still answered, and all goes on when there is room again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import grpc
import pytest

from collector.write.pending_batch import MAX_RETRY_SECONDS
from spangrad.processes import wait_until
from spangrad.store.clickhouse import connect
from tests.support.deliveries import Load, exported, judge, lacking, running_pipeline
from tests.support.load_spans import Rollouts
from tests.support.servers import post, running_store, small_disk, store_settings

ROOM = 640
"""MiB."""
TIMES = 6
"""Number of times that the disk is filled: a failure in the middle of a write depends on milliseconds."""
QUEUE_BYTES = 2**27
"""Size of the queue of each signal."""
FILL_BYTES_A_SECOND = 300 * 2**20


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", ROOM) as mount:
        yield mount


def fill(disk: Path) -> Path:
    """Take all the room that is left, as fast as a disk would."""
    ballast, piece = disk / "ballast", bytes(1 << 20)
    with ballast.open("ab", buffering=0) as file:
        try:
            while file.write(piece):
                time.sleep(len(piece) / FILL_BYTES_A_SECOND)
        except OSError:
            return ballast
    raise AssertionError("the disk took nothing, and did not say why")


def stands_still(load: Load) -> bool:
    """Return whether no body of the load is accepted for three seconds."""
    bodies = load.tally.bodies
    time.sleep(3)
    return load.tally.bodies == bodies


@pytest.mark.slow
def test_store_on_full_disk_answers_503_and_resumes_with_room(
    small_disk: Path, tmp_path: Path, chance: Random, report: Callable[[str], None]
) -> None:
    store, run = store_settings(small_disk / "data"), uuid.uuid4().hex[:8]
    rollouts = Rollouts(chance.randrange(2**32), run)
    body = rollouts.traces(rollouts.rollout()[0])
    with running_store(store, tmp_path / "log") as child, connect(store) as client:
        load = Load(store.otlp_http_port, store.otlp_grpc_port, rollouts.bodies, connections=8)
        wait_until(lambda: load.tally.bodies > 30, 30, "some bodies", [child])
        answers: set[int] = set()
        recovered = 0.0
        for _ in range(TIMES):
            ballast = fill(small_disk)
            refused = load.tally.again
            wait_until(lambda refused=refused: load.tally.again > refused + 20, 60, "refusals", [child])
            answers.add(post(f"{store.otlp_endpoint}/v1/traces", body.plain))
            with pytest.raises(grpc.RpcError) as caught:
                exported(store.otlp_grpc_port, body)
            asked = client.query("SELECT count() > 0 FROM spangrad.rollout_spans").result_rows
            ballast.unlink()
            after, began = load.tally.bodies, time.monotonic()
            wait_until(lambda after=after: load.tally.bodies > after + 30, 30, "bodies after there is room", [child])
            recovered = max(recovered, time.monotonic() - began)
        tally = load.stop()
        # What could not be stored while the disk was full is tried again by and by; until then questions are answered without it.
        wait_until(lambda: not lacking(store, run, tally.held), 3 * MAX_RETRY_SECONDS, "all that was acknowledged", [child])
        verdict = judge(store, run, tally.held)
        child.check()
    report(f"full {TIMES} times, {tally.again} refusals, 30 bodies at most {recovered:.1f} s after there was room; {verdict}")

    assert (answers, caught.value.code(), asked) == ({503}, grpc.StatusCode.UNAVAILABLE, [(True,)])  # type: ignore[attr-defined]
    assert (tally.refused, verdict.faults) == ([], {})


@pytest.mark.slow
def test_collector_with_full_queue_refuses_and_resumes_with_room(
    small_disk: Path, tmp_path: Path, chance: Random, report: Callable[[str], None]
) -> None:
    # As small a disk as `spangrad collector` takes for these queues: their files have room for what they may hold.
    (small_disk / "ballast").write_bytes(bytes(ROOM * 2**20 - 2 * QUEUE_BYTES - 2**20))
    with running_pipeline(tmp_path, queue_path=str(small_disk / "queue"), queue_bytes=QUEUE_BYTES) as pipeline:
        load = pipeline.load(chance.randrange(2**32))
        wait_until(lambda: load.tally.bodies > 30, 30, "some bodies")
        pipeline.kill("store")
        wait_until(lambda: stands_still(load), 120, "a queue that takes no more")
        bodies = load.tally.bodies
        pipeline.start_store()
        began = time.monotonic()
        tally = load.stop()
        verdict = pipeline.judge(tally, build=False)
        drained = time.monotonic() - began
    report(f"full after {bodies} bodies, {tally.again} tried again, drained in {drained:.1f} s; {verdict}")

    assert tally.bodies > bodies
    assert (tally.refused, verdict.faults) == ([], {})
