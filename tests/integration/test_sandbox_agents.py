"""Programs as agents in sandboxes: they reach gateway and store, and nothing else; their root spans name the rung."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from runner.runner import Outcome, Runner
from runner.sandboxes import bubblewrap, confinement
from runner.sandboxes.engines import choose
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy, services_of
from runner.sandboxes.relay import ServiceRelay
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent
from spangrad import semconv
from spangrad.agent.command import STARTED_VARIABLE
from spangrad.errors import SandboxError
from spangrad.http.service import in_url
from spangrad.settings import GatewaySettings, RunnerSettings, Settings, StoreSettings
from spangrad.types import AttemptFailure, Mode, SandboxRung, Task
from tests.support.images import layer, system_files, write_image
from tests.support.otlp import OtlpSink
from tests.support.runners import AttemptGateway, is_true, until

pytestmark = pytest.mark.usefixtures("quick_agents")

PROGRAM = """
    import json, os, socket, sys, urllib.request
    from opentelemetry import trace
    given = json.load(sys.stdin)
    trace.get_tracer("program").start_span("in the program").end()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    for _ in range(2):
        urllib.request.urlopen(urllib.request.Request(url, body)).read()
    open(os.path.join(os.environ["TMPDIR"], "private"), "w").write("x")
    os.system("sleep 600 &")
    reached = []
    try:
        socket.create_connection(("127.0.0.1", given["port"]), 5)
        reached.append("port")
    except OSError:
        pass
    if "SECRET" in os.environ or os.path.exists(os.path.expanduser(given["home"])):
        reached.append("secret")
    print(json.dumps({"reached": float(len(reached)), "calls": 2.0}))
"""

PROGRAM_OF_IMAGE = """
    import json, os, socket, urllib.parse
    url, body = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), b'{"messages": []}'
    head = f"POST {url.path}/chat/completions HTTP/1.0\\r\\nContent-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + body)
        answered = b" 200 " in connection.recv(100)
    rewards = {"answered": answered, "image": open("/etc/mark").read() == "image", "machine": os.path.exists("/usr/bin/env")}
    print(json.dumps({name: float(value) for name, value in rewards.items()} | {"greeted": float(os.environ["GREETING"] == "hello")}))
"""

needs_bubblewrap = pytest.mark.skipif(bubblewrap.shortcoming() is not None, reason=str(bubblewrap.shortcoming()))


@asynccontextmanager
async def stage(
    directory: Path, agent: AgentSpec, more: Mapping[str, object] = MappingProxyType({}), **sandbox: Any
) -> AsyncGenerator[tuple[Runner, OtlpSink]]:
    with OtlpSink() as sink, AttemptGateway() as gateway:
        settings = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=RunnerSettings.model_validate({"directory": directory / "runner", "concurrency": 4, "sandbox": sandbox, **more}),
        )
        async with Runner(settings, agent) as runner:
            yield runner, sink


@pytest.fixture
def public_directory() -> Generator[Path]:
    """Yield a directory that every user can read, as Landlock's programs of root need."""
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        yield Path(base)


async def run(runner: Runner, given: object, count: int = 1) -> list[Outcome]:
    return await runner.run([Task("task", given)], mode=Mode.PROBE, group_size=count)


@needs_bubblewrap
async def test_agent_in_bubblewrap_reaches_its_services_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret")
    (directory := tmp_path / "agent").mkdir()
    (directory / "program.py").write_text(textwrap.dedent(PROGRAM))
    agent = CommandAgent((sys.executable, "program.py"), directory=directory, instrument=True)
    with OtlpSink() as other:
        async with stage(tmp_path, agent, engine="auto", least="bubblewrap") as (runner, sink):
            port = int(other.url.rpartition(":")[2])
            outcomes = await run(runner, {"port": port, "home": str(tmp_path / "runner")}, 3)
            assert [(o.reward, o.failure, o.calls) for o in outcomes] == [({"reached": 0.0, "calls": 2.0}, None, 2)] * 3, outcomes
            roots = {span.attributes[semconv.ROLLOUT_ID]: span for span in sink.named(semconv.ROOT_SPAN_NAME)}
            assert {root.attributes[semconv.ROLLOUT_SANDBOX] for root in roots.values()} == {SandboxRung.BUBBLEWRAP}
            inside = sink.named("in the program")
            assert {span.parent_id for span in inside} == {root.span_id for root in roots.values()}
    await until(lambda: is_true(not _of_directory(directory)))  # they are killed, and on a busy machine yet to end


@needs_bubblewrap
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_program_in_bubblewrap_reaches_a_service_at_its_address(tmp_path: Path, address: str) -> None:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as service:
        service.setblocking(False)
        port = service.getsockname()[1]
        services = services_of([f"http://{in_url(address)}:{port}"])
        policy = SandboxPolicy(tmp_path, (), services, False, SandboxLimits(64, 2**30, 2**24), engine=SandboxRung.BUBBLEWRAP)
        async with ServiceRelay(services) as relay:
            engine = await asyncio.to_thread(choose, policy, relay.descriptor)
            script = f"exec 3<>/dev/tcp/{address}/{port} && echo hello >&3 && cat <&3"
            program = await asyncio.create_subprocess_exec(*engine.prefix, "bash", "-c", script, pass_fds=[relay.descriptor])
            accepting = asyncio.create_task(asyncio.get_running_loop().sock_accept(service))
            ending = asyncio.create_task(program.wait())
            await asyncio.wait([accepting, ending], return_when=asyncio.FIRST_COMPLETED)
            assert accepting.done(), "the program has ended without a connection"
            with accepting.result()[0] as connection:
                assert await asyncio.get_running_loop().sock_recv(connection, 100) == b"hello\n"
            assert await ending == 0


@needs_bubblewrap
async def test_agent_in_an_image_sees_its_files_and_names_its_digest(tmp_path: Path) -> None:
    if not (files := system_files()):
        pytest.skip("this machine has no /usr/bin/python3.11, of which the image is made")
    digest = write_image(tmp_path / "image", [layer({**files, "etc/mark": b"image"})], ["PATH=/usr/bin", "GREETING=hello"])
    (directory := tmp_path / "agent").mkdir()
    (directory / "program.py").write_text(textwrap.dedent(PROGRAM_OF_IMAGE))
    agent = CommandAgent(("python3", "program.py"), directory=directory)
    async with stage(tmp_path, agent, engine="auto", image=tmp_path / "image") as (runner, sink):
        (outcome,) = await run(runner, None)
        (root,) = sink.named(semconv.ROOT_SPAN_NAME)
    expected = {"answered": 1.0, "image": 1.0, "machine": 0.0, "greeted": 1.0}
    assert (outcome.reward, outcome.failure, outcome.calls) == (expected, None, 1), outcome
    assert (root.attributes[semconv.ROLLOUT_SANDBOX], root.attributes[semconv.SANDBOX_IMAGE]) == (SandboxRung.BUBBLEWRAP, digest)


@needs_bubblewrap
async def test_agent_in_bubblewrap_over_time_leaves_no_process(tmp_path: Path) -> None:
    (directory := tmp_path / "agent").mkdir()
    agent = CommandAgent(("sh", "-c", "setsid sleep 600 & sleep 600"), directory=directory)
    async with stage(tmp_path, agent, {"timeout_seconds": 1, "max_attempts": 1}, engine="bubblewrap") as (runner, _):
        (outcome,) = await run(runner, None)
    assert outcome.failure is AttemptFailure.TIMEOUT
    await until(lambda: is_true(not _of_directory(directory)))  # they are killed, and on a busy machine yet to end


RUNGS = [
    pytest.param(SandboxRung.BUBBLEWRAP, marks=needs_bubblewrap),
    pytest.param(SandboxRung.LANDLOCK, marks=pytest.mark.skipif(confinement.abi() < 6, reason="Landlock needs Linux 6.12")),
]


@pytest.mark.parametrize("rung", RUNGS)
async def test_agent_without_sandbox_is_run_again(rung: SandboxRung, public_directory: Path, tmp_path: Path) -> None:
    (directory := public_directory / "agent").mkdir()
    (readable := public_directory / "readable").mkdir()
    agent = CommandAgent(("sh", "-c", "echo 1.0"), directory=directory)
    try:
        async with stage(tmp_path, agent, {"max_attempts": 3}, engine=rung, readable=[readable]) as (runner, sink):
            readable.rmdir()
            running = asyncio.create_task(run(runner, None))

            async def failed() -> bool:
                return bool(sink.named(semconv.ROOT_SPAN_NAME))

            await until(failed)
            readable.mkdir()
            (outcome,) = await running
            reasons = [root.attributes.get(semconv.ROLLOUT_FAILURE) for root in sink.named(semconv.ROOT_SPAN_NAME)]
    except SandboxError as error:
        pytest.skip(str(error))
    assert (outcome.failure, outcome.reward) == (None, {"reward": 1.0})
    assert (reasons[0], reasons[-1], {*reasons[:-1]} <= {AttemptFailure.SANDBOX, AttemptFailure.RELEASED}) == (
        AttemptFailure.SANDBOX,
        None,
        True,
    )


@pytest.mark.parametrize("rung", RUNGS)
async def test_agent_exit_code_and_missing_program_differ(rung: SandboxRung, public_directory: Path, tmp_path: Path) -> None:
    (directory := public_directory / "agent").mkdir()
    outside = shutil.copy("/bin/sh", public_directory / "interpreter")
    (program := directory / "program").write_text(f"#!{outside}\nexit 3\n")
    program.chmod(0o755)
    outcomes: list[Outcome] = []
    for command in (("sh", "-c", f'test -z "${STARTED_VARIABLE}" && exit 3'), (str(program),)):
        try:
            async with stage(tmp_path, CommandAgent(command, directory=directory), {"max_attempts": 1}, engine=rung) as (runner, _):
                outcomes += await run(runner, None)
        except SandboxError as error:
            pytest.skip(str(error))
    ran, missing = outcomes
    assert (ran.failure, ran.reward, ran.detail) == (AttemptFailure.EXIT_CODE, {"reward": 0.0}, "exit code 3")
    assert (missing.failure, missing.reward) == (AttemptFailure.SANDBOX, None)
    assert "its program not found in it: " in missing.detail


@pytest.mark.parametrize("rung", RUNGS)
async def test_agent_in_a_sandbox_inherits_no_descriptor(rung: SandboxRung, public_directory: Path, tmp_path: Path) -> None:
    count = "count=0; for number in {3..99}; do true <&$number && count=$((count + 1)); done; echo $count"
    try:
        async with stage(tmp_path, CommandAgent(("bash", "-c", count), directory=public_directory), engine=rung) as (runner, _):
            (outcome,) = await run(runner, None)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (outcome.failure, outcome.reward) == (None, {"reward": 0.0})


@pytest.mark.usefixtures("blocked_pipes")
@pytest.mark.parametrize("rung", RUNGS)
async def test_agent_in_a_sandbox_that_writes_to_a_closed_pipe_ends(rung: SandboxRung, public_directory: Path, tmp_path: Path) -> None:
    command = ("bash", "-c", "yes | head -n 1 >/dev/null; echo ${PIPESTATUS[0]}")
    try:
        async with stage(tmp_path, CommandAgent(command, directory=public_directory), engine=rung) as (runner, _):
            (outcome,) = await run(runner, None)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (outcome.failure, outcome.reward) == (None, {"reward": 128.0 + signal.SIGPIPE})


async def test_task_that_demands_a_stronger_sandbox_is_refused(tmp_path: Path) -> None:
    agent = CommandAgent(("sh", "-c", "touch ran; echo 1.0"), directory=tmp_path)
    task = Task("careful", None, least_sandbox=SandboxRung.LANDLOCK)
    async with stage(tmp_path, agent, {"max_attempts": 1}) as (runner, _):
        (outcome,) = await runner.run([task], mode=Mode.PROBE, group_size=1)
    assert (outcome.failure, outcome.reward) == (AttemptFailure.SANDBOX, None)
    assert "task careful demands a sandbox of at least landlock, and this worker's is none. Run a worker with" in outcome.detail
    assert not (tmp_path / "ran").exists()


async def test_runner_sandbox_of_a_callable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SandboxError, match=r"runner.sandbox.engine = auto confines programs, and json is none. Give the agent as a command"
    ):
        async with stage(tmp_path, CallableAgent("json:loads"), engine="auto"):
            pass


def _of_directory(directory: Path) -> list[str]:
    """Processes that work in a directory."""
    left: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == directory:
                left.append((path.parent / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return left
