"""Spans of tests: agents' and the gateway's, as rows and as OTLP, and tracers whose ids count up."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import UTC, datetime, timedelta
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator


def versions(*spans: tuple[int, int]) -> dict[str, object]:
    """Columns of a call: each pair is a response token at which a policy version begins, and the version."""
    return {"Versions.Start": [start for start, _ in spans], "Versions.Version": [version for _, version in spans]}


class SpanFactory:
    """Spans of rollouts as the store's typed tables hold them, made by hand: `spans`, `calls`, `answers` and `roots` are lists of rows.

    Span ids count from 1, an attempt has a trace of its own, and a process's clock is `clocks[process]` seconds off.
    """

    def __init__(self, *, run: str = "run", clocks: dict[str, float] | None = None) -> None:
        self.run = run
        self.clocks = clocks or {}
        self.spans: list[dict[str, object]] = []
        self.calls: list[dict[str, object]] = []
        self.answers: list[dict[str, object]] = []
        self.roots: list[dict[str, object]] = []
        self._made = 0
        self._seq: dict[str, int] = {}

    def root(
        self,
        rollout: str = "r",
        *,
        attempt: int = 0,
        calls: int | None = None,
        final: bool = True,
        failure: str = "",
        trace: str = "",
        **facts: object,
    ) -> str:
        """The runner's root span of an attempt; `facts` replace what the root knows (GroupId, IngestedAt, ...)."""
        span = self.span(
            "rollout", "", rollout=rollout, attempt=attempt, process="runner", trace=trace, status="Error" if failure else "Ok"
        )
        row = self.spans[-1]
        self.roots.append(
            {name: row[name] for name in ("RunId", "Mode", "Attempt", "TraceId", "SpanId")}
            | {"RolloutId": rollout, "GroupId": "g", "GroupSize": 2, "TaskId": "t", "Calls": calls, "Final": final, "Failure": failure}
            | {"IngestedAt": self.time(0), "Verdict": "complete", "Detail": ""}
            | facts
        )
        known = self.roots[-1]
        attributes = {"group.id": known["GroupId"], "group.size": known["GroupSize"], "task.id": known["TaskId"], "rollout.calls": calls}
        attributes |= {"rollout.final": str(final).lower(), "rollout.failure": failure}
        row["Attributes"] = {f"spangrad.{name}": str(value) for name, value in attributes.items() if value not in (None, "")}
        return span

    def span(
        self,
        name: str,
        parent: str,
        *,
        rollout: str = "r",
        attempt: int = 0,
        process: str = "agent",
        service: str = "",
        scope: str = "",
        status: str = "Ok",
        trace: str = "",
        kind: str = "",
        **facts: object,
    ) -> str:
        """Any span; `kind` is OpenInference's, `facts` replace columns, and Attributes are added to."""
        self._made += 1
        seq = self._seq[process] = self._seq.get(process, -1) + 1
        attributes = {**({"openinference.span.kind": kind} if kind else {}), **facts.pop("Attributes", {})}  # type: ignore[dict-item]
        span = f"{self._made:016x}"
        self.spans.append(
            {"RunId": self.run, "Mode": "train", "RolloutKey": rollout, "RolloutKeySource": "rollout", "Attempt": attempt}
            | {
                "Timestamp": self.time(self._made + self.clocks.get(process, 0)),
                "TraceId": self.trace(trace or f"{self.run}.{rollout}.{attempt}"),
                "SpanId": span,
            }
            | {"EventIndex": 0, "RowKind": "span", "ParentSpanId": parent, "ProcessId": process, "Seq": seq, "SpanName": name}
            | {"ServiceName": service or process, "ScopeName": scope, "StatusCode": status, "StatusMessage": "", "Attributes": attributes}
            | facts
        )
        return span

    def evaluation(
        self, span: str, value: object = 1.0, name: str = "reward", kind: str = "evaluation_event", role: str = "", **facts: object
    ) -> None:
        """An evaluation result on a span, as an event or a log, of a role where one is given."""
        owner = next(row for row in self.spans if row["SpanId"] == span and row["RowKind"] == "span")
        index = 1 + sum(row["SpanId"] == span and row["RowKind"] != "span" for row in self.spans)
        of_role = {"spangrad.reward.role": role} if role else {}
        attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": str(value), **of_role}
        self.spans.append(
            owner | {"RowKind": kind, "EventIndex": index, "SpanName": "gen_ai.evaluation.result", "Attributes": attributes} | facts
        )

    def call(self, parent: str, *, choices: int = 1, process: str = "gateway", **facts: object) -> str:
        """A gateway span and its rows in calls; `facts` replace columns of those rows, or rollout, attempt and trace of both."""
        from spangrad.types import call_id

        where = {name: facts.pop(name) for name in ("rollout", "attempt", "trace") if name in facts}
        span = self.span("chat", parent, process=process, scope="spangrad.gateway", status="Unset", **where)  # type: ignore[arg-type]
        row = self.spans[-1]
        same = (
            "RunId",
            "Mode",
            "RolloutKey",
            "RolloutKeySource",
            "Attempt",
            "Timestamp",
            "TraceId",
            "SpanId",
            "ParentSpanId",
            "ProcessId",
            "Seq",
        )
        for choice in range(choices):
            self.calls.append(
                {name: row[name] for name in same}
                | {"ChoiceIndex": choice, "CallId": call_id(str(row["TraceId"]), span, choice)}
                | {
                    "Policy": "policy",
                    "Versions.Start": [0],
                    "Versions.Version": [3],
                    "Model": "policy",
                    "ResponseId": f"id-{span}",
                    "TokenizerHash": "tok",
                }
                | {"PromptIds": [1, 2, 3], "ResponseIds": [4, 5], "Logprobs": [-0.5, -0.25], "FinishReason": "stop", "Temperature": 0.7}
                | {"TopP": 1.0, "TopK": 0, "MinP": 0.0, "PresencePenalty": 0.0, "FrequencyPenalty": 0.0, "RepetitionPenalty": 1.0}
                | {"Constrained": False, "ErrorType": "", "HttpStatus": 200, "Aborted": False, "Redacted": False, "IdsSource": "engine"}
                | facts
            )
        return span

    def client(self, parent: str, **facts: object) -> str:
        """An openai-level span, as OpenInference's instrumentation of OpenAI's client makes it."""
        return self.span("ChatCompletion", parent, kind="LLM", scope="openinference.instrumentation.openai", **facts)  # type: ignore[arg-type]

    def answer(self, span: str, **facts: object) -> None:
        """Add the answer that an openai-level span's `output.value` holds."""
        owner = next(row for row in self.spans if row["SpanId"] == span)
        self.answers.append(
            {
                "TraceId": owner["TraceId"],
                "SpanId": span,
                "ChoiceIndex": 0,
                "Policy": "policy",
                "Versions.Start": [0],
                "Versions.Version": [3],
                "Model": "policy",
                "Temperature": 1.0,
                "TopP": 1.0,
                "TopK": 0,
                "MinP": 0.0,
                "PresencePenalty": 0.0,
                "FrequencyPenalty": 0.0,
                "RepetitionPenalty": 1.0,
                "Constrained": False,
            }
            | {"ResponseId": f"id-{span}", "TokenizerHash": "tok", "PromptIds": [1, 2], "ResponseIds": [7], "Logprobs": [-0.125]}
            | {"FinishReason": "stop"}
            | facts
        )

    def frames(self) -> Any:
        """`transition_builder.frames.Frames`; of each rollout the last final root."""
        import polars as pl

        from transition_builder.frames import Frames
        from transition_builder.schemas import ANSWERS, CALLS, ROLLOUTS, SPANS

        final = {row["RolloutId"]: {name: row.get(name) for name in ROLLOUTS} for row in self.roots if row["Final"]}
        return Frames(
            pl.DataFrame(list(final.values()), schema=dict(ROLLOUTS)),
            pl.DataFrame(self.spans, schema=dict(SPANS)),
            pl.DataFrame(self.calls, schema=dict(CALLS)),
            pl.DataFrame(self.answers, schema=dict(ANSWERS)),
        )

    def load_otlp(self, request: dict[str, Any], rollout: str = "r") -> None:
        """Add the spans of an OTLP/JSON request, as if all of them named the rollout; what they lack of the contract is made up."""
        for resource in request["resourceSpans"]:
            about = {attribute["key"]: next(iter(attribute["value"].values())) for attribute in resource["resource"]["attributes"]}
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    self._load_span(span, scope["scope"]["name"], about, rollout)

    def _load_span(self, span: dict[str, Any], scope: str, about: dict[str, Any], rollout: str) -> None:
        attributes = {attribute["key"]: _of_otlp(attribute["value"]) for attribute in span.get("attributes", [])}
        # An exporter of its own may name no instance: the builder takes the service for the process.
        instance = about.get("service.instance.id", about["service.name"])
        counted = "spangrad.seq" in attributes
        own = {
            "SpanId": span["spanId"],
            "TraceId": span["traceId"],
            "Timestamp": self.time(0) + timedelta(microseconds=int(span["startTimeUnixNano"]) % 10**15 / 1000),
            "Duration": int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]),
            "ProcessId": instance if counted else f"~{instance}",
            "Seq": int(attributes.get("spangrad.seq", 0)),
            "Attributes": {key: str(value) for key, value in attributes.items() if len(str(value)) <= 1024},
        }
        status = {0: "Unset", 1: "Ok", 2: "Error"}[span.get("status", {}).get("code", 0)]
        if scope == "spangrad.gateway":
            ids = {name: attributes.get(f"spangrad.{key}", "") for name, key in _GATEWAY_BYTES.items()}
            arrays = {
                name: [unpacked[0] for unpacked in struct.iter_unpack("<f" if name == "Logprobs" else "<I", base64.b64decode(text))]
                for name, text in ids.items()
            }
            self.call(span.get("parentSpanId", ""), rollout=rollout)
            self.calls[-1] |= {name: own[name] for name in own if name != "Attributes"} | arrays
            self.calls[-1] |= {
                "ResponseId": attributes.get("gen_ai.response.id", ""),
                "Model": attributes.get("gen_ai.request.model", ""),
                "HttpStatus": int(attributes["http.response.status_code"]),
            }
        else:
            self.span(
                span["name"], span.get("parentSpanId", ""), rollout=rollout, service=about["service.name"], scope=scope, status=status
            )
        self.spans[-1] |= own
        if scope == "openinference.instrumentation.openai" and "output.value" in attributes:
            self._load_answer(span["spanId"], attributes["output.value"])

    def _load_answer(self, span: str, text: str) -> None:
        answer = json.loads(text) if text.startswith("{") else {}
        for choice in answer.get("choices", ()):
            logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content", ())]
            arrays = {"PromptIds": answer.get("prompt_token_ids") or [], "ResponseIds": choice.get("token_ids") or [], "Logprobs": logprobs}
            self.answer(
                span, ChoiceIndex=choice.get("index", 0), ResponseId=answer["id"], FinishReason=choice.get("finish_reason") or "", **arrays
            )

    def otlp(self, *spans: str) -> bytes:
        """The given spans (all of them, when none is given) as an OTLP/JSON request, evaluation events and gateway attributes included."""
        chosen = [row for row in self.spans if row["RowKind"] == "span" and (not spans or row["SpanId"] in spans)]
        return json.dumps({"resourceSpans": [self._resource_spans(row) for row in chosen]}).encode()

    def _resource_spans(self, row: dict[str, Any]) -> dict[str, object]:
        attributes = dict(row["Attributes"]) | {"spangrad.process.id": row["ProcessId"], "spangrad.seq": row["Seq"]}
        if row["RolloutKeySource"] == "rollout":
            named = {
                "run.id": row["RunId"],
                "rollout.mode": row["Mode"],
                "rollout.id": row["RolloutKey"],
                "rollout.attempt": row["Attempt"],
            }
            attributes |= {f"spangrad.{name}": value for name, value in named.items()}
        choices: list[dict[str, Any]] = [call for call in self.calls if call["SpanId"] == row["SpanId"]]
        if choices:
            attributes |= self._gateway_attributes(choices)
        events: list[dict[str, Any]] = [
            event for event in self.spans if event["SpanId"] == row["SpanId"] and event["RowKind"] == "evaluation_event"
        ]
        start = int(row["Timestamp"].timestamp() * 1000) * 1_000_000
        span = {
            "traceId": row["TraceId"],
            "spanId": row["SpanId"],
            "parentSpanId": row["ParentSpanId"],
            "name": row["SpanName"],
            "kind": 1,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(start + row.get("Duration", 1000)),
            "attributes": [{"key": key, "value": _otlp_value(value)} for key, value in attributes.items()],
            "events": [
                {
                    "name": event["SpanName"],
                    "timeUnixNano": str(start),
                    "attributes": [{"key": key, "value": _otlp_value(value)} for key, value in event["Attributes"].items()],
                }
                for event in events
            ],
            "status": {"code": {"Unset": 0, "Ok": 1, "Error": 2}[row["StatusCode"]], "message": row["StatusMessage"]},
        }
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": row["ServiceName"]}}]}
        return {"resource": resource, "scopeSpans": [{"scope": {"name": row["ScopeName"]}, "spans": [span]}]}

    @staticmethod
    def _gateway_attributes(choices: list[dict[str, Any]]) -> dict[str, object]:
        first = choices[0]
        responses, logprobs = [call["ResponseIds"] for call in choices], [call["Logprobs"] for call in choices]
        return {
            "spangrad.policy.name": first["Policy"],
            "spangrad.policy.versions": json.dumps(
                [list(zip(call["Versions.Start"], call["Versions.Version"], strict=True)) for call in choices]
            ),
            "spangrad.tokenizer.hash": first["TokenizerHash"],
            **{name: first[column] for column, name in _SAMPLING.items()},
            "spangrad.input.token_ids": struct.pack(f"<{len(first['PromptIds'])}I", *first["PromptIds"]),
            "spangrad.output.token_ids": b"".join(struct.pack(f"<{len(ids)}I", *ids) for ids in responses),
            "spangrad.output.logprobs": b"".join(struct.pack(f"<{len(values)}f", *values) for values in logprobs),
            "spangrad.output.lengths": [len(ids) for ids in responses],
            "gen_ai.request.model": first["Model"],
            "gen_ai.response.id": first["ResponseId"],
            "gen_ai.response.finish_reasons": [call["FinishReason"] for call in choices],
            "http.response.status_code": first["HttpStatus"],
            **({"error.type": first["ErrorType"]} if first["ErrorType"] else {}),
            **({"spangrad.modality": first["Modality"]} if first.get("Modality") else {}),
            **({"spangrad.request.relaxed": first["Relaxed"]} if first.get("Relaxed") else {}),
        }

    @staticmethod
    def trace(name: str) -> str:
        """The trace id that stands for a readable name."""
        return hashlib.sha256(name.encode()).hexdigest()[:32]

    @staticmethod
    def time(seconds: float) -> datetime:
        """An instant so many seconds after the start of 2026."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


_SAMPLING = {
    "Temperature": "gen_ai.request.temperature",
    "TopP": "gen_ai.request.top_p",
    "TopK": "gen_ai.request.top_k",
    "MinP": "spangrad.sampling.min_p",
    "PresencePenalty": "gen_ai.request.presence_penalty",
    "FrequencyPenalty": "gen_ai.request.frequency_penalty",
    "RepetitionPenalty": "spangrad.sampling.repetition_penalty",
    "Constrained": "spangrad.sampling.constrained",
}


_GATEWAY_BYTES = {"PromptIds": "input.token_ids", "ResponseIds": "output.token_ids", "Logprobs": "output.logprobs"}


def _otlp_value(value: Any) -> dict[str, object]:
    """A value in OTLP/JSON."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_otlp_value(child) for child in value]}}
    return {"stringValue": value}


def _of_otlp(value: dict[str, Any]) -> Any:
    """A value of OTLP/JSON, an array as the JSON text that the store has, and none as an empty text."""
    kind, content = next(iter(value.items()), ("stringValue", ""))
    if kind != "arrayValue":
        return content
    return json.dumps([_of_otlp(child) for child in content.get("values", [])], ensure_ascii=False, separators=(",", ":"))


class CountingIds(IdGenerator):
    """Ids that count up, so that a test knows them."""

    def __init__(self) -> None:
        self._last = 0

    def generate_span_id(self) -> int:
        self._last += 1
        return self._last

    def generate_trace_id(self) -> int:
        self._last += 1
        return self._last


def provider_with(processor: SpanProcessor) -> TracerProvider:
    """Return a provider whose ids count up, with one processor."""
    provider = TracerProvider(resource=Resource({"service.name": "unit"}), id_generator=CountingIds(), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider
