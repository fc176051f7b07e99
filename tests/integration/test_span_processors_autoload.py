"""Automatic set-up of an agent's process: real subprocesses under opentelemetry-instrument, and a small OTLP endpoint."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from span_processors.autoload import otlp_url
from span_processors.context import environment_context, rollout_attributes
from span_processors.export import RolloutSpanProcessor
from span_processors.reward import reward
from spangrad.processes import free_ports
from spangrad.semconv import CONTEXT_KEYS, PROCESS_ID, SEQ
from tests.support.otlp import OtlpSink, SunkSpan
from tests.support.runners import AttemptGateway

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STARTED_FOR = {
    "TRACEPARENT": f"00-{TRACE_ID}-{PARENT_ID}-00",
    "BAGGAGE": "spangrad.run.id=run%20one,spangrad.rollout.id=r1,spangrad.rollout.mode=train,spangrad.rollout.attempt=2,other=x",
}
ROLLOUT = {"spangrad.run.id": "run one", "spangrad.rollout.id": "r1", "spangrad.rollout.mode": "train", "spangrad.rollout.attempt": 2}


def environment(endpoint: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_") and name not in STARTED_FOR}
    quick = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2"}
    return {**kept, **quick, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **more}


def start(program: str, directory: Path, env: dict[str, str], wrapper: Sequence[str] = ()) -> subprocess.Popen[str]:
    file = directory / "agent.py"
    file.write_text(textwrap.dedent(program))
    instrument = str(Path(sys.executable).with_name("opentelemetry-instrument"))
    command = [*wrapper, instrument, sys.executable, str(file)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def of_rollout(span: SunkSpan) -> dict[str, object]:
    return {key: span.attributes[key] for key in CONTEXT_KEYS if key in span.attributes}


def test_autoload_spans_have_rollout_attributes_and_keep_all_attributes(tmp_path: Path) -> None:
    program = """
        import os, threading
        from opentelemetry import trace
        tracer = trace.get_tracer("agent")
        def work():
            tracer.start_span("in a thread").end()
        with tracer.start_as_current_span("outer") as span:
            span.set_attributes({f"key.{n}": n for n in range(5000)})
            thread = threading.Thread(target=work); thread.start(); thread.join()
        print(os.environ.get("OTEL_TRACES_EXPORTER"))
    """
    with OtlpSink() as sink:
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc"}
        assert finish(start(program, tmp_path, environment(sink.url, **STARTED_FOR, **headers))) == (0, "None\n", "")
        inner, outer = sink.spans
        assert (outer.trace_id, outer.parent_id) == (TRACE_ID, PARENT_ID)
        assert of_rollout(outer) == of_rollout(inner) == ROLLOUT
        assert (outer.attributes[SEQ], inner.attributes[SEQ], inner.parent_id) == (0, 1, outer.span_id)
        assert inner.attributes[PROCESS_ID] == outer.attributes[PROCESS_ID]
        assert sum(key.startswith("key.") for key in outer.attributes) == 5000
        assert {request["authorization"] for request in sink.requests} == {"Bearer abc"}


def test_autoload_sigterm_flushes_spans_and_ends_process(tmp_path: Path) -> None:
    program = """
        import time
        from opentelemetry import trace
        trace.get_tracer("agent").start_span("last words").end()
        print("ready", flush=True)
        while True: time.sleep(60)
    """
    with OtlpSink() as sink:
        process = start(program, tmp_path, environment(sink.url))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert finish(process) == (-signal.SIGTERM, "", "")
        assert [span.name for span in sink.spans] == ["last words"]


def test_autoload_sigterm_in_first_process_of_container_is_outlived(tmp_path: Path) -> None:
    namespace = ["unshare", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no PID namespace: allow user namespaces, and install util-linux")
    program = """
        import os, signal
        from opentelemetry import trace
        tracer = trace.get_tracer("agent")
        tracer.start_span("before").end()
        os.kill(os.getpid(), signal.SIGTERM)
        tracer.start_span("after").end()
        print(os.getpid(), flush=True)
        if not os.fork():
            tracer.start_span("child").end()
            os.kill(os.getpid(), signal.SIGTERM)
        print(os.WTERMSIG(os.wait()[1]))
    """
    with OtlpSink() as sink:
        assert finish(start(program, tmp_path, environment(sink.url), namespace)) == (0, f"1\n{signal.SIGTERM:d}\n", "")
        assert sorted(span.name for span in sink.spans) == ["after", "before", "child"]


def test_autoload_keeps_sigterm_handler_of_agent(tmp_path: Path) -> None:
    program = """
        import signal, sys, time
        from opentelemetry import trace
        def handler(number, frame):
            trace.get_tracer("agent").start_span("tidied up").end()
            sys.exit(7)
        signal.signal(signal.SIGTERM, handler)
        print("ready", flush=True)
        while True: time.sleep(60)
    """
    with OtlpSink() as sink:
        process = start(program, tmp_path, environment(sink.url))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert finish(process) == (7, "", "")
        assert [span.name for span in sink.spans] == ["tidied up"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_autoload_multiprocessing_children_send_their_spans(tmp_path: Path, method: str) -> None:
    program = f"""
        import multiprocessing
        from opentelemetry import trace
        def work():
            trace.get_tracer("agent").start_span("child").end()
        if __name__ == "__main__":
            trace.get_tracer("agent").start_span("parent").end()
            child = multiprocessing.get_context("{method}").Process(target=work)
            child.start(); child.join()
            assert child.exitcode == 0
    """
    with OtlpSink() as sink:
        assert finish(start(program, tmp_path, environment(sink.url, **STARTED_FOR))) == (0, "", "")
        spans = {span.name: span for span in sink.spans}
        assert sorted(span.name for span in sink.spans) == ["child", "parent"]
        assert of_rollout(spans["child"]) == ROLLOUT
        assert spans["child"].attributes[SEQ] == 0
        assert spans["child"].attributes[PROCESS_ID] != spans["parent"].attributes[PROCESS_ID]


def test_autoload_without_store_ends_in_time_and_reports_lost_spans(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    program = """
        from opentelemetry import trace
        trace.get_tracer("agent").start_span("lost").end()
        print("done", flush=True)
    """
    started = time.monotonic()
    process = start(program, tmp_path, environment(f"http://127.0.0.1:{port}"))
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    program_done = time.monotonic()  # what came before is the start of a process, which takes long on a busy machine
    code, _, err = finish(process)
    assert code == 0
    assert f"spangrad: 1 spans were not delivered to http://127.0.0.1:{port}/v1/traces and are lost.\n" in err
    assert time.monotonic() - started > 10
    assert time.monotonic() - program_done < 20


def test_autoload_hooks_run_again_change_nothing(tmp_path: Path) -> None:
    program = """
        from opentelemetry import trace
        from opentelemetry.instrumentation.auto_instrumentation import initialize
        from span_processors import autoload
        autoload.pre_instrument(); autoload.post_instrument(); autoload.pre_instrument()
        autoload.SpangradDistro().configure()
        trace.get_tracer("agent").start_span("once").end()
    """
    with OtlpSink() as sink:
        assert finish(start(program, tmp_path, environment(sink.url))) == (0, "", "")
        assert [(span.name, span.attributes[SEQ]) for span in sink.spans] == [("once", 0)]


@pytest.mark.parametrize(("exporter", "sent"), [("none", []), ("", ["said"]), ("otlp", ["said"]), ("console,otlp", ["said"])])
def test_autoload_respects_otel_traces_exporter(tmp_path: Path, exporter: str, sent: list[str]) -> None:
    program = """
        import os
        from opentelemetry import trace
        trace.get_tracer("agent").start_span("said").end()
        print(os.environ["OTEL_TRACES_EXPORTER"])
    """
    with OtlpSink() as sink:
        code, out, err = finish(start(program, tmp_path, environment(sink.url, OTEL_TRACES_EXPORTER=exporter)))
        assert (code, out.splitlines()[0], err) == (0, exporter, "")
        assert [span.name for span in sink.spans] == sent
        assert ('"name": "said"' in out) == ("console" in exporter)


def test_autoload_empty_variables_are_as_not_set(tmp_path: Path) -> None:
    empty = dict.fromkeys(("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_TRACES_SAMPLER"), "")
    program = """
        from opentelemetry import trace
        with trace.get_tracer("agent").start_as_current_span("many") as span:
            span.set_attributes({f"key.{n}": n for n in range(200)})
    """
    with OtlpSink() as sink:
        assert finish(start(program, tmp_path, environment(sink.url, **STARTED_FOR, **empty))) == (0, "", "")
        assert [f"key.{n}" in span.attributes for span in sink.spans for n in range(200)] == [True] * 200


@pytest.mark.parametrize(
    "configured",
    [
        pytest.param("SimpleSpanProcessor(OTLPSpanExporter())", id="its exporter stays the only one"),
        pytest.param("None", id="without one, ours is added"),
    ],
)
def test_autoload_with_another_distribution_sends_spans_once(tmp_path: Path, configured: str) -> None:
    program = f"""
        import os
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        provider = TracerProvider()
        theirs = {configured}
        if theirs:
            os.environ["OTEL_TRACES_EXPORTER"] = "otlp"
            provider.add_span_processor(theirs)
        trace.set_tracer_provider(provider)
        from span_processors import autoload
        autoload.pre_instrument()
        trace.get_tracer("agent").start_span("said").end()
    """
    (tmp_path / "agent.py").write_text(textwrap.dedent(program))
    with OtlpSink() as sink:
        env = environment(sink.url, **{**STARTED_FOR, "TRACEPARENT": f"00-{TRACE_ID}-{PARENT_ID}-01"})
        done = subprocess.run([sys.executable, tmp_path / "agent.py"], env=env, capture_output=True, text=True, timeout=120, check=True)
        assert "set OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=100000" in done.stderr
        assert [(span.name, of_rollout(span)) for span in sink.spans] == [("said", ROLLOUT)]
        assert len(sink.requests) == 1


@pytest.mark.parametrize(
    ("variables", "url", "warning"),
    [
        ({}, "http://localhost:4318/v1/traces", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://store:9/"}, "http://store:9/v1/traces", ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://a/b"}, "https://a/b", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://store:4317"}, "http://store:4318/v1/traces", "port 4317 takes OTLP/gRPC"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "store:4317"}, "http://store:4318/v1/traces", "port 4317 takes OTLP/gRPC"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://store:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http://store:9/v1/traces",
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not used",
        ),
    ],
)
def test_otlp_url_from_variables(variables: dict[str, str], url: str, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert otlp_url(variables) == url
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


def test_rollout_attributes_prefer_context_over_process() -> None:
    process = {"spangrad.run.id": "run", "spangrad.rollout.id": "mine", "spangrad.rollout.mode": "train", "spangrad.rollout.attempt": "3"}
    other = baggage.set_baggage("spangrad.rollout.id", "other", Context())
    assert rollout_attributes(other, process) == {
        "spangrad.run.id": "run",
        "spangrad.rollout.id": "other",
        "spangrad.rollout.mode": "train",
    }
    again = baggage.set_baggage("spangrad.rollout.attempt", "1", other)
    assert rollout_attributes(again, process)["spangrad.rollout.attempt"] == 1
    assert rollout_attributes(Context(), process) == {**process, "spangrad.rollout.attempt": 3}
    assert rollout_attributes(Context(), {}) == {}


def test_environment_context_malformed_gives_empty_context() -> None:
    context = environment_context({"TRACEPARENT": "nonsense", "BAGGAGE": "=;,"})
    assert not trace.get_current_span(context).get_span_context().is_valid
    assert rollout_attributes(context, {}) == {}


def test_reward_adds_event_to_current_span(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(RolloutSpanProcessor({"spangrad.rollout.id": "r"}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    with provider.get_tracer("agent").start_as_current_span("step"):
        reward(1)
        reward(-0.5, "tests")
    reward(0.25)
    recorded = [
        (span.name, [(event.name, dict(event.attributes or {})) for event in span.events], (span.attributes or {})["spangrad.rollout.id"])
        for span in kept.get_finished_spans()
    ]
    event = "gen_ai.evaluation.result"
    name, value = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
    assert recorded == [
        ("step", [(event, {name: "reward", value: 1.0}), (event, {name: "tests", value: -0.5})], "r"),
        ("reward", [(event, {name: "reward", value: 0.25})], "r"),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_reward_not_finite_raises(value: float) -> None:
    with pytest.raises(ValueError, match="give a finite number"):
        reward(value)


def test_autoload_without_langchain_import_does_not_import_it(tmp_path: Path) -> None:
    """Its instrumentor is installed, and loads, in many environments that never import LangChain."""
    program = """
        import sys
        from openai import OpenAI
        OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        print("langchain_core.runnables" in sys.modules)
    """
    with OtlpSink() as sink, AttemptGateway() as gateway:
        env = environment(sink.url, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="", OPENAI_BASE_URL=f"{gateway.url}/v1", OPENAI_API_KEY="none")
        assert finish(start(program, tmp_path, env)) == (0, "False\n", "")
        assert len(sink.named("ChatCompletion")) == 1
