"""Rollouts in a real store as the builder leaves them: for training, for dashboards, and as groups that no trainer may train."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl

from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store import datasets
from spangrad.store.names import stored
from spangrad.types import Mode, call_id, transition_id
from spangrad.weights.checksums import tokenizer_hash
from tests.support import servers
from tests.support.policies import PROMPT, sample, sampled_rows
from tests.support.spans import SpanFactory, versions
from tests.support.trainers import FakeOptimizer, begun
from trainer import loop
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import open_ledger, prepare
from trainer.ledger.skips import SkipReason
from transition_builder.schemas import BUILDS, DROPS, REWARDS, TRANSITIONS

# Rollouts that were built, put into a real span store without anybody having run or built them.

SPEC = BuilderSettings().spec
CALL = {
    "TaskId": "task", "ChoiceIndex": 0, "Timestamp": datetime(2026, 1, 1, tzinfo=UTC), "AgentName": "agent", "Policy": "policy",
    "Model": "policy", "FinishReason": "stop", "BuildSpec": SPEC,
}  # fmt: skip


class BuiltRollouts:
    """Puts built rollouts into the store."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.client = servers.client_of(settings.store)
        self.run = settings.trainer.run_id
        self.model = model
        self.tokenizer = tokenizer_hash(model)
        self.seed = 0

    def group(
        self,
        name: str,
        rewards: list[float | None],
        *,
        size: int | None = None,
        temperature: float = 1.0,
        calls: Sequence[dict[str, Any]] = ({},),
        spoil: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
        **changes: Any,
    ) -> None:
        """A group of rollouts, whose calls are told apart by `calls`; a reward of None is a rollout that left only a drop.

        Their rows are put into the store as `spoil` leaves them.
        """
        facts = {"RunId": self.run, "GroupId": name, "GroupSize": size or len(rewards), **changes}
        self.seed += 1
        rows = list[dict[str, Any]]()
        for i, reward in enumerate(rewards):
            rollout = {**facts, "RolloutId": f"{name}-{i}", **changes}
            for turn, call in enumerate(calls if reward is not None else ()):
                row = self.call(rollout, turn, call, temperature, 1000 * self.seed + 10 * i + turn)
                final = turn == len(calls) - 1
                rows.append({**_paid(None, turn), **row, **(_paid(reward, turn) if final else {})})
            if reward is None:
                self.insert("drops", [_drop({**CALL, **rollout})])
                self.insert("builds", [_build({**CALL, **rollout}, [])])
        self.built(spoil(rows))

    def built(self, rows: list[dict[str, Any]]) -> None:
        """Put transitions, which lie by rollout, into the store, and then the builds of their rollouts."""
        if rows:
            self.insert("transitions", rows)
            by_rollout = [list(calls) for _, calls in groupby(rows, lambda row: row["RolloutId"])]
            self.insert("builds", [_build(calls[0], calls) for calls in by_rollout])

    def call(self, rollout: dict[str, Any], turn: int, call: dict[str, Any], temperature: float, seed: int) -> dict[str, Any]:
        *_, row = sampled_rows(self.model, turn + 1, temperature=temperature, seed=seed, TokenizerHash=self.tokenizer)
        place = f"{rollout['RolloutId']}-{turn}" if turn else rollout["RolloutId"]
        names = {name: f"{name}-{self.run}-{place}" for name in ("CallId", "TransitionId", "TraceId", "SpanId")}
        return {**row, **CALL, **names, "Turn": turn, **rollout, **call}

    def insert(self, table: str, rows: list[dict[str, Any]]) -> None:
        self.client.insert(f"{stored(table)}", [list(row.values()) for row in rows], column_names=list(rows[0]))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.client.query(query, parameters={"run": self.run}).result_rows]


def _drop(row: dict[str, Any]) -> dict[str, Any]:
    """A rollout that ended without a call."""
    columns = {"RunId", "Mode", "BuildSpec", "GroupId", "GroupSize", "TaskId", "RolloutId", "Attempt", "Revision", "ChoiceIndex", "Policy"}
    kept = {name: value for name, value in row.items() if name in columns}
    return {"Mode": "train", "Attempt": 0, "Revision": 0, **kept, "CallId": "", "TraceId": "t", "SpanId": "s", "Reason": "no_calls"}


def _paid(reward: float | None, turn: int) -> dict[str, Any]:
    """The rewards of a call: its rollout's final one, or none."""
    paid = {"Name": "reward", "Value": reward, "Source": "runner", "CallId": "", "Role": "", "Turn": turn}
    return {f"Rewards.{name}": [] if reward is None else [value] for name, value in paid.items()}


def _build(row: dict[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row without which a rollout's others do not exist, and which counts them."""
    columns = {"RunId", "Mode", "BuildSpec", "GroupId", "GroupSize", "TaskId", "RolloutId", "Attempt", "Revision", "Content"}
    kept = {name: value for name, value in row.items() if name in columns}
    counts = {"Calls": len(calls), "Transitions": len(calls), "Rewards": sum(len(call["Rewards.Name"]) for call in calls)}
    return {"Mode": "train", "Attempt": 0, "Revision": 0, "Content": 0, **counts, **kept}


def trainer_over(world: BuiltRollouts, settings: Settings, optimizer: FakeOptimizer | None = None) -> loop.Trainer:
    """A trainer whose store is real and whose optimizer is a fake, begun; nothing is published."""
    ledger = open_ledger(settings)
    prepare(ledger, settings)
    return begun(settings, ledger, GroupReader(world.client, settings), Mirror(world.client, settings.store, ledger), None, optimizer)


START = datetime(2026, 1, 1, tzinfo=UTC)


class StoredRollouts:
    """Rollouts of a dataset as builders leave them, with the spans that hold their texts: made by hand for tests of exports."""

    def __init__(self, store: StoreSettings, name: str) -> None:
        self.store, self.name = store, name
        self.client = servers.client_of(store)
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
            sent = dict(attributes or {})
            sent |= {"spangrad.request.json": json.dumps(request)} if request is not None else {}
            sent |= {"spangrad.response.json": json.dumps(answer)} if answer is not None else {}
            self._span(trace, span, time, sent, events or [])
        else:
            time = next(START + timedelta(seconds=stored["at"]) for stored in self.spans if stored["span"] == span)
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
            {
                "RunId": self.name,
                "RolloutId": rollout,
                "Attempt": 0,
                "Watermark": START,
                "Builder": "test",
                **row,
                **same,
                **self._totals(rollout),
            }
            for rollout, row in self.builds.items()
        ]
        self._insert("builds", builds, BUILDS)
        datasets.register(self.client, name or self.name, self.spec, {}, "test")
        self.transitions, self.drops, self.rewards, self.builds = [], [], [], {}
        return datetime.fromtimestamp(self.client.query("SELECT toUnixTimestamp64Micro(now64(6))").result_rows[0][0] / 1e6, UTC)

    def _totals(self, rollout: str) -> dict[str, list[Any]]:
        """The rewards of a rollout, as its build holds them."""
        lists = ["Name", "Role", "Value"]
        carried = [row for row in self.transitions if row["RolloutId"] == rollout]
        given = [reward for row in carried for reward in zip(*(row[f"Rewards.{name}"] for name in lists), strict=True)]
        given += [(row["Name"], row.get("Role", ""), row["Value"]) for row in self.rewards if row["RolloutId"] == rollout]
        return {f"RewardTotals.{name}": [reward[at] for reward in given] for at, name in enumerate(lists)}

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
                    "events": [{"name": name, "timeUnixNano": start, "attributes": _attributes(values)} for name, values in events],
                },
            }
        )

    def _post(self) -> None:
        scope = {"scope": {"name": "spangrad.gateway"}, "spans": [stored["otlp"] for stored in self.spans]}
        body = {"resourceSpans": [{"resource": {"attributes": _attributes({"service.name": "gateway"})}, "scopeSpans": [scope]}]}
        post(self.store, json.dumps(body).encode())


def chat(messages: list[dict[str, Any]], reply: str | dict[str, Any], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and answer of /v1/chat/completions."""
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    return {"model": "policy", "messages": messages, **more}, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """The model's message."""
    return {"role": "assistant", "content": text}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    def typed(value: Any) -> dict[str, Any]:
        return {"boolValue": value} if isinstance(value, bool) else {"stringValue": str(value)}

    return [{"key": key, "value": typed(value)} for key, value in values.items()]


# What tests of the builder ask a real store: spans in by OTLP/HTTP, transitions, drops and revisions out by SQL.


def post(store: StoreSettings, body: bytes) -> None:
    """Send an OTLP/JSON request."""
    assert servers.post(f"{store.otlp_endpoint}/v1/traces", body, "application/json") == 200


def settings_of(store: StoreSettings, run: str, **builder: Any) -> Settings:
    """A build specification of its own for each run, so that tests that share a store share nothing else."""
    return Settings(store=store, builder=BuilderSettings(selection=Selection(agents=f".*|{run}"), **builder))


def rows(store: StoreSettings, sql: str) -> list[tuple[Any, ...]]:
    """An answer."""
    return [tuple(row) for row in servers.client_of(store).query(sql).result_rows]


def outcome(store: StoreSettings, run: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Transitions and drops of a run: rollout, attempt, span, then what became of the call."""
    transitions = rows(
        store,
        f"SELECT RolloutId, Attempt, SpanId, Turn, PromptIds, ResponseIds, Version, Rewards.Value FROM spangrad.transitions "
        f"WHERE RunId = '{run}' ORDER BY RolloutId, Turn, ChoiceIndex",
    )
    drops = rows(
        store,
        f"SELECT RolloutId, Attempt, SpanId, Reason, Detail FROM spangrad.drops WHERE RunId = '{run}' ORDER BY RolloutId, Attempt, SpanId",
    )
    return transitions, drops


def revisions(store: StoreSettings, run: str) -> list[tuple[Any, ...]]:
    """Return the builds of a run: rollout id, revision, calls, transitions and drops."""
    columns = "RolloutId, Revision, Calls, Transitions, Drops"
    return rows(store, f"SELECT {columns} FROM spangrad_internal.builds FINAL WHERE RunId = '{run}' ORDER BY RolloutId, Revision")


# Groups of a service's own traces, in a store, sampled from a model with true logprobs.

RUN = "service"


def send(
    store: StoreSettings, model: Path, groups: Sequence[str], *, mode: Mode = Mode.PRODUCTION, version: int = 0, size: int = 2
) -> None:
    """Groups of which the first of two rollouts won; with a size above 2 something of each is still to come."""
    spans = SpanFactory(run=RUN)
    for group in groups:
        for at, reward in enumerate((1.0, 0.0)):
            rollout = f"{group}-{at}"
            root = spans.root(rollout, calls=1, GroupId=group, GroupSize=size)
            response, logprobs = sample(model, list(PROMPT), 1 + at, 1.0, seed=at + 10 * ord(group[-1]))
            facts: dict[str, Any] = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
            facts |= {**versions((0, version)), "TokenizerHash": tokenizer_hash(model)}
            spans.call(root, rollout=rollout, **facts)
            spans.evaluation(root, reward)
    for row in (*spans.spans, *spans.calls):
        row["Mode"] = mode.value
    post(store, spans.otlp())


# Groups that nothing before the trainer stops and that no trainer may train, by the reason that each is skipped for.

Rows = list[dict[str, Any]]


def _without_numbers(rows: Rows, trained: str) -> Rows:
    return [{**rows[0], "Logprobs": [float("nan")] * len(rows[0]["Logprobs"])}, *rows[1:]]


def _of_another_distribution(rows: Rows, trained: str) -> Rows:
    return [{**row, "Logprobs": [logprob - 2 for logprob in row["Logprobs"]]} for row in rows]


def _trained_before(rows: Rows, trained: str) -> Rows:
    """Give the first rollout the id of one that was trained under its own group, as a conversation that went on under another has it."""
    first = rows[0]["RolloutId"]
    return [{**row, "RolloutId": trained, "Revision": 1} if row["RolloutId"] == first else row for row in rows]


def _without_a_prompt(rows: Rows, trained: str) -> Rows:
    return [{**rows[0], "PromptIds": []}, *rows[1:]]


POISON: dict[SkipReason, Callable[[Rows, str], Rows]] = {
    SkipReason.NOT_FINITE: _without_numbers,
    SkipReason.LOGPROB_GAP: _of_another_distribution,
    SkipReason.ALREADY_TRAINED: _trained_before,
    SkipReason.CONTRADICTORY: _without_a_prompt,
}
"""Takes a group's rows and the id of a rollout that was trained under another group."""
