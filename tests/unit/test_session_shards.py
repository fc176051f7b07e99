"""Processes of sessions as the server sees them: the sessions that they get, their crashes, and starts that fail."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.sessions import shard as shard_module
from runner.sessions import shards as shards_module
from runner.sessions.frames import Frame, FrameKind, FrameReader
from runner.sessions.messages import SessionOpening
from runner.sessions.sessions import EnvironmentSession, SessionTable
from runner.sessions.shard import EnvironmentDescription, SessionShard
from runner.sessions.shards import ShardCommand, ShardProcess, Shards
from spangrad.errors import EnvironmentsError
from spangrad.settings import EnvironmentServiceSettings
from tests.support.processes import own_open_files
from tests.support.virtual_time import run_in_virtual_time

NO_PROCESS = 2**22 + 1
"""Id above the largest of Linux: a signal to it reaches no process, while one to the group 0 would end all processes of the tests."""


class FakeProcess(ShardProcess):
    """A process whose environments are created at once, which answers pings, and which ends when it is told to."""

    @classmethod
    async def start(cls, command: ShardCommand) -> FakeProcess:
        process = cls()
        process.serve()
        return process

    def serve(self) -> None:
        self.described.set_result(EnvironmentDescription({}, {}))

    @property
    def pid(self) -> int:
        return NO_PROCESS

    def send(self, frame: Frame) -> None:
        if frame.kind is FrameKind.OPEN:
            self.users[frame.session].receive(Frame(FrameKind.OPEN, frame.session))
        elif frame.kind is FrameKind.PING:
            self.answered = time.monotonic()

    async def stop(self) -> None:
        pass

    kill = stop


@given(st.integers(1, 4), st.lists(st.sampled_from(["open", "open", "open", "close", "crash"]), max_size=40), st.randoms())
@settings(deadline=None)
def test_sessions_are_spread_in_equal_shares_and_a_crash_costs_its_own_alone(shards: int, events: list[str], chance: Random) -> None:
    async def scenario() -> None:
        processes = Shards(ShardCommand("", Path(), {}), shards, 1.0)
        times = EnvironmentServiceSettings(lease_seconds=10, idle_seconds=10_000, operation_seconds=5)
        sessions = SessionTable(processes, 1000, times)
        await processes.start()
        alive: list[EnvironmentSession] = []
        shares: Counter[ShardProcess] = Counter()
        try:
            for event in events:
                if event == "open":
                    session = await sessions.open(None, SessionOpening())
                    assert all(shares[session.shard] <= shares[process] for process in processes.serving_processes)
                    shares[session.shard] += 1
                    alive.append(session)
                elif event == "close" and alive:
                    session = alive.pop(chance.randrange(len(alive)))
                    shares[session.shard] -= 1
                    sessions.end(session, "closed")
                elif event == "crash":
                    crashed = chance.choice(processes.serving_processes)
                    crashed.connection_lost(None)
                    assert [session for session in alive if session.over] == [session for session in alive if session.shard is crashed]
                    alive = [session for session in alive if session.shard is not crashed]
                    assert (len(sessions), len(processes.serving_processes)) == (len(alive), shards - 1)
                    await asyncio.sleep(1)  # by then another one is started
                    assert len(processes.serving_processes) == shards
            if not {"close", "crash"} & set(events):
                held = [shares[process] for process in processes.serving_processes]
                assert max(held) - min(held) <= 1
        finally:
            await processes.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ShardProcess", FakeProcess)
        run_in_virtual_time(scenario())


class FailingStarts(FakeProcess):
    """A process that serves at first, and then again after several starts that fail, each in its own way."""

    failures: list[BaseException | str]
    killed: list[str]
    way = ""

    @classmethod
    async def start(cls, command: ShardCommand) -> FailingStarts:
        failure = cls.failures.pop(0) if cls.failures else "none"
        if isinstance(failure, BaseException) and not isinstance(failure, EnvironmentsError):
            raise failure
        process = cls()
        process.way = str(failure)
        if isinstance(failure, EnvironmentsError):
            process.described.set_exception(failure)
        elif failure == "none":
            process.serve()
        return process

    async def kill(self) -> None:
        self.killed.append(self.way)


def test_shard_starts_that_fail_are_repeated_until_sessions_open(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    unprepared, broken = subprocess.SubprocessError("preexec_fn"), EnvironmentsError("no environment")
    FailingStarts.failures = ["none", OSError(11, "no more processes"), unprepared, "hangs", broken]
    FailingStarts.killed = []

    async def scenario() -> None:
        shards = Shards(ShardCommand("", Path(), {}), 1, 1.0)
        sessions = SessionTable(shards, 10, EnvironmentServiceSettings())
        await shards.start()
        try:
            shards.serving_processes[0].connection_lost(None)
            await asyncio.sleep(sum(shards_module._RETRY_SECONDS) + shards_module._RETRY_SECONDS[-1] + shards_module._START_SECONDS + 1)
            assert (await sessions.open(None, SessionOpening())).shard.serves
            assert shards.counts.registry.get_sample_value("spangrad_sessions_shard_restarts_total") == 1
        finally:
            await shards.stop()

    monkeypatch.setattr(shards_module, "ShardProcess", FailingStarts)
    run_in_virtual_time(scenario())
    assert FailingStarts.killed == ["none", "hangs", "no environment"]
    for reason in ("no more processes", "preexec_fn", "not served within 300 s", "no environment"):
        assert reason in caplog.text


def test_shards_start_of_process_that_hangs_raises_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    FailingStarts.failures = ["none", "hangs"]
    FailingStarts.killed = []

    async def scenario() -> None:
        shards = Shards(ShardCommand("games:Chess", Path(), {}), 2, 1.0)
        try:
            with pytest.raises(
                EnvironmentsError, match=rf"games:Chess was not created within 300 s \(process {NO_PROCESS}\)\. Its own messages"
            ):
                await shards.start()
        finally:
            await shards.stop()

    monkeypatch.setattr(shards_module, "ShardProcess", FailingStarts)
    run_in_virtual_time(scenario())


async def test_shards_start_without_room_for_a_process_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(FakeProcess):
        count = 0

        @classmethod
        async def start(cls, command: ShardCommand) -> FakeProcess:
            cls.count += 1
            if cls.count == 2:
                raise OSError(11, "no more processes")
            return await super().start(command)

    monkeypatch.setattr(shards_module, "ShardProcess", Exhausted)
    with pytest.raises(EnvironmentsError, match=r"process 2 of 3 .*no more processes.*Lower --shards, or raise the limit of processes\."):
        await Shards(ShardCommand("", Path(), {}), 3, 1.0).start()


async def test_shard_start_that_fails_leaves_no_socket_open() -> None:
    class Exhausted(ShardCommand):
        def start(self, requests: socket.socket, responses: socket.socket) -> subprocess.Popen[bytes]:
            raise OSError(11, "no more processes")

    before = own_open_files()
    with pytest.raises(OSError, match="no more processes") as raised:
        await ShardProcess.start(Exhausted("", Path(), {}))
    assert raised.tb is not None  # the sockets are in its frames: nothing else has closed them
    assert own_open_files() == before


class Bandit:
    """Environment whose methods are plain, so that each session has a thread."""

    def reset(self, task: object) -> str:
        return "pull"

    def step(self, action: object) -> str:
        return "pull"


async def test_shard_session_without_thread_is_refused_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, far_end = socket.socketpair()
    start = threading.Thread.start

    def start_unless_second(thread: threading.Thread) -> None:
        if thread.name == "session 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_second)
    shard = SessionShard(Bandit, far_end)
    opening = msgspec.json.encode(SessionOpening())
    shard.data_received(b"".join(Frame(FrameKind.OPEN, number, opening).encode() for number in (1, 2, 3)))
    reader, frames = FrameReader(), list[Frame]()
    while len(frames) < 3:
        frames += reader.feed(await asyncio.to_thread(ours.recv, 2**16))
    refusals = {frame.session: frame.payload for frame in frames}
    assert (refusals[1], refusals[3]) == (b"", b"")
    assert b"no environment can be created: can't start new thread. Raise the limit of processes" in refusals[2]
    await shard.close()
    ours.close()
    far_end.close()


class SlowEnd:
    """Environment in the event loop that takes long to close, and whose step never ends."""

    seconds = 0.3
    """Time that it takes to close."""

    def __init__(self) -> None:
        self.events: list[str] = []
        environments.append(self)

    async def reset(self, task: object) -> str:
        return "begin"

    async def step(self, action: object) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")
        return ""

    async def close(self) -> None:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.events.append("cut short")
            raise
        self.events.append("closed")


environments: list[SlowEnd] = []


BEGIN, STEP = b'{"type": "reset"}', b'{"type": "step", "data": {}}'


@pytest.mark.parametrize(
    ("requests", "seconds", "events"),
    [
        ((), 0.3, ["closed"]),
        ((BEGIN, STEP), 0.3, ["cancelled", "closed"]),
        ((), 60, ["cut short"]),
        ((BEGIN, STEP), 60, ["cancelled", "cut short"]),
    ],
)
async def test_shard_session_that_ends_cancels_its_request_and_has_time_to_close(
    requests: tuple[bytes, ...], seconds: float, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "_CANCEL_SECONDS", 0.1)
    monkeypatch.setattr(shard_module, "_END_SECONDS", 2.0 if seconds > 2 else 60.0)
    monkeypatch.setattr(SlowEnd, "seconds", seconds)
    ours, far_end = socket.socketpair()
    shard = SessionShard(SlowEnd, far_end)
    opening = Frame(FrameKind.OPEN, 1, msgspec.json.encode(SessionOpening()))
    shard.data_received(b"".join(frame.encode() for frame in (opening, *(Frame(FrameKind.MESSAGE, 1, request) for request in requests))))
    reader, frames = FrameReader(), list[Frame]()
    while len(frames) < len(requests or [b""]):
        frames += reader.feed(await asyncio.to_thread(ours.recv, 2**16))
    shard.data_received(Frame(FrameKind.CLOSE, 1).encode())
    async with asyncio.timeout(20):
        await asyncio.gather(*shard._tasks.values(), return_exceptions=True)
    assert environments[-1].events == events
    ours.close()
    far_end.close()


async def test_shard_session_that_ends_before_its_environment_is_created_leaves_no_timer() -> None:
    class Broken(SlowEnd):
        def __init__(self) -> None:
            raise RuntimeError("no board")

    ours, far_end = socket.socketpair()
    shard = SessionShard(Broken, far_end)
    opening = Frame(FrameKind.OPEN, 1, msgspec.json.encode(SessionOpening()))
    shard.data_received(opening.encode() + Frame(FrameKind.CLOSE, 1).encode())
    await asyncio.gather(*shard._tasks.values())
    assert not shard._cancellations
    ours.close()
    far_end.close()
