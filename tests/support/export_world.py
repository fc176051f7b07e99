"""Rollouts as builders leave them in a store, with the spans that hold their texts: made by hand for tests of exports.

In: calls, one by one. Out: rows of otel.builds, transitions, drops and datasets, and spans sent by OTLP/HTTP. Invariant: each `World` has
a dataset, a build specification and a run of its own, so that tests that share a store share nothing else.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from spangrad.settings import StoreSettings
from spangrad.store import datasets
from spangrad.store.clickhouse import connect
from spangrad.types import call_id, transition_id
from transition_builder.schemas import BUILDS, DROPS, REWARDS, TRANSITIONS

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
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
        same |= {"CallId": call, "TraceId": trace, "SpanId": span, "Choice": choice, "Timestamp": time}
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
            self.client.insert_arrow(f"otel.{table}", frame.to_arrow(compat_level=pl.CompatLevel.oldest()))

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
