"""Direct mode, step by step, with real frameworks, vLLM, store and builder, and no gateway: what arrives and what is lost.

docs/guides/direct-mode.md holds the table that `test_direct_mode_arrivals_by_framework_and_step_match_docs_table` measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks.peers.environment import peer_environment, peer_packages
from runner.runner import Runner
from runner.workers.agents import CommandAgent
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from spangrad.types import Mode, Task
from tests.support.processes import fetch
from tests.support.servers import running_store, store_settings
from transition_builder.loop import build_once

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "direct-mode.md"
WHOLE, STREAM, CUT, AGAIN = "paris", "rome", "lima", "oslo"
ARGUMENTS = ["whole", WHOLE, "stream", STREAM, "cut", CUT, "whole", AGAIN]
FRAMEWORKS = {
    "openai": ("openai_client.py", {}),
    "LangGraph, langchain-openai": ("langchain_client.py", {}),
    "OpenAI Agents SDK, chat": ("agents_sdk.py", {"AGENTS_API": "chat_completions"}),
    "OpenAI Agents SDK, responses": ("agents_sdk.py", {}),
}
STEPS = ("stock", "with spangrad", "under the runner")
COLUMNS = ("framework", "step", "ids", "logprobs", "version", "a stream that was left", "a call tried twice", "agent's name", "rollouts")


# Environments of agents as users have them: OpenTelemetry's own auto-instrumentation, and the same with our wheel installed beside it.

CLIENTS = Path(__file__).resolve().parents[1] / "agents" / "clients"
THREADING = "opentelemetry-instrumentation-threading==0.66b1"
"""Requirement of the wheel that the stock environment lacks."""


def stock() -> Path:
    """`pip install opentelemetry-distro opentelemetry-exporter-otlp` and the instrumentors: its `bin`; made once, in half a minute."""
    return peer_environment("stock_agents")


def with_wheel(directory: Path) -> Path:
    """The stock environment after `pip install spangrad`: its `bin`, in a new directory."""
    venv.create(directory, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    stock_site = peer_packages("stock_agents")
    (site / "stock.pth").write_text(f"{stock_site}\n")
    (directory / "bin" / "opentelemetry-instrument").symlink_to(stock() / "opentelemetry-instrument")
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(directory), str(ROOT / "packaging" / "agent"))
    (wheel,) = directory.glob("spangrad-*.whl")
    _pip("--python", str(directory / "bin" / "python"), "install", str(wheel), THREADING)
    return directory / "bin"


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], check=True)


def run(environment: Path, program: Path, arguments: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`opentelemetry-instrument python PROGRAM ARGUMENTS` with these variables, and nothing else that could matter, set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [str(environment / "opentelemetry-instrument"), str(environment / "python"), str(program), *arguments]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=120, check=False)


# A server before an engine that makes happen what agents meet in real life: a call that must be tried again, a stream that takes its time.

LINE_SECONDS = 0.02


class EngineFront:
    """A context manager; serves on a free port of loopback in threads of its own."""

    def __init__(self, engine: str, *, again: str, slow: str) -> None:
        """Stand before the engine at a URL."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if again.encode() in body and not front.refused:
                    front.refused = True
                    self._reply(503, {"content-type": "application/json"}, b'{"error": {"message": "come again"}}')
                elif slow.encode() in body:
                    self._dawdle(body)
                else:
                    self._reply(307, {"location": engine + self.path}, b"")

            def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def _dawdle(self, body: bytes) -> None:
                self.close_connection = True
                request = urllib.request.Request(engine + self.path, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.headers["content-type"])
                    self.send_header("connection", "close")
                    self.end_headers()
                    try:
                        for line in answer:
                            self.wfile.write(line)
                            self.wfile.flush()
                            time.sleep(LINE_SECONDS)
                    except OSError:
                        pass  # the reader has left, which is what this is for

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.refused = False
        """True once a client was told to come again; set to False to do so once more."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True)
class DirectMode:
    """Fixture of the tests of direct mode: settings of engine and store, the stock environment, and the engine's front."""

    settings: Settings
    stock: Path
    front: EngineFront
    logs: Path

    @cached_property
    def ours(self) -> Path:
        """The environment with our wheel, which takes a while to make."""
        return with_wheel(self.logs / "ours")

    def ask(self, query: str) -> list[dict[str, Any]]:
        client = connect(self.settings.store)
        try:
            return list(client.query(query).named_results())
        finally:
            client.close()

    def builder(self, **changes: object) -> Settings:
        return self.settings.model_copy(
            update={"builder": self.settings.builder.model_copy(update={"quiet_seconds": 0, "incomplete_after_seconds": 0, **changes})}
        )

    def answer(self, city: str, **changes: object) -> dict[str, Any]:
        """Return vLLM's direct answer to the message that the agents send."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": f"say {city}"}], "temperature": 0, "max_tokens": 8, **changes}
        return fetch(f"{self.settings.gateway.engine_url}/v1/chat/completions", asked)


@pytest.fixture(scope="module")
def direct_mode(engine: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectMode]:
    directory = tmp_path_factory.mktemp("direct-mode")
    own = store_settings(directory / "data")
    settings = engine.model_copy(update={"store": own})
    front = EngineFront(settings.gateway.engine_url, again=f"say {AGAIN}", slow=f"say {CUT}")
    with running_store(own, directory / "store.log"), front:
        yield DirectMode(settings, stock(), front, directory)


def evaluate(direct_mode: DirectMode, traces: list[str]) -> None:
    """Reward traces after the fact, as a service that judges them does: a log record each."""
    records = [
        {
            "timeUnixNano": str(time.time_ns()),
            "eventName": "gen_ai.evaluation.result",
            "traceId": trace,
            "attributes": [
                {"key": "gen_ai.evaluation.name", "value": {"stringValue": "reward"}},
                {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.5}},
            ],
        }
        for trace in traces
    ]
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()
    url = f"{direct_mode.settings.store.otlp_endpoint}/v1/logs"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=30).close()


@pytest.mark.slow  # its environment takes most of a minute to make; tests of test_loop and test_direct_mode_routes take the same way
def test_stock_instrumentation_alone_brings_vllms_ids_into_transitions(direct_mode: DirectMode) -> None:
    """Three variables suffice, without a package of ours: the addresses of the store's gRPC receiver and of vLLM, and an unused key."""
    began = time.time_ns()
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{direct_mode.settings.store.otlp_grpc_port}",
        "OPENAI_BASE_URL": f"{direct_mode.settings.gateway.engine_url}/v1",
        "OPENAI_API_KEY": "none",
    }
    done = run(direct_mode.stock, CLIENTS / "openai_client.py", ["whole", WHOLE, "stream", STREAM], variables)
    assert (done.returncode, done.stderr) == (0, "")

    direct = [direct_mode.answer(city) for city in (WHOLE, STREAM)]
    engine_facts = direct[0]["spangrad"]
    ids = [(answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) for answer in direct]
    logprobs = [[token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]] for answer in direct]
    (((_, version),),) = engine_facts["versions"]
    answered = kept_answers(direct_mode, began)
    assert [(row["PromptIds"], row["ResponseIds"]) for row in answered] == ids

    # Each call is a trace, and so a rollout, of its own. What judges them later names them by their traces.
    evaluate(direct_mode, [row["TraceId"] for row in answered])
    build_once(direct_mode.builder())
    built = {row["SpanId"]: row for row in direct_mode.ask("SELECT * FROM spangrad.transitions WHERE Mode = 'production'")}
    facts = ("RolloutId", "PromptIds", "ResponseIds", "Logprobs", "Version", "Policy", "TokenizerHash", "Temperature", "Rewards.Value")
    assert [tuple(built[row["SpanId"]][name] for name in facts) for row in answered] == [
        (row["TraceId"], *of_ids, pytest.approx(of_logprobs, abs=1e-5), version, "policy", engine_facts["tokenizer_hash"], 0.0, [0.5])
        for row, of_ids, of_logprobs in zip(answered, ids, logprobs, strict=True)
    ]


def kept_answers(direct_mode: DirectMode, since: int) -> list[dict[str, Any]]:
    """Return the engine's answers that agents' own spans kept since a time in nanoseconds, in order of time."""
    rows = direct_mode.ask(
        "SELECT TraceId, SpanId, SpanAttributes['output.value'] AS Answer FROM otel.otel_traces"
        f" WHERE toUnixTimestamp64Nano(Timestamp) >= {since} AND StatusCode != 'Error'"
        " AND ScopeName = 'openinference.instrumentation.openai'"
        " AND SpanAttributes['openinference.span.kind'] = 'LLM' AND position(SpanAttributes['output.value'], '\"spangrad\"') > 0"
        " ORDER BY Timestamp"
    )
    return [{**row, **ids_of(json.loads(row["Answer"]))} for row in rows]


def ids_of(answer: dict[str, Any]) -> dict[str, list[int]]:
    """Return PromptIds and ResponseIds of an answer's first choice, or of a response's last generation."""
    if "choices" in answer:
        return {"PromptIds": answer["prompt_token_ids"], "ResponseIds": answer["choices"][0]["token_ids"]}
    generation = answer["spangrad"]["generations"][-1]
    return {"PromptIds": generation["prompt_token_ids"], "ResponseIds": generation["token_ids"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_direct_mode_arrivals_by_framework_and_step_match_docs_table(direct_mode: DirectMode) -> None:
    lines = [table_row(direct_mode, framework, step) for framework in FRAMEWORKS for step in STEPS]
    measured = "\n".join([f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|", *lines])
    page = PAGE.read_text()
    begin, end = "<!-- measured by tests/integration/test_direct_mode.py -->\n", "\n<!-- end -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == measured, f"\n{measured}"


def table_row(direct_mode: DirectMode, framework: str, step: str) -> str:
    """Run the framework's agent once on that step, and say what became of its four calls."""
    program, variables = FRAMEWORKS[framework]
    began = time.time_ns()
    direct_mode.front.refused = False
    concluded = (
        roll_out(direct_mode, program, variables) if step == "under the runner" else run_alone(direct_mode, program, variables, step)
    )
    kept = {tuple(row["PromptIds"]): row for row in concluded if "ResponseIds" in row}
    calls = kept_answers(direct_mode, began)
    answers = {city: direct_mode.answer(city) for city in (WHOLE, STREAM, AGAIN)}
    prompts = {city: tuple(answer["prompt_token_ids"]) for city, answer in answers.items()}
    whole = [kept.get(prompts[city], {}) for city in answers]
    tokens = [answer["choices"][0] for answer in answers.values()]
    logprobs = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in tokens]
    tries = sum(tuple(row["PromptIds"]) == prompts[AGAIN] for row in calls)
    names = sorted({row["AgentName"] for row in kept.values()})
    cells = (
        framework,
        step,
        yes([row.get("ResponseIds") for row in whole] == [choice["token_ids"] for choice in tokens]),
        yes([row.get("Logprobs") for row in whole] == [pytest.approx(expected, abs=1e-5) for expected in logprobs]),
        yes([row.get("Version") for row in whole] == [answer["spangrad"]["versions"][0][0][1] for answer in answers.values()]),
        left_stream(direct_mode, calls, concluded),
        {0: "not seen", 1: "the last try"}.get(tries, f"{tries} tries"),
        ", ".join(f"`{name}`" for name in names) or "none",
        str(len({row["RolloutId"] for row in kept.values()}) or "none"),
    )
    return "| " + " | ".join(cells) + " |"


def run_alone(direct_mode: DirectMode, program: str, variables: dict[str, str], step: str) -> list[dict[str, Any]]:
    """Transitions and drops of an agent that is started by hand; its traces are rewarded afterwards."""
    began = time.time_ns()
    store = direct_mode.settings.store
    address = {
        # OpenTelemetry's distribution sends by gRPC where nothing else is said, ours by HTTP.
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{store.otlp_grpc_port}" if step == "stock" else store.otlp_endpoint,
        "OPENAI_BASE_URL": f"{direct_mode.front.url}/v1",
        "OPENAI_API_KEY": "none",
    }
    done = run(direct_mode.stock if step == "stock" else direct_mode.ours, CLIENTS / program, ARGUMENTS, {**address, **variables})
    assert done.returncode == 0, done.stderr
    traces = {row["TraceId"] for row in kept_answers(direct_mode, began)}
    if traces:
        evaluate(direct_mode, list(traces))
    build_once(direct_mode.builder())
    of_them = f"TraceId IN {tuple(sorted(traces)) or ('none',)}"
    return direct_mode.ask(f"SELECT * FROM spangrad.transitions WHERE {of_them}") + direct_mode.ask(
        f"SELECT * FROM spangrad.drops WHERE {of_them}"
    )


def roll_out(direct_mode: DirectMode, program: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Transitions and drops of one rollout under the runner, without a gateway."""
    base = direct_mode.builder()
    settings = base.model_copy(
        update={
            "runner": base.runner.model_copy(update={"run_id": uuid.uuid4().hex, "gateway": False, "max_attempts": 1}),
            "gateway": base.gateway.model_copy(update={"engine_url": direct_mode.front.url}),
        }
    )
    agent = CommandAgent(
        (str(direct_mode.ours / "python"), str(CLIENTS / program), *ARGUMENTS),
        evaluator="half:reward",
        directory=CLIENTS.parent,
        instrument=True,
    )

    async def run_rollout() -> None:
        async with Runner(settings, agent) as runner:
            (outcome,) = await runner.run([Task("t", None)], mode=Mode.TRAIN, group_size=1)
            assert outcome.failure is None, outcome.detail

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        asyncio.run(run_rollout())
    build_once(settings)
    of_run = f"RunId = '{settings.runner.run_id}'"
    return direct_mode.ask(f"SELECT * FROM spangrad.transitions WHERE {of_run}") + direct_mode.ask(
        f"SELECT * FROM spangrad.drops WHERE {of_run}"
    )


def left_stream(direct_mode: DirectMode, calls: list[dict[str, Any]], concluded: list[dict[str, Any]]) -> str:
    """Describe what the store has of the stream whose reader left, and the reason of its drop."""
    long = direct_mode.answer(CUT, max_tokens=100, ignore_eos=True)
    rows = [row for row in calls if row["PromptIds"] == long["prompt_token_ids"]]
    if not rows:
        return "not seen"
    (row,) = rows
    read = row["ResponseIds"]
    assert 0 < len(read) < 100
    assert read == long["choices"][0]["token_ids"][: len(read)]
    (reason,) = [drop["Reason"] for drop in concluded if drop["SpanId"] == row["SpanId"] and "Reason" in drop]
    return f"what was read; dropped as `{reason}`"


def yes(holds: bool) -> str:
    return "yes" if holds else "no"
