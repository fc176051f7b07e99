"""Clocks that are moved by an hour, either way: leases of the queue and of the ledger are neither freed nor frozen."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from runner.queue.client import LeaseHeartbeats, QueueClient
from runner.queue.wire import RolloutState
from spangrad.processes import wait_until
from spangrad.types import AttemptFailure
from tests.support.runners import (
    is_state,
    kill,
    new_rollouts,
    queue_server,
    queue_settings,
    runner_services,
    until,
    until_ended,
    with_mood,
)
from tests.support.trainers import Place

pytestmark = pytest.mark.slow

HOUR = 3600
ROOT = Path(__file__).parents[2]


# Real time of day that tests move, for a process and all that runs in it (Python, SQLite), as if the clock had been set.

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long long offset(void) {
    static volatile long long *place;
    if (!place) {
        int file = open(getenv("MOVED_CLOCK"), O_RDONLY);
        place = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *place;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *place) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (place) *place = precise.tv_sec;
    return precise.tv_sec;
}
"""


class MovedClock:
    """A clock for processes that are started with `environment`."""

    def __init__(self, directory: Path) -> None:
        """Make it; the test is skipped where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            pytest.skip("a C compiler is not here: install gcc")
        source, library, self._file = directory / "clock.c", directory / "clock.so", directory / "clock"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.move(0)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, seconds: int) -> None:
        """Set it to so many seconds from the real time, at once for all processes."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


@pytest.fixture
def clock(tmp_path: Path) -> MovedClock:
    return MovedClock(tmp_path)


@pytest.mark.parametrize("moved", [HOUR, -HOUR])
async def test_queue_leases_with_moved_clock_neither_freed_nor_frozen(queue_db: str, tmp_path: Path, clock: MovedClock, moved: int) -> None:
    settings = queue_settings(queue_db, queue__lease_seconds=1.5)
    with queue_server(settings, tmp_path / "queue.log", clock.environment):
        async with QueueClient.of(settings.queue) as client:
            await client.enqueue("run", new_rollouts(3))
            held, silent = await client.lease("run", "worker", 2)
            async with LeaseHeartbeats(client, "worker", lambda *_: None) as beating:
                beating.keep([held])
                clock.move(moved)
                began = time.monotonic()
                (seen,) = await client.lease("run", "worker")
                assert abs((await client.rollout(seen.rollout_id)).attempts[0].began_at - time.time() - moved) < 60, (
                    "its clock was not moved"
                )
                assert (await client.rollout(silent.rollout_id)).state is RolloutState.RUNNING, "it was freed"
                while (rollout := await client.rollout(silent.rollout_id)).state is RolloutState.RUNNING:
                    assert time.monotonic() - began < 30, "it is frozen"
                    await asyncio.sleep(0.05)
                assert rollout.attempts[0].reason is AttemptFailure.LOST
                assert (await client.rollout(held.rollout_id)).state is RolloutState.RUNNING, "it was freed"


@pytest.mark.parametrize("moved", [HOUR, -HOUR])
async def test_workers_with_moved_clock_lose_no_attempt(queue_db: str, tmp_path: Path, clock: MovedClock, moved: int) -> None:
    """Server, workers, hosts and programs: no attempt that is under way is lost, late or made twice; one whose worker dies is."""
    settings = queue_settings(queue_db, queue__lease_seconds=3)
    environment = clock.environment
    with (
        runner_services(tmp_path, queue__url=settings.queue.url, concurrency=2) as services,
        queue_server(settings, tmp_path / "queue.log", environment),
    ):
        async with QueueClient.of(settings.queue) as client:
            await client.enqueue("run", with_mood("slow", new_rollouts(40)))
            for _ in range(2):
                services.start_worker(env=environment)
            await until_ended(client, 5)
            clock.move(moved)
            ended = await until_ended(client, 40)
            whole = [await client.rollout(one.rollout_id) for one in ended]
            assert Counter(one.reason for rollout in whole for one in rollout.attempts) == {None: 40}
            assert max(one.seconds or 0 for rollout in whole for one in rollout.attempts) < 60, "time was counted by the clock of the day"
            seen = whole[-1].attempts[0]
            assert abs(seen.began_at - time.time() - moved) < 120, "its clock was not moved"
            await client.enqueue("run", with_mood("hang", new_rollouts(2, "held ")))
            await until(lambda: is_state(client, "held 0", RolloutState.RUNNING))
            clock.move(0)
            for child in services.children:
                kill(child.process.pid)
            await until(lambda: is_state(client, "held 0", RolloutState.QUEUED))
            assert [one.reason for one in (await client.rollout("held 0")).attempts] == [AttemptFailure.LOST]
        await asyncio.to_thread(wait_until, lambda: not services.left(), 30, "the end of the agents' programs")


LEDGER = """
import sys, time
from pathlib import Path
from trainer.ledger.ledger import Ledger
from trainer.data.source import BatchRollout, Group

place, moved, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
place = Path(place) if place.startswith("/") else place

def move(seconds):
    with file.open("r+b") as out:
        out.write(seconds.to_bytes(8, "little", signed=True))

def ledger(**changes):
    return Ledger(place, "policy", "main", lease_seconds=1.5, **changes)

theirs, ours = ledger(holder="other-host 7 123 other-boot/pid:[1]"), ledger()
theirs.register_initial(checksum="float32:00", path="/v0", tokenizer_hash="t", run_id="run")
lease = theirs.begin([BatchRollout(Group("run", "train", "spec", "g"), "r", 0, 0)])
assert ours.recover() == []
before = time.time()
move(moved)
assert abs(time.time() - before - moved) < 60, "the clock was not moved"
for _ in range(20):
    assert theirs.renew(lease)
    assert ours.recover() == [], "it was freed"
    time.sleep(0.1)
began = time.monotonic()
while not (recovered := ours.recover()):
    assert time.monotonic() - began < 30, "it is frozen"
    time.sleep(0.05)
print(recovered, time.monotonic() - began > 1)
"""


@pytest.mark.parametrize("moved", [HOUR, -HOUR])
def test_ledger_lease_with_moved_clock_neither_freed_nor_frozen(place: Place, clock: MovedClock, tmp_path: Path, moved: int) -> None:
    environment = {**os.environ, **clock.environment, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LEDGER, str(place()), str(moved), clock.environment["MOVED_CLOCK"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split("\n")[0], done.stderr) == ("[1] True", "")
