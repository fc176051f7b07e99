"""Rollouts made by hand or by the OpenTelemetry SDK: for exports, for records, and as agents send them."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
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
from spangrad.settings import StoreSettings
from spangrad.store import datasets
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from spangrad.store.rollout.record import Build, Call, Conclusion, Record, Reward, Span
from spangrad.types import call_id, transition_id
from transition_builder.schemas import BUILDS, DROPS, REWARDS, TRANSITIONS

# Rollouts as builders leave them in a store, with the spans that hold their texts: made by hand for tests of exports.

START = datetime(2026, 1, 1, tzinfo=UTC)


class StoredRollouts:
    """A dataset named `name`."""

    def __init__(self, store: StoreSettings, name: str) -> None:
        self.store, self.name = store, name
        self.client = connect(store)
        self.spec = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.transitions: list[dict[str, Any]] = []
        self.drops: list[dict[str, Any]] = []
        self.rewards: list[dict[str, Any]] = []
        self.builds: dict[str, dict[str, Any]] = {}
        self.spans: list[dict[str, Any]] = []
        self._made = 0

    def call(
        self,
        rollout: str,
        request: dict[str, Any] | None = None,
        answer: dict[str, Any] | None = None,
        *,
        ids: tuple[list[int], list[int]] = ([1, 2], [3]),
        reward: float | None = None,
        dropped: str = "",
        attributes: dict[str, Any] | None = None,
        events: list[tuple[str, dict[str, str]]] | None = None,
        span: str = "",
        choice: int = 0,
        mode: str = "train",
        group: str = "g",
        task: str = "t",
        **changes: Any,
    ) -> str:
        """A call of a rollout, and its span (unless `span` names one that is there); its call id."""
        self._made += 1
        trace = hashlib.sha256(f"{self.name}.{rollout}".encode()).hexdigest()[:32]
        time = START + timedelta(seconds=self._made)
        if not span:
            span = f"{self._made:016x}"
            told = dict(attributes or {})
            told |= {"spangrad.request.json": json.dumps(request)} if request is not None else {}
            told |= {"spangrad.response.json": json.dumps(answer)} if answer is not None else {}
            self._span(trace, span, time, told, events or [])
        else:
            time = next(START + timedelta(seconds=one["at"]) for one in self.spans if one["span"] == span)
        call = call_id(trace, span, choice)
        build = self.builds.setdefault(
            rollout, {"Mode": mode, "GroupId": group, "TaskId": task, "GroupSize": 2, "Calls": 0, "Transitions": 0, "Drops": 0}
        )
        same = {"RunId": self.name, "RolloutId": rollout, "Mode": mode, "GroupId": group, "TaskId": task, "GroupSize": 2, "Attempt": 0}
        same |= {"CallId": call, "TraceId": trace, "SpanId": span, "ChoiceIndex": choice, "Timestamp": time}
        about = {"AgentName": "planner", "Policy": "policy", "Model": "policy"}
        build["Calls"] += 1
        if dropped:
            build["Drops"] += 1
            self.drops.append({**same, **about, "Convention": "gateway", "Reason": dropped, "Detail": "", **changes})
            return call
        row = {
            **same,
            **about,
            "Turn": build["Transitions"],
            "ParentCallId": "",
            "Branch": 0,
            "Components": ["planner"],
            "Tools": [],
            "Version": 3,
            "Versions.Start": [0],
            "Versions.Version": [3],
            "TokenizerHash": "tok",
            "PromptIds": ids[0],
            "ResponseIds": ids[1],
            "Logprobs": [-0.5] * len(ids[1]),
            "Temperature": 1.0,
            "FinishReason": "stop",
            "Rewards.Name": [] if reward is None else ["reward"],
            "Rewards.Value": [] if reward is None else [reward],
            "Rewards.Source": [] if reward is None else ["runner"],
            "Rewards.CallId": [] if reward is None else [""],
            "Rewards.Role": [] if reward is None else [""],
            "Rewards.Turn": [] if reward is None else [build["Transitions"]],
        }
        build["Transitions"] += 1
        self.transitions.append({**row, **changes})
        return call

    def give(self, rollout: str, value: float, source: str = "runner", name: str = "reward") -> None:
        """A reward of a rollout, that no transition carries."""
        texts = dict.fromkeys(("CallId", "RuleHash", "TraceId", "SpanId"), "")
        same = {"RunId": self.name, "Mode": "train", "RolloutId": rollout, "Attempt": 0}
        self.rewards.append({**same, **texts, "Name": name, "Value": value, "Source": source})

    def commit(self, revision: int = 0, *, name: str | None = None) -> datetime:
        """Write everything as one revision of each rollout; the store's time after that."""
        if self.spans:
            self._post()
        content = revision + 1
        same = {"BuildSpec": self.spec, "Revision": revision, "Content": content}
        transitions = [{**row, **same, "TransitionId": transition_id(row["CallId"], self.spec, revision)} for row in self.transitions]
        self._insert("transitions", transitions, TRANSITIONS)
        self._insert("drops", [{**row, **same} for row in self.drops], DROPS)
        self._insert("rewards", [{**row, **same} for row in self.rewards], REWARDS)
        builds = [
            {"RunId": self.name, "RolloutId": rollout, "Attempt": 0, "Watermark": START, "Builder": "test", **row, **same}
            for rollout, row in self.builds.items()
        ]
        self._insert("builds", builds, BUILDS)
        datasets.register(self.client, self.store.url, name or self.name, self.spec, {}, "test")
        self.transitions, self.drops, self.rewards, self.builds = [], [], [], {}
        return datetime.fromtimestamp(self.client.query("SELECT toUnixTimestamp64Micro(now64(6))").result_rows[0][0] / 1e6, UTC)

    def _insert(self, table: str, rows: list[dict[str, Any]], schema: Any) -> None:
        if rows:
            frame = pl.DataFrame(rows, schema=dict(schema))
            self.client.insert_arrow(f"{stored(table)}", frame.to_arrow(compat_level=pl.CompatLevel.oldest()))

    def _span(self, trace: str, span: str, time: datetime, attributes: dict[str, Any], events: list[tuple[str, dict[str, str]]]) -> None:
        start = str(int(time.timestamp()) * 10**9)
        self.spans.append(
            {
                "span": span,
                "at": (time - START).total_seconds(),
                "otlp": {
                    "traceId": trace,
                    "spanId": span,
                    "name": "chat",
                    "kind": 2,
                    "startTimeUnixNano": start,
                    "endTimeUnixNano": start,
                    "attributes": _attributes(attributes),
                    "events": [{"name": name, "timeUnixNano": start, "attributes": _attributes(told)} for name, told in events],
                },
            }
        )

    def _post(self) -> None:
        scope = {"scope": {"name": "spangrad.gateway"}, "spans": [one["otlp"] for one in self.spans]}
        body = {"resourceSpans": [{"resource": {"attributes": _attributes({"service.name": "gateway"})}, "scopeSpans": [scope]}]}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.store.otlp_endpoint}/v1/traces", json.dumps(body).encode(), headers, method="POST")
        urllib.request.urlopen(request, timeout=30).close()


def chat(messages: list[dict[str, Any]], reply: str | dict[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and answer of /v1/chat/completions."""
    said = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    return {"model": "policy", "messages": messages, **more}, {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    """The model's message."""
    return {"role": "assistant", "content": text}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    def typed(value: Any) -> dict[str, Any]:
        return {"boolValue": value} if isinstance(value, bool) else {"stringValue": str(value)}

    return [{"key": key, "value": typed(value)} for key, value in values.items()]


# One rollout made by hand, as the store knows it: two attempts, a tool, two calls, of which one has two choices.

MS = 1_000_000


def span(name: str, own: str, parent: str = "", **facts: Any) -> Span:
    known: dict[str, Any] = {
        "run": "run-1",
        "mode": "train",
        "attempt": 0,
        "names_rollout": True,
        "started": 0,
        "trace": "t0",
        "process": "agent",
        "seq": int(own, 16),
        "service": "agent",
        "scope": "",
        "duration": 5 * MS,
        "status": "Unset",
        "message": "",
        "attributes": {},
    }
    return Span(name=name, span=own, parent=parent, **{**known, **facts})


def root(own: str, *, final: bool, **facts: Any) -> Span:
    said = {
        "spangrad.task.id": "paris",
        "spangrad.group.id": "g7",
        "spangrad.group.size": "8",
        "spangrad.rollout.final": str(final).lower(),
    }
    attributes = said | facts.pop("attributes", {})
    return span("rollout", own, process="runner", service="spangrad-runner", attributes=attributes, **facts)


def call(of: str, **facts: Any) -> Call:
    known: dict[str, Any] = {
        "trace": "t1",
        "choice": 0,
        "policy": "policy",
        "versions": (3,),
        "prompt_tokens": 512,
        "response_tokens": 100,
        "finish_reason": "stop",
        "error": "",
        "http_status": 200,
        "aborted": False,
    }
    return Call(span=of, **{**known, **facts})


FAILED = root(
    "a0", final=False, trace="t0", duration=20 * MS, status="Error", message="exit code 1", attributes={"spangrad.rollout.failure": "crash"}
)
SECOND = {"trace": "t1", "attempt": 1}
KEPT = root("b0", final=True, status="Ok", duration=1500 * MS, **SECOND)
AGENT = span("agent", "b1", "b0", duration=1400 * MS, kind="agent", agent="researcher", **SECOND)
LLM = {"llm.token_count.prompt": "512", "llm.token_count.completion": "100"}
CLIENT = span("ChatCompletion", "b2", "b1", duration=700 * MS, status="Ok", kind="llm", attributes=LLM, **SECOND)
GATEWAY = {"kind": "gateway", "process": "gateway", "service": "spangrad-gateway", "scope": "spangrad.gateway", **SECOND}
FIRST_CALL = span("chat policy", "b3", "b2", duration=690 * MS, seq=7, **GATEWAY)
TOOL = span(
    "search",
    "b4",
    "b1",
    duration=40_000,
    status="Error",
    message="ValueError('no  such\npage')Traceback (most recent call last): ...",
    kind="tool",
    tool="search",
    **SECOND,
)
# Its clock is an hour slow, and it came first: neither matters.
SECOND_CLIENT = span("ChatCompletion", "b5", "b1", started=-3600 * 10**9, **SECOND, duration=300 * MS)
SECOND_CALL = span("chat policy", "b6", "b5", duration=200 * MS, seq=8, **GATEWAY)
ORPHAN = span("lost", "b7", "ffff", names_rollout=False, process="", service="other", **SECOND)

WHOLE = Record(
    "rollout-1",
    [SECOND_CALL, SECOND_CLIENT, KEPT, AGENT, CLIENT, FIRST_CALL, TOOL, ORPHAN, FAILED, CLIENT, FIRST_CALL],
    [
        call("b3"),
        call("b3"),
        call("b6", prompt_tokens=700, response_tokens=30, versions=(3, 4), finish_reason="length"),
        call("b6", choice=1, prompt_tokens=700, response_tokens=20),
    ],
    [
        Reward("t1", "b0", "reward", "1", "event"),
        Reward("t1", "b4", "tool_error", "-0.1", "air"),
        Reward("t9", "c0", "style", "0.5", "log"),
        Reward("", "", "brevity", "0.2", "sql"),
    ],
    [
        Build(
            "0123456789abcdef",
            [
                Conclusion(0, "t0", "a1", 0, "researcher", "policy", reason="superseded_attempt", detail="attempt 1 counts"),
                Conclusion(
                    1, "t1", "b3", 0, "researcher", "policy", 3, 0, [("reward", 1.0, "evaluation_event", ""), ("tool", -0.1, "air", "")]
                ),
                *[Conclusion(1, "t1", "b6", choice, "", "policy", reason="mixed_versions", detail="versions 3, 4") for choice in (0, 1)],
            ],
        )
    ],
)


# Rollouts as OpenTelemetry's own SDK tells of them: spans with exceptions and events, log records, sent to a store by OTLP/HTTP.


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
