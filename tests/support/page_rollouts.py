"""Rollouts of every kind that the page shows, in a real store: trained, dropped, hostile, and many."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.types import call_id
from spangrad.weights.checksums import tokenizer_hash
from tests.support.built_rollouts import post, settings_of
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

RUN = "page"
MANY = 400
MARKUP = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
BIDI = "abc\u202ecod.exe\u2066"
LONG = 10 * 2**20
"""Characters of the longest value of a hostile span."""
TEXTS = ["what is the weather in rome", "the weather in rome is fine"]


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of a few words, all that the page needs of a model."""
    words = ["<unk>", *(f"word{number}" for number in range(1, 11)), "paris", "rome", "oslo"]
    Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")).save(str(directory / "tokenizer.json"))


class PageRollouts:
    """Rollouts that tests of the page look at."""

    def __init__(self, store: StoreSettings, model: Path) -> None:
        """Put everything into the store, built; `model` becomes the directory of a tokenizer."""
        self.store = store
        write_tokenizer(model)
        self._waiting: dict[tuple[str, tuple[str, ...]], list[list[Any]]] = {}
        self.hash = tokenizer_hash(model)
        self.spans = SpanFactory(run=RUN)
        self.settings: Settings = settings_of(store, RUN)
        self.calls = self._conversation("seen-1", 1.0, failed=False)
        self.untrained_calls = self._conversation("seen-2", 0.0, failed=True)
        hostile = self._hostile()
        post(store, self.spans.otlp())
        build_once(self.settings)
        self.client = connect(store)
        self._train()
        self._train_hostile(hostile)
        self._many()
        self.client.close()

    def _conversation(self, rollout: str, reward: float, *, failed: bool) -> list[str]:
        """Add a rollout of two calls with a tool between them; return the spans of its calls."""
        spans = self.spans
        root = spans.root(rollout, calls=2, GroupId="weather", TaskId="rome", GroupSize=2)
        spans.spans[-1]["Duration"] = 9 * 10**9
        spans.evaluation(root, reward)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You help."}, {"role": "user", "content": TEXTS[0]}]
        tool_call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
        asks = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
        first = self._call(root, rollout, messages, asks, [5, 6, 7], [8, 9])
        spans.evaluation(first, 0.25, "step")
        attributes = {"input.value": '{"city": "rome"}', "output.value": "fine", "tool.name": "weather"}
        outcome: dict[str, Any] = {"status": "Error", "StatusMessage": "no such city"} if failed else {}
        spans.span("weather", root, rollout=rollout, kind="TOOL", Duration=250 * 10**6, Attributes=attributes, **outcome)
        later = [*messages, asks, {"role": "tool", "tool_call_id": "t1", "content": "fine"}]
        second = self._call(root, rollout, later, {"role": "assistant", "content": TEXTS[1]}, [5, 6, 7, 8, 9, 10], [11, 12, 13])
        return [first, second]

    def _call(
        self, root: str, rollout: str, messages: list[dict[str, Any]], reply: dict[str, Any], prompt: list[int], response: list[int]
    ) -> str:
        spans = self.spans
        logprobs = [-0.1 - index for index in range(len(response))]
        facts: dict[str, Any] = {"PromptIds": prompt, "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
        facts |= {"TokenizerHash": self.hash, "Versions.Start": [0, 1], "Versions.Version": [3, 4]}
        span = spans.call(spans.client(root, rollout=rollout), rollout=rollout, **facts)
        others = [{"token": word, "logprob": -0.5 * rank} for rank, word in enumerate((" paris", MARKUP), 1)]
        tokens = {"content": [{"token": "x", "logprob": logprob, "top_logprobs": others} for logprob in logprobs]}
        choice = {"index": 0, "message": reply, "finish_reason": "stop", "logprobs": tokens}
        request, answer = {"model": "policy", "messages": messages}, {"choices": [choice]}
        spans.spans[-1]["Attributes"] = {"spangrad.request.json": json.dumps(request), "spangrad.response.json": json.dumps(answer)}
        spans.spans[-1]["Duration"] = 2 * 10**9
        return span

    def _hostile(self) -> str:
        """Add a rollout whose every text is an attack, or longer than any screen; return the span of its call."""
        spans, rollout = self.spans, f"{MARKUP} & {BIDI}"
        root = spans.root(rollout, calls=1, GroupId=MARKUP, TaskId=f"=cmd|{MARKUP}")
        spans.spans[-1]["StatusMessage"] = MARKUP
        spans.evaluation(root, 0.5, MARKUP)
        spans.span(MARKUP, root, rollout=rollout, status="Error", StatusMessage=MARKUP, service=MARKUP, Attributes={
            MARKUP: MARKUP, "href": "javascript:window.hacked=true", "long": "x" * LONG, "bidi": BIDI})  # fmt: skip
        text = f"{MARKUP}\n{BIDI}\n\ud800"
        messages = [{"role": MARKUP, "content": text + "y" * 100_000}]
        return self._call(root, rollout, messages, {"role": "assistant", "content": text}, [5], [6])

    def _train_hostile(self, span: str) -> None:
        """Record a version of a policy, a branch, a batch and metrics whose names are attacks, and held-out tasks likewise."""
        rollout = f"{MARKUP} & {BIDI}"
        trace = self.spans.trace(f"{RUN}.{rollout}.0")
        place = {"Policy": MARKUP, "Branch": MARKUP, "RunId": RUN, "Mode": "train", "BatchId": MARKUP, "Version": 1}
        of_rollout = {**place, "GroupId": MARKUP, "RolloutId": rollout, "BuildSpec": self.settings.builder.spec}
        self._insert("batches", of_rollout)
        self._insert("trained_calls", {**of_rollout, "TaskId": MARKUP, "CallId": call_id(trace, span, 0), "TraceId": trace, "SpanId": span,
            "SampledVersions": [0], "Return": 0.5, "Advantage": 0.25})  # fmt: skip
        old = datetime(2020, 1, 1, tzinfo=UTC)
        self._insert("policy_versions", {**place, "Parent": 0, "ParentBranch": MARKUP, "Status": "committed", "Checksum": MARKUP,
            "Path": MARKUP, "Metrics": {MARKUP: 1.0, f"seconds_{MARKUP}": 2.0}, "IngestedAt": old})  # fmt: skip
        for version in (8, 9):
            self._insert("builds", {"RunId": RUN, "Mode": "validate", "BuildSpec": "s", "TaskId": MARKUP, "GroupId": "attack",
                "RolloutId": f"{MARKUP}-{version}", "RewardTotals.Name": [MARKUP] * 2, "RewardTotals.Role": [MARKUP, "white"],
                "RewardTotals.Value": [1, -1], "PolicyVersions": [version], "Failure": MARKUP, "AgentNames": [MARKUP],
                "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC)})  # fmt: skip

    def _train(self) -> None:
        """Record the step that was trained on the first conversation."""
        spec = self.settings.builder.spec
        trace = self.spans.trace(f"{RUN}.seen-1.0")
        same = {"Policy": "policy", "Branch": "main", "RunId": RUN, "Mode": "train"}
        self._insert("batches", {**same, "BatchId": "b5", "Version": 5, "GroupId": "weather", "RolloutId": "seen-1", "BuildSpec": spec})
        for turn, span in enumerate(self.calls):
            self._insert("trained_calls", {**same, "BatchId": "b5", "Version": 5, "GroupId": "weather", "TaskId": "rome",
                "RolloutId": "seen-1", "Turn": turn, "CallId": call_id(trace, span, 0), "TraceId": trace, "SpanId": span,
                "SampledVersions": [3, 4], "Staleness": 1, "Return": 1.25, "Advantage": 0.75, "BuildSpec": spec})  # fmt: skip
        call = call_id(trace, self.calls[1], 0)
        tokens = {"Policy": "policy", "BatchId": "b5", "Version": 5, "RolloutId": "seen-1", "CallId": call}
        self._insert("trained_tokens", {**tokens, "Branch": "main", "TrainerLogprobs": [-0.1, -0.98, -2.6],
            "Entropies": [0.125, 0.7, 2.5]})  # fmt: skip
        # Another branch trained the second call as well, by a step that found no entropies.
        self._insert("trained_calls", {**same, "Branch": "fork", "BatchId": "b5", "Version": 5, "GroupId": "weather", "TaskId": "rome",
            "RolloutId": "seen-1", "Turn": 1, "CallId": call, "TraceId": trace, "SpanId": self.calls[1], "SampledVersions": [3, 4],
            "Return": 1.25, "Advantage": -0.5, "BuildSpec": spec})  # fmt: skip
        self._insert("trained_tokens", {**tokens, "Branch": "fork", "TrainerLogprobs": [-0.1, -1.1, -2.1]})
        for version in range(6):
            metrics = {"mean_return": version / 10, "success": version / 5, "grad_norm": 0.5, "seconds_train": 2.0} if version else {}
            self._insert("policy_versions", {**same, "BatchId": f"b{version}" if version else "", "Version": version,
                "Parent": version - 1 if version else None, "ParentBranch": "main", "Status": "committed", "Metrics": metrics,
                "RunId": "many" if version == 1 else RUN})  # fmt: skip

    def _many(self) -> None:
        """Add rollouts that were built, and of which no span is here; one of them was built twice."""
        for number, revision in [(1, 0), *((number, 1) for number in range(MANY))]:
            self._insert("builds", {"RunId": "many", "Revision": revision, "Mode": "validate", "BuildSpec": "s",
                "GroupId": f"g{number // 4}", "GroupSize": 4, "TaskId": f"task-{number // 4}", "RolloutId": f"many-{number:04d}",
                "Content": 1, "Calls": 2, "Transitions": 2,
                "RewardTotals.Name": ["reward"], "RewardTotals.Value": [number / MANY], "AgentNames": ["planner"],
                "PolicyVersions": [number % 7], "FailedToolCalls": number % 5 == 0, "ToolCalls": 1, "Attempts": 1,
                "Failure": "timeout" if number % 10 == 0 else "",
                "IngestedAt": datetime(2026, 1, 1, 0, number // 60, number % 60, tzinfo=UTC)})  # fmt: skip
        # Games of two roles, by two versions.
        for version in (3, 4):
            self._insert("builds", {"RunId": RUN, "Mode": "validate", "BuildSpec": "s", "TaskId": "opening", "RolloutId": f"duel-{version}",
                "GroupId": "duel", "RewardTotals.Name": ["reward"] * 2, "RewardTotals.Role": ["black", "white"], "RewardTotals.Value":
                [3 - version, version - 3], "PolicyVersions": [version], "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC)})  # fmt: skip
        self._flush()

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        self._waiting.setdefault((table, tuple(row)), []).append(list(row.values()))

    def _flush(self) -> None:
        for (table, columns), rows in self._waiting.items():
            self.client.insert(f"spangrad_internal.{table}", rows, column_names=list(columns))
        self._waiting.clear()
