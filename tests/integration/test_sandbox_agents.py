"""Programs as agents in sandboxes: they reach gateway and store, and nothing else; their root spans name the rung."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from runner.runner import Outcome, Runner
from runner.sandboxes import bubblewrap
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent
from spangrad import semconv
from spangrad.errors import SandboxError
from spangrad.settings import GatewaySettings, RunnerSettings, Settings, StoreSettings
from spangrad.types import AttemptFailure, Mode, SandboxRung, Task
from tests.support.otlp import OtlpSink
from tests.support.runners import AttemptGateway

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


@pytest.fixture(autouse=True)
def _quick_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain,openai,httpx,httpx2")


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
    assert _of_directory(directory) == []


@needs_bubblewrap
async def test_agent_in_bubblewrap_over_time_leaves_no_process(tmp_path: Path) -> None:
    (directory := tmp_path / "agent").mkdir()
    agent = CommandAgent(("sh", "-c", "setsid sleep 600 & sleep 600"), directory=directory)
    async with stage(tmp_path, agent, {"timeout_seconds": 1, "max_attempts": 1}, engine="bubblewrap") as (runner, _):
        (outcome,) = await run(runner, None)
    assert outcome.failure is AttemptFailure.TIMEOUT
    assert _of_directory(directory) == []


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
