"""Sandboxes that stay: programs, files and ports in them, their limits of time and output, and their ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import anyio
import psutil
import pytest

from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.sandboxes.sandbox import Sandbox, open_sandbox
from spangrad.errors import SandboxError
from spangrad.types import SandboxRung
from tests.support.runners import is_true, no_descriptors, until

LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**24)


@pytest.fixture(scope="module")
def directory() -> Generator[Path]:
    """A directory that the users of sandboxes can read."""
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        yield Path(base)


@pytest.fixture(params=[SandboxRung.BUBBLEWRAP, SandboxRung.LANDLOCK])
async def sandbox(request: pytest.FixtureRequest, directory: Path) -> AsyncGenerator[Sandbox]:
    opened = open_sandbox(SandboxPolicy(directory, (), {}, False, LIMITS, engine=request.param))
    try:
        started = await opened.__aenter__()
    except SandboxError as error:
        pytest.skip(str(error))
    yield started
    await opened.__aexit__(None, None, None)
    assert started.process.returncode is not None


async def private(sandbox: Sandbox) -> str:
    return (await sandbox.run(["sh", "-c", 'printf %s "$TMPDIR"'])).stdout.decode()


async def test_run_program_returns_its_outputs_and_exit_code(sandbox: Sandbox, directory: Path) -> None:
    result = await sandbox.run(["sh", "-c", 'cat; pwd; echo "$X" >&2; exit 3'], stdin=b"input\n", environment={"X": "y"})
    assert (result.stdout, result.stderr, result.exit_code) == (f"input\n{directory}\n".encode(), b"y\n", 3)
    assert not result.truncated
    assert not result.timed_out
    with pytest.raises(SandboxError, match=r"start in the sandbox: missing: "):
        await sandbox.run(["missing"])


@pytest.mark.usefixtures("blocked_pipes")
async def test_run_writer_to_a_closed_pipe_ends_as_outside(sandbox: Sandbox) -> None:
    result = await sandbox.run(["bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"])
    assert (result.stdout, result.stderr) == (b"y\n%d\n" % (128 + signal.SIGPIPE), b"")


async def test_run_many_orphans_one_after_another_stay_below_the_limit_of_processes(sandbox: Sandbox) -> None:
    script = "for number in $(seq 80); do (sleep 0.02 &); sleep 0.01; done; echo done"
    result = await sandbox.run(["bash", "-c", script], timeout_seconds=60)
    assert (result.stdout, result.stderr, result.exit_code) == (b"done\n", b"", 0)


async def test_run_over_time_is_killed_with_its_session(sandbox: Sandbox) -> None:
    result = await sandbox.run(["sh", "-c", "echo before; sleep 600 & sleep 600"], timeout_seconds=3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -signal.SIGKILL, b"before\n")


async def test_run_cancelled_ends_its_program_and_keeps_no_exit_code(sandbox: Sandbox) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    for timeout_seconds in (None, 0.01):
        running = asyncio.create_task(sandbox.run(["sleep", "9"], timeout_seconds=timeout_seconds))
        await until(lambda: is_true(sandbox._ends))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sandbox._ends == {}
    process = await sandbox.open_process(["sleep", "9"])
    process.ended.cancel()  # as a cancelled task that waits for it does
    await process.end()
    process.close()
    await until(lambda: is_true(not sandbox._ends))
    assert failures == []


async def test_run_cancelled_by_a_scope_leaves_no_pipe_open(sandbox: Sandbox) -> None:
    async def act() -> None:
        await sandbox.run(["sleep", "86416"])

    await sandbox.run(["true"])
    before = _open_files()
    # A scope of anyio cancels each wait in it.
    async with anyio.create_task_group() as group:
        group.start_soon(act)
        await until(lambda: is_true(sandbox._ends))
        group.cancel_scope.cancel()
    await until(lambda: is_true(not _running("sleep", "86416") and not sandbox._ends))
    assert _open_files() == before


async def test_run_cancelled_while_its_program_starts_ends_it(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run(["sleep", "86417"]))
    await asyncio.sleep(0)
    assert sandbox._answers
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sandbox.run(["true"])  # its start follows that of the other
    await until(lambda: is_true(not _running("sleep", "86417") and not sandbox._ends))


async def test_ask_cancelled_with_its_answer_ends_program_and_files(sandbox: Sandbox) -> None:
    loop = asyncio.get_running_loop()
    for request in (lambda: sandbox.open_process(["sleep", "86418"]), lambda: sandbox.read("/etc/hostname")):
        before = _open_files()
        asking = asyncio.create_task(request())
        await asyncio.sleep(0)
        assert sandbox._answers
        loop.remove_reader(sandbox._control)
        await asyncio.to_thread(select.select, [sandbox._control], [], [], 30)
        sandbox._receive()
        asking.cancel()  # in the step of the event loop in which the answer came
        loop.add_reader(sandbox._control, sandbox._receive)
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: is_true(not _running("sleep", "86418") and not sandbox._ends))
        assert _open_files() == before


def _open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def _running(*command: str) -> bool:
    """Return whether any process of the machine has a command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().split(b"\0")[:-1] == [os.fsencode(word) for word in command]:
                return True
        except OSError:
            continue  # it has ended
    return False


async def test_run_long_output_is_cut_and_large_input_read(sandbox: Sandbox) -> None:
    result = await sandbox.run(["cat"], stdin=bytes(300_000), most_bytes=1000)
    assert (len(result.stdout), result.truncated, result.exit_code) == (1000, True, 0)


async def test_read_and_write_files_stay_inside(sandbox: Sandbox, directory: Path) -> None:
    path = f"{await private(sandbox)}/new/file"
    await sandbox.write(path, content := os.urandom(200_000))
    assert await sandbox.read(path) == content
    assert await sandbox.read(path, most_bytes=10) == content[:10]
    await sandbox.run(["sh", "-c", 'ln -s /etc/shadow "$TMPDIR/link"; mkfifo "$TMPDIR/pipe"'])
    for refused in ("link", "pipe", "missing", "new"):
        with pytest.raises(SandboxError, match="open in the sandbox: "):
            await sandbox.read(f"{await private(sandbox)}/{refused}")
    with pytest.raises(SandboxError, match="write in the sandbox: "):
        await sandbox.write(str(directory / "file"), b"x")


async def test_read_without_descriptors_is_refused_and_the_sandbox_stays(sandbox: Sandbox) -> None:
    path = f"{await private(sandbox)}/file"
    await sandbox.write(path, b"x")
    with no_descriptors(), pytest.raises(SandboxError, match="open in the sandbox: Too many open files"):
        await sandbox.read(path)
    assert await sandbox.read(path) == b"x"


async def test_write_to_a_pipe_is_refused_and_modes_of_files_stay(sandbox: Sandbox) -> None:
    home = await private(sandbox)
    await sandbox.run(["sh", "-c", 'mkfifo "$TMPDIR/pipe" "$TMPDIR/read"; echo long >"$TMPDIR/mode"; chmod 750 "$TMPDIR/mode"'])
    reader = await sandbox.open_process(["sh", "-c", 'exec 3<>"$0"; echo opened; exec sleep 600', f"{home}/read"])
    assert await asyncio.to_thread(os.read, reader.stdout, 100) == b"opened\n"
    for refused, reason in (("pipe", "No such device or address"), ("read", "it is no regular file")):
        with pytest.raises(SandboxError, match=rf"write in the sandbox: {reason} \(.*/{refused}\)"):
            await asyncio.wait_for(sandbox.write(f"{home}/{refused}", b"x"), 60)
    reader.close()
    for name in ("mode", "new"):
        await sandbox.write(f"{home}/{name}", b"x")
    seen = await sandbox.run(["sh", "-c", 'cd "$TMPDIR"; : >plain; stat -c "%a %s" mode new plain'])
    mode, new, plain = seen.stdout.decode().splitlines()
    assert (mode, new) == ("750 1", plain.replace(" 0", " 1"))


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
async def test_requests_that_cannot_be_sent_are_refused_and_the_sandbox_stays(sandbox: Sandbox, text: str) -> None:
    for request in (sandbox.run(["echo", text]), sandbox.read(f"/tmp/{text}"), sandbox.write(f"/tmp/{text}", b"")):
        with pytest.raises(SandboxError, match="has a character that no path"):
            await request
    with pytest.raises(SandboxError, match="Write long words to a file"):
        await sandbox.run(["echo", "x" * 200_000])
    with pytest.raises(SandboxError, match="start in the sandbox: no-such-program: "):
        await sandbox.run(["no-such-program"])
    assert (await sandbox.run(["printf", "%s", "\udcff"])).stdout == b"\xff"


async def test_run_beyond_the_room_of_the_socket_waits_for_room(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(["true", "x" * 100_000]) for _ in range(6)))
    assert [result.exit_code for result in results] == [0] * 6
    for process in (parent := psutil.Process(sandbox.process.pid), *parent.children(recursive=True)):
        process.suspend()  # it answers nothing before it is killed
    waiting = [asyncio.create_task(sandbox.run(["true", "x" * 100_000])) for _ in range(6)]
    await asyncio.sleep(0)
    os.killpg(sandbox.process.pid, signal.SIGKILL)
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert ["Start another one." in str(error) for error in errors] == [True] * 6


async def test_open_process_pipes_carry_a_conversation(sandbox: Sandbox) -> None:
    process = await sandbox.open_process(["cat"])
    os.write(process.stdin, b"hello")
    assert await asyncio.to_thread(os.read, process.stdout, 100) == b"hello"
    await process.kill(signal.SIGTERM)
    assert await process.ended == -signal.SIGTERM
    process.close()


async def test_expose_port_serves_a_server_inside(sandbox: Sandbox) -> None:
    if sandbox.rung is not SandboxRung.BUBBLEWRAP:
        with pytest.raises(SandboxError, match="has no network of its own"):
            await sandbox.expose(8000)
        return
    if not (await sandbox.run(["sh", "-c", "command -v python3"])).stdout:
        pytest.skip("there is no python3 in the sandbox")
    server = await sandbox.open_process(["sh", "-c", "exec /usr/bin/env python3 -m http.server 8000 --directory /usr/share 2>&1"])
    url = await sandbox.expose(8000)

    def is_served() -> bool:
        try:
            return len(urllib.request.urlopen(url, timeout=30).read()) > 0
        except OSError:
            return False

    await until(lambda: asyncio.to_thread(is_served), 60)
    server.close()


async def test_sandbox_after_a_kill_fails_requests(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run(["sh", "-c", "while kill -0 $PPID; do sleep 0.1; done"]))
    await asyncio.sleep(0.2)
    os.killpg(sandbox.process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the sandbox has ended"):
        await running
    with pytest.raises(SandboxError, match="Start another"):
        await sandbox.run(["true"])
