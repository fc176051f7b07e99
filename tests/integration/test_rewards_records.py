"""Exceptions, span events and log records of tools, from OpenTelemetry's SDK through a real store to rewards of calls."""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from gateway.recorder.record import SAMPLING_DEFAULTS
from spangrad import semconv
from spangrad.errors import BuilderError, RuleError
from spangrad.settings import AirRule, BuilderSettings, Settings, StoreSettings
from spangrad.store.names import stored
from tests.support.built_rollouts import post, rows
from tests.support.servers import client_of
from tests.support.spans import SpanFactory
from transition_builder.builder import Builder
from transition_builder.source.queries import StoreReader

FIXTURE = Path(__file__).parents[1] / "fixtures" / "spans" / "langgraph_tool_error.jsonl"


def settings_of(store: StoreSettings, run: str, *rules: AirRule, **builder: Any) -> Settings:
    return Settings(store=store, builder=BuilderSettings(dataset=run, rules=rules, **builder))


def build(settings: Settings, run: str) -> Builder:
    """Build the rollouts of a run, whatever else the store holds."""
    builder = Builder(settings, run=run)
    builder.register(settings.builder.dataset)
    builder.build_ready()
    return builder


def rewards(store: StoreSettings, run: str) -> list[tuple[int, str, float]]:
    """Turn, name and value of each AIR reward of a run's newest revisions."""
    sql = f"""
        SELECT t.Turn, r.Name, r.Value FROM spangrad.rewards AS r
        INNER JOIN spangrad.transitions AS t ON t.RunId = r.RunId AND t.BuildSpec = r.BuildSpec AND t.CallId = r.CallId
        WHERE r.RunId = '{run}' AND r.Source = 'air' ORDER BY ALL"""
    return rows(store, sql)


class SdkRollout:
    """One rollout: its root is open as long as it is entered, and each call asks for one tool."""

    def __init__(self, store: StoreSettings, run: str, name: str, calls: int) -> None:
        """Name a rollout of a run, whose root will say how many calls it has."""
        resource = Resource({"service.name": "sdk-agent", "service.instance.id": f"{run}-{name}"})
        self._traces, self._logs = TracerProvider(resource=resource), LoggerProvider(resource=resource)
        self._traces.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{store.otlp_endpoint}/v1/traces")))
        self._logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(f"{store.otlp_endpoint}/v1/logs")))
        self._facts = {semconv.RUN_ID: run, semconv.ROLLOUT_ID: f"{run}-{name}", semconv.ROLLOUT_MODE: "train"}
        self._root = {
            semconv.GROUP_ID: f"{run}-group",
            semconv.GROUP_SIZE: "1",
            semconv.TASK_ID: "task",
            semconv.ROLLOUT_CALLS: str(calls),
            semconv.ROLLOUT_FINAL: "true",
        }

    @contextmanager
    def running(self, reward: float = 1.0) -> Generator[SdkRollout]:
        """Open the root span; its reward is written when it ends."""
        try:
            with self._traces.get_tracer("spangrad.runner").start_as_current_span(
                "rollout", attributes={**self._facts, **self._root}
            ) as root:
                yield self
                root.add_event(semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: "reward", semconv.EVALUATION_SCORE: reward})
        finally:
            self._traces.shutdown()
            self._logs.shutdown()

    def call(self) -> None:
        """A call that the gateway recorded."""
        arrays = {
            semconv.INPUT_TOKEN_IDS: struct.pack("<2I", 1, 2),
            semconv.OUTPUT_TOKEN_IDS: struct.pack("<2I", 3, 4),
            semconv.OUTPUT_LOGPROBS: struct.pack("<2f", -0.5, -0.25),
        }
        facts: dict[str, str | int | float] = {
            **self._facts,
            semconv.POLICY_NAME: "policy",
            semconv.POLICY_VERSIONS: "[[[0,3]]]",
            **dict(SAMPLING_DEFAULTS.values()),
            semconv.SAMPLING_CONSTRAINED: False,
            semconv.HTTP_STATUS: 200,
            **{name: base64.b64encode(value).decode() for name, value in arrays.items()},
        }
        with self._traces.get_tracer(semconv.GATEWAY_SCOPE).start_as_current_span("chat", attributes=facts):
            pass

    def tool(self, name: str, run: Callable[[], None], **attributes: str) -> None:
        """A tool that the call before it caused; what it raises ends in its span, and the agent goes on."""
        facts = {**self._facts, semconv.OPENINFERENCE_KIND: "TOOL", semconv.OPENINFERENCE_TOOL_NAME: name, **attributes}
        try:
            with self._traces.get_tracer("openinference.instrumentation.langchain").start_as_current_span(name, attributes=facts):
                run()
        except Exception as error:  # the agent tells its model
            self.log(SeverityNumber.DEBUG, f"the tool failed: {error}")

    def log(self, severity: SeverityNumber, body: str) -> None:
        """Write a log record in the span that is open."""
        self._logs.get_logger("agent").emit(LogRecord(severity_number=severity, severity_text=severity.name, body=body))


def add_event(name: str, **attributes: str) -> None:
    """Add an event to the span that is open."""
    trace.get_current_span().add_event(name, attributes)


def agent(store: StoreSettings, run: str, name: str = "a") -> None:
    """Three calls: the first tool times out and says so, the second warns and retries, the third runs well in silence."""

    def fetch() -> None:
        rollout.log(SeverityNumber.ERROR, "no answer from weather.example")
        raise TimeoutError("no answer")

    def search() -> None:
        add_event("retry", attempt="2", reason="rate limit")
        rollout.log(SeverityNumber.INFO, "searching")
        rollout.log(SeverityNumber.WARN, "rate limit: retrying")

    with SdkRollout(store, run, name, calls=3).running() as rollout:
        for tool, body in (("fetch", fetch), ("search", search), ("read", lambda: None)):
            rollout.call()
            rollout.tool(tool, body)


@pytest.fixture
def run() -> str:
    return f"records-{uuid.uuid4().hex[:8]}"


def test_air_rules_see_exceptions_events_and_logs_of_tools(store: StoreSettings, run: str) -> None:
    agent(store, run)
    expression: Mapping[str, Any] = {"kind": "expression", "reward": 1}
    rules = (
        AirRule(name="timeout", kind="tool_exception", reward=-0.5, tools=("*",), types="Timeout.*"),
        AirRule(name="value", kind="tool_exception", reward=-0.5, tools=("*",), types="ValueError"),
        AirRule(name="read", kind="tool_exception", reward=-0.5, tools=("read",), types=".*"),
        AirRule(name="types", where="ARRAY_CONTAINS(ToolExceptionTypes, 'TimeoutError')", **expression),
        AirRule(name="events", where="ARRAY_LENGTH(ToolEventNames)", **expression),
        AirRule(name="retries", where="ARRAY_CONTAINS(ToolEventNames, 'retry')", **expression),
        AirRule(name="severity", where="ToolLogSeverity", **expression),
        AirRule(name="limited", where="ARRAY_TO_STRING(ToolLogBodies, ' ') LIKE '%rate limit%'", **expression),
    )
    build(settings_of(store, run, *rules), run)
    assert rewards(store, run) == [
        (0, "events", 1.0),
        (0, "severity", 17.0),
        (0, "timeout", -0.5),
        (0, "types", 1.0),
        (1, "events", 1.0),
        (1, "limited", 1.0),
        (1, "retries", 1.0),
        (1, "severity", 13.0),
    ]


RULE = """
import polars as pl

SEEN = []

def rule(calls: pl.DataFrame) -> list[float]:
    SEEN.append(calls.select("ToolEvents", "ToolLogs", "ToolExceptionTypes").to_dicts())
    return [sum(log["Severity"] >= 13 for log in logs) for logs in calls["ToolLogs"]]
"""


def test_air_python_rule_sees_attributes_of_events_and_logs(
    store: StoreSettings, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(store, run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rules.py").write_text(RULE)
    build(settings_of(store, run, AirRule(name="warnings", kind="python", reward=-1, where="own_rules.py:rule")), run)
    assert rewards(store, run) == [(0, "warnings", -1.0), (1, "warnings", -1.0), (2, "warnings", 0.0)]
    import own_rules  # type: ignore[import-not-found]  # the module that the builder imported

    (calls,) = own_rules.SEEN
    failed, call_with_retries, quiet = calls
    assert failed["ToolExceptionTypes"] == ["TimeoutError"]
    (exception,) = failed["ToolEvents"]
    attributes = {pair["Key"]: pair["Value"] for pair in exception["Attributes"]}
    assert (exception["Tool"], exception["Name"], attributes["exception.message"]) == ("fetch", "exception", "no answer")
    (log,) = failed["ToolLogs"]
    assert (log["Tool"], log["Severity"], log["Body"]) == ("fetch", 17, "no answer from weather.example")
    assert [(event["Name"], event["Attributes"]) for event in call_with_retries["ToolEvents"]] == [
        ("retry", [{"Key": "attempt", "Value": "2"}, {"Key": "reason", "Value": "rate limit"}])
    ]
    assert [log["Body"] for log in call_with_retries["ToolLogs"]] == ["searching", "rate limit: retrying"]
    assert quiet == {"ToolEvents": [], "ToolLogs": [], "ToolExceptionTypes": []}


def test_air_rules_count_records_delivered_twice_once(store: StoreSettings, run: str) -> None:
    agent(store, run)
    client = client_of(store)
    for table, column in (
        ("otel_traces", "SpanAttributes['spangrad.run.id']"),
        ("otel_logs", "concat('', ResourceAttributes['service.instance.id'])"),
    ):
        client.command(f"INSERT INTO {stored(table)} SELECT * FROM {stored(table)} WHERE startsWith({column}, '{run}')")
    rules = [
        AirRule(name=name, kind="expression", reward=1, where=f"ARRAY_LENGTH({column})")
        for name, column in (("events", "ToolEvents"), ("logs", "ToolLogs"))
    ]
    build(settings_of(store, run, *rules), run)
    assert rewards(store, run) == [(0, "events", 1.0), (0, "logs", 1.0), (1, "events", 1.0), (1, "logs", 2.0)]


def test_air_rules_take_span_that_ends_before_its_start_for_one_of_no_time(store: StoreSettings, run: str) -> None:
    spans = SpanFactory(run=run)
    root = spans.root(rollout := f"{run}-r", calls=1)
    spans.evaluation(root, 1.0)
    agent = spans.span("agent", root, rollout=rollout, kind="AGENT")
    spans.call(spans.span("POST", agent, rollout=rollout), rollout=rollout)
    spans.spans[-1]["Duration"] = -(10**9)
    spans.span("read", agent, rollout=rollout, kind="TOOL", Attributes={"tool.name": "read"}, Duration=-(10**9))
    post(store, spans.otlp())
    rules = (
        AirRule(name="slow", kind="latency", reward=-1, seconds=60),
        AirRule(name="seconds", kind="expression", reward=1, where="Seconds + 1 + ARRAY_LENGTH(ToolLogBodies)"),
    )
    build(settings_of(store, run, *rules), run)
    assert rewards(store, run) == [(0, "seconds", 1.0)]
    assert rows(store, f"SELECT Duration FROM spangrad.tool_calls WHERE RunId = '{run}'") == [(0,)]


def test_air_late_log_record_makes_no_revision(store: StoreSettings, run: str) -> None:
    agent(store, run)
    rule = AirRule(name="severity", kind="expression", reward=1, where="ToolLogSeverity")
    settings = settings_of(store, run, rule)
    build(settings, run)
    spans = f"SELECT TraceId, SpanId FROM otel.otel_traces WHERE SpanName = 'read' AND SpanAttributes['spangrad.run.id'] = '{run}'"
    columns = "Timestamp, TraceId, SpanId, SeverityNumber, Body"
    client_of(store).command(f"INSERT INTO otel.otel_logs ({columns}) SELECT now64(9), TraceId, SpanId, 21, 'late' FROM ({spans})")
    build(settings, run)
    assert rows(store, f"SELECT max(Revision) FROM spangrad_internal.builds WHERE RunId = '{run}'") == [(0,)]
    # Whoever builds the rollout later sees it.
    build(settings_of(store, run, rule.model_copy(update={"name": "later"})), run)
    assert [row for row in rewards(store, run) if row[1] == "later"] == [(0, "later", 17.0), (1, "later", 13.0), (2, "later", 21.0)]


def test_tool_records_are_read_only_where_a_rule_needs_them(store: StoreSettings, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent(store, run)
    asked = list[str]()
    frame = StoreReader.frame

    def counted(self: StoreReader, sql: str, parameters: Mapping[str, Any] | None = None, **how: Any) -> Any:
        asked.append(sql)
        return frame(self, sql, parameters, **how)

    monkeypatch.setattr(StoreReader, "frame", counted)

    def tables(*rules: AirRule) -> tuple[int, int]:
        asked.clear()
        build(settings_of(store, run, *rules), run)
        return sum("Events.Name" in sql for sql in asked), sum("otel.otel_logs" in sql for sql in asked)

    assert tables(AirRule(name="ok", kind="tool_ok", reward=1, tools=("*",))) == (0, 0)
    assert tables(AirRule(name="e", kind="expression", reward=1, where="FailedTools")) == (0, 0)
    assert tables(AirRule(name="e", kind="expression", reward=1, where="ARRAY_LENGTH(ToolEvents)")) == (1, 0)
    assert tables(AirRule(name="e", kind="expression", reward=1, where="ToolLogSeverity")) == (0, 1)
    assert tables(AirRule(name="e", kind="tool_exception", reward=1, tools=("*",), types=".*")) == (1, 1)


def test_tool_exception_rule_reads_types_recorded_by_framework(store: StoreSettings, run: str) -> None:
    request = FIXTURE.read_text().replace("c" * 32, uuid.uuid4().hex).replace('"r9"', f'"{run}-r"')
    post(store, request.encode())
    spans = SpanFactory(run=run)
    root = spans.root(f"{run}-r", calls=0)
    spans.evaluation(root, 1.0)
    post(store, spans.otlp())
    rules = [
        AirRule(name=types, kind="tool_exception", reward=-1, tools=("*",), types=types) for types in ("ValueError", "TypeError", "Value")
    ]
    build(settings_of(store, run, *rules), run)
    given = f"""
        SELECT r.Name, r.Value, s.SpanName FROM spangrad.rewards AS r
        INNER JOIN spangrad.rollout_spans AS s ON s.TraceId = r.TraceId AND s.SpanId = r.SpanId AND s.RowKind = 'span'
        WHERE r.RunId = '{run}' AND r.Source = 'air'"""
    assert rows(store, given) == [("ValueError", -1.0, "broken")]


def test_air_rule_that_raises_writes_nothing_and_is_retried(
    store: StoreSettings, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(store, run)
    monkeypatch.chdir(tmp_path)
    flag = tmp_path / "works"
    (tmp_path / "flaky_rules.py").write_text(
        f"import os\n\ndef rule(calls):\n    assert os.path.exists({str(flag)!r}), 'the judge is away'\n    return calls['Place'] + 1\n"
    )
    builder = Builder(settings_of(store, run, AirRule(name="own", kind="python", reward=1, where="flaky_rules:rule")), run=run)
    for _ in range(2):
        with pytest.raises(RuleError, match="raised AssertionError: the judge is away"):
            builder.build_ready()
    for table in ("transitions", "rewards", "drops", "builds"):
        assert rows(store, f"SELECT count() FROM {stored(table)} WHERE RunId = '{run}'") == [(0,)]
    flag.touch()
    assert builder.build_ready().rollouts == 1
    assert rewards(store, run) == [(turn, "own", turn + 1.0) for turn in range(3)]


def test_builder_with_edited_rule_file_raises(store: StoreSettings, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edited_rules.py").write_text("def rule(calls):\n    return calls['Place']\n")
    settings = settings_of(store, run, AirRule(name="own", kind="python", reward=1, where="edited_rules:rule"))
    builder = build(settings, run)
    (tmp_path / "edited_rules.py").write_text("def rule(calls):\n    return calls['Place'] * 2\n")
    agent(store, run)
    with pytest.raises(BuilderError, match=r"was changed since the builder began.*Start the builder again"):
        builder.build_ready()
    build(settings, run)
    assert [value for *_, value in rewards(store, run)] == [0.0, 2.0, 4.0]


def test_builder_with_rule_file_edited_within_pass_writes_nothing(
    store: StoreSettings, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(store, run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "growing_rules.py").write_text(
        "def rule(calls):\n    with open(__file__, 'a') as file:\n        file.write('#')\n    return calls['Place']\n"
    )
    with pytest.raises(BuilderError, match=r"was changed since the builder began"):
        build(settings_of(store, run, AirRule(name="own", kind="python", reward=1, where="growing_rules:rule")), run)
    for table in ("transitions", "rewards", "drops", "builds"):
        assert rows(store, f"SELECT count() FROM {stored(table)} WHERE RunId = '{run}'") == [(0,)]
