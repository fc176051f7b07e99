"""SWE-ReX both ways: its own package, unmodified, acts in a sandbox of ours, and our tools act on its server and on ours."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.context import Context
from pydantic import SecretStr

from benchmarks.peers.environment import peer_environment
from runner.sandboxes import sandbox
from runner.sandboxes.engines import SandboxEngine
from runner.sandboxes.policy import RemoteServer, SandboxLimits, SandboxPolicy
from runner.sandboxes.remote import RemoteSandbox
from runner.sandboxes.sandbox import Sandbox
from runner.swe_rex import runtime
from runner.swe_rex.runtime import RexRuntime
from runner.swe_rex.server import running
from runner.swe_rex.wire import RexAction, RexClosedSession, RexError, RexSession
from runner.tools import session as tool_session
from runner.tools.action_spans import ActionSpans
from runner.tools.session import ToolFailedError, ToolSession
from runner.tools.toolbox import Toolbox, open_toolbox, prepare_tools
from spangrad.agent.propagation import context_from
from spangrad.errors import SandboxError, SandboxRequestError
from spangrad.http.json_http import status_of
from spangrad.processes import MARK, free_ports
from spangrad.settings import Settings, ToolServiceSettings
from spangrad.types import SandboxRung
from tests.support.otlp import OtlpSink
from tests.support.runners import until

LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**24)
CLIENT = Path(__file__).resolve().parent.parent / "programs" / "swe_rex_client.py"


@pytest.fixture(scope="module")
def policy() -> Generator[SandboxPolicy]:
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        Path(base, "below").mkdir()
        Path(base, "below", "file.txt").write_text("uploaded")
        yield SandboxPolicy(Path(base), (), {}, False, LIMITS)


async def client(url: str, key: str) -> tuple[int | None, str, str]:
    """The package's client, and what it printed."""
    host, _, port = url.rpartition(":")
    process = await asyncio.create_subprocess_exec(
        await asyncio.to_thread(lambda: peer_environment("swe_rex") / "python"), "-P", CLIENT, host, port, key,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_remote_runtime_of_the_package_acts_in_a_sandbox(policy: SandboxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "host")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20of-agents")
    parent = context_from({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "baggage": "spangrad.rollout.id=ro"}, Context())
    with OtlpSink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        settings = Settings(tools=ToolServiceSettings(port=0, token=SecretStr("key")))
        try:
            async with running(settings, policy, parent) as url:
                code, stdout, stderr = await client(url, "key")
                refused, _, why = await client(url, "wrong")
        except SandboxError as error:
            pytest.skip(str(error))
        assert code == 0, stderr
        seen = json.loads(stdout.splitlines()[-1])
        assert seen.pop("raise")[1].startswith("mine: Command 'exit_code() { return 3; }; exit_code' failed with exit code 3.")
        assert "syntax error" in seen.pop("syntax")[1]
        assert seen == {
            "alive": True,
            "kept": ["hello yes\n/tmp\n", 0],
            "silent": 1,
            "timeout": "CommandTimeoutError",
            "interrupted": 130,
            "open": ["", r"\? $", "got hello\n", r"\? $"],
            "busy": "an action is open: write lines to it until it ends, or interrupt it",
            "unmatched": "CommandTimeoutError",
            "left": ["", 0, "quit\n"],
            "unread": [["a", r"\? "], ["b", r"\? "], ["", "got hi"]],
            "after": "after\n",
            "killed": "killed\n",
            "expected": ["", "ready"],
            "other_session": "SessionDoesNotExistError",
            "execute": ["/tmp\n1\n", "bad\n", 4],
            "shell": "b\nc\n",
            "check": "NonZeroExitCodeError",
            "slow": "CommandTimeoutError",
            "missing": "FileNotFoundError",
            "uploaded": ["uploaded", "uploaded"],
            "closed": "SessionDoesNotExistError",
            "fresh": 1,
        }
        assert refused
        assert "401" in why
        spans = [span for span in sink.spans if span.name.startswith("execute_tool ")]
        assert {(span.trace_id, span.attributes["spangrad.rollout.id"]) for span in spans} == {("ab" * 16, "ro")}
        assert {span.name.split()[1] for span in spans} == {"shell", "execute", "read_file", "write_file", "upload"}
        assert {request.get("authorization") for request in sink.requests} == {"Bearer of-agents"}


async def test_rex_runtime_whose_shell_fails_to_close_stops_its_sandbox(policy: SandboxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sandbox] = []

    async def start(engine: SandboxEngine) -> Sandbox:
        started.append(await sandbox.start(engine))
        return started[-1]

    async def fail(*_: object) -> None:
        raise OSError("the shell cannot be closed")

    monkeypatch.setattr(runtime, "start", start)
    try:
        opened = RexRuntime(prepare_tools(policy), ActionSpans(None))
        await opened.create_session(RexSession(), Context())
    except SandboxError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(ToolSession, "__aexit__", fail)
    with pytest.raises(OSError, match="cannot be closed"):
        await opened.close()
    (stopped,) = started
    assert stopped.process.returncode is not None


@pytest.mark.parametrize("end", ["session", "sandbox"])
async def test_rex_runtime_command_of_a_closed_shell_ends_with_it(policy: SandboxPolicy, end: str) -> None:
    try:
        opened = RexRuntime(prepare_tools(policy), ActionSpans(None))
        await opened.create_session(RexSession(), Context())
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        acting = asyncio.create_task(opened.run_in_session(RexAction("sleep 600"), Context()))
        await asyncio.sleep(0.5)
        await asyncio.wait_for(opened.close_session(RexClosedSession(), Context()) if end == "session" else opened.close(), 60)
        with pytest.raises(RexError, match="bash was closed in the sandbox while an action ran"):
            await asyncio.wait_for(acting, 60)
        await opened.create_session(RexSession(), Context())
        assert (await opened.run_in_session(RexAction("echo again", timeout=20), Context()))["output"] == "again\n"
    finally:
        await opened.close()


@asynccontextmanager
async def server_of_ours(policy: SandboxPolicy, key: str) -> AsyncGenerator[str]:
    async with running(Settings(tools=ToolServiceSettings(port=0, token=SecretStr(key))), policy, Context()) as url:
        yield url


LOSES_CODES = """
import itertools, runpy, pexpect
numbers, expect = itertools.count(0), pexpect.spawn.expect
def expect_or_lose(self, pattern, timeout=-1, **options):
    if timeout == 0.1 and next(numbers) % 3 == 0:  # the prompt after an exit code
        raise pexpect.TIMEOUT("the machine is busy")
    return expect(self, pattern, timeout=timeout, **options)
pexpect.spawn.expect = expect_or_lose
runpy.run_module("swerex.server", run_name="__main__", alter_sys=True)
"""
"""Program of SWE-ReX's own server whose every third command loses its exit code, as some do on a busy machine."""


@asynccontextmanager
async def server_of_the_package(policy: SandboxPolicy, key: str, *program: str) -> AsyncGenerator[str]:
    del policy
    programs = await asyncio.to_thread(peer_environment, "swe_rex")
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        programs / "python", "-P", *(program or ("-m", "swerex.server")), "--host", "127.0.0.1", "--port", str(port), "--auth-token", key,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until(lambda: asyncio.to_thread(lambda: status_of(f"http://127.0.0.1:{port}/is_alive") is not None), seconds=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def busy_server_of_the_package(policy: SandboxPolicy, key: str) -> AbstractAsyncContextManager[str]:
    return server_of_the_package(policy, key, "-c", LOSES_CODES)


@pytest.mark.parametrize("serve", [server_of_ours, server_of_the_package, busy_server_of_the_package])
async def test_toolbox_on_a_remote_server_acts_there(serve: Any, policy: SandboxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_session, "_GRACE_SECONDS", 60.0)
    remote = replace(policy, engine=SandboxRung.REMOTE)
    try:
        async with serve(policy, "key") as url:
            with pytest.raises(SandboxError, match=r"did not start: .*See runner\.sandbox\.token"):
                async with open_toolbox(replace(remote, remote=RemoteServer(url, "wrong"))):
                    pass
            async with open_toolbox(replace(remote, remote=RemoteServer(url, "key"))) as tools:
                await act_everywhere(tools)
    except SandboxError as error:
        if "no sandbox can be started here" not in str(error):
            raise
        pytest.skip(str(error))


async def test_rex_server_request_that_comes_again_is_applied_once(policy: SandboxPolicy) -> None:
    try:
        async with server_of_ours(policy, "key") as url, aiohttp.ClientSession(url, headers={"X-API-Key": "key"}) as http:

            async def post(path: str, body: dict[str, Any], number: str) -> tuple[int, Any]:
                async with http.post(path, json=body, headers={"X-Request-ID": number}) as answer:
                    return answer.status, await answer.json()

            async def act(command: str, number: str) -> tuple[int, Any]:
                return await post("/run_in_session", {"action_type": "bash", "command": command}, number)

            await post("/create_session", {}, "session")
            assert (await act("cd /tmp", "directory"))[0] == 200
            first = await act("echo x >> failed; false", "failed")
            assert (first[0], first[1]["swerexception"]["class_path"]) == (511, "swerex.exceptions.NonZeroExitCodeError")
            assert await act("echo x >> failed; false", "failed") == first
            slow = ("sleep 1; echo x >> slow", "slow")
            both = await asyncio.gather(act(*slow), act(*slow))
            assert both[0] == both[1]
            assert both[0][0] == 200
            # Its client leaves, and asks again.
            left = ("sleep 1; echo x >> left", "left")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(act(*left), 0.3)
            assert (await act(*left))[0] == 200
            assert (await act("cat failed slow left", "read"))[1]["output"].split() == ["x", "x", "x"]
    except SandboxError as error:
        pytest.skip(str(error))


async def act_everywhere(tools: Toolbox) -> None:
    sandbox = tools.sandbox
    assert isinstance(sandbox, RemoteSandbox)
    assert (await tools.shell("cat below/file.txt; cd below; X=1")).strip() == "uploaded"
    assert (await tools.shell("echo $X; basename $PWD")).split() == ["1", "below"]
    with pytest.raises(ToolFailedError, match=r"^\[exit code 3\]$"):
        await tools.shell("(exit 3)")
    with pytest.raises(ToolFailedError, match=r"syntax error[\s\S]*\[exit code 2\]$"):
        await tools.shell("if then")
    # An interrupt before the shell has begun the action, which takes long on a busy machine, would not end it.
    with pytest.raises(ToolFailedError, match=r"^\[interrupted after 2 s\]$"):
        await tools.shell("sleep 600", timeout_seconds=2)
    # SWE-ReX's own server interrupts again after 0.4 s: the second one meets the prompt, and its echo is left on the terminal.
    with pytest.raises(ToolFailedError, match=r"^\[interrupted after 2 s\]$"):
        await tools.shell("bash -c 'trap \"sleep 0.3; exit\" INT; while :; do sleep 0.01; done'", timeout_seconds=2)
    with pytest.raises(ToolFailedError, match="half of a surrogate pair"):
        await tools.shell("echo \ud83d")
    assert (await tools.shell("echo $X")).strip() == "1"
    with pytest.raises(ToolFailedError, match=r"\[the shell ended; the shell was started again\]$"):
        await tools.shell("exit 5")
    assert (await tools.shell("echo $X; cat below/file.txt")).strip() == "uploaded"
    with pytest.raises(ToolFailedError, match="no interpreter that stays"):
        await tools.python("1")
    content = bytes(range(256)) + b"\r\n"
    await sandbox.write(f"{sandbox.home}/new/binary", content)
    assert await sandbox.read(f"{sandbox.home}/new/binary") == content
    with pytest.raises(SandboxRequestError, match="no regular file"):
        await sandbox.read(sandbox.home)
    result = await sandbox.run(["sh", "-c", "cat; echo $Y >&2; cat below/file.txt; exit 4"], stdin=b"in ", environment={"Y": "2"})
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (4, b"in uploaded", b"2\n", False)
    assert (await sandbox.run(["sleep", "600"], timeout_seconds=0.5)).timed_out
    with pytest.raises(SandboxRequestError, match="has no pipes, so cat cannot be started"):
        await sandbox.open_process(["cat"])
    with pytest.raises(SandboxRequestError, match="port 80 cannot be exposed"):
        await sandbox.expose(80)
