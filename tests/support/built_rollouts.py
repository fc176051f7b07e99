"""Rollouts in a real store as the builder leaves them: for training, for dashboards, and as groups that no trainer may train."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from spangrad.types import Mode
from spangrad.weights.checksums import tokenizer_hash
from tests.support.policies import PROMPT, sample, sampled_rows
from tests.support.sections import trainer_settings
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory, versions
from tests.support.trainers import FakeOptimizer, saved
from trainer import loop
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import open_ledger, prepare
from trainer.ledger.skips import SkipReason
from trainer.run import train
from trainer.shutdown import Shutdown
from transition_builder.loop import build_once

# Rollouts that were built, put into a real span store without anybody having run or built them.

SPEC = BuilderSettings().spec
CALL = {
    "TaskId": "task", "ChoiceIndex": 0, "Timestamp": datetime(2026, 1, 1, tzinfo=UTC), "AgentName": "agent", "Policy": "policy",
    "Model": "policy", "FinishReason": "stop", "BuildSpec": SPEC,
}  # fmt: skip


class BuiltRollouts:
    """Puts built rollouts into the store."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.client = connect(settings.store)
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
    newest = prepare(ledger, settings)
    trainer = loop.Trainer(
        settings=settings,
        ledger=ledger,
        source=GroupReader(world.client, settings),
        optimizer=optimizer or saved(newest),
        normalise=lambda units: units.values * 2 - 1,
        mirror=Mirror(world.client, settings.store.url, ledger),
        publisher=None,
        shutdown=Shutdown(),
        loaded=newest,
        load_optimizer=saved,
    )
    trainer.start()
    return trainer


# What tests of the builder ask a real store: spans in by OTLP/HTTP, transitions, drops and revisions out by SQL.


def post(store: StoreSettings, body: bytes) -> None:
    """Send an OTLP/JSON request."""
    request = urllib.request.Request(
        f"{store.otlp_endpoint}/v1/traces", data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=30).close()


def settings_of(store: StoreSettings, run: str, **builder: Any) -> Settings:
    """A build specification of its own for each run, so that tests that share a store share nothing else."""
    return Settings(store=store, builder=BuilderSettings(selection=Selection(agents=f".*|{run}"), **builder))


def rows(store: StoreSettings, sql: str) -> list[tuple[Any, ...]]:
    """An answer."""
    return [tuple(row) for row in connect(store).query(sql).result_rows]


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
    """Of each rollout: revision, calls, transitions and drops."""
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
    answer = httpx.post(f"{store.otlp_endpoint}/v1/traces", content=spans.otlp(), headers={"content-type": "application/json"}, timeout=30)
    answer.raise_for_status()


# A store with what a short training run leaves: spans, rewards, transitions, drops, two versions and their batches.

READ_TOKEN = "read"
ELSEWHERE = """
INSERT INTO spangrad_internal.policy_versions
SELECT * REPLACE (
    mapUpdate(
        map('seconds_publish', 0.25, 'engine_idle', 0.5, 'seconds_idle', 0.5, 'seconds_load', 0.125, 'seconds_credit', 0.0625,
            'validate_success', 1., 'mfu', 0.25),
        Metrics) AS Metrics,
    now64(6) AS IngestedAt)
FROM spangrad_internal.policy_versions FINAL WHERE BatchId != ''
"""
"""Metrics of a trainer that follows, publishes, evaluates and has a GPU; this one's stay."""


@contextmanager
def store_of_a_run(directory: Path, model: Path) -> Generator[StoreSettings]:
    """The store, which asks readers for READ_TOKEN."""
    store = store_settings(directory / "store", token="write", read_token=READ_TOKEN)
    with running_store(store, directory / "store.log"):
        settings = Settings(
            store=store,
            builder=BuilderSettings(incomplete_after_seconds=0),
            trainer=trainer_settings(
                run_id="run",
                model=model,
                directory=directory / "policies",
                groups_per_batch=2,
                max_staleness=9,
                learning_rate=1e-3,
                publish=False,
            ),
        )
        trained = _trained(model)
        _send(store, trained.otlp())
        # Delivered again but for one, so that nothing takes it for the same request: whoever counts must count each span once.
        _send(store, trained.otlp(*[str(row["SpanId"]) for row in trained.spans[:-1]]))
        _send(store, _held_out(model).otlp())
        build_once(settings)
        train(settings, follow=False)
        client = connect(store)
        client.command(ELSEWHERE)
        client.close()
        yield store


def _trained(model: Path) -> SpanFactory:
    """Four groups of two rollouts, one of which won; tools and a call that fail, an attempt that crashes, a reward that never came."""
    spans = SpanFactory(run="run")
    for group in ("a", "b", "c", "d"):
        for at in range(2):
            rollout = f"{group}-{at}"
            if rollout == "d-1":
                spans.root(rollout, attempt=0, calls=0, final=False, failure="crash", GroupId=group)
            attempt = int(rollout == "d-1")
            root = spans.root(rollout, attempt=attempt, calls=1, GroupId=group, GroupSize=2, TaskId=f"task-{group}")
            agent = spans.span("agent", root, rollout=rollout, attempt=attempt, kind="AGENT")
            _call(spans, agent, model, rollout=rollout, attempt=attempt, seed=at + 10 * ord(group))
            tool = {"rollout": rollout, "attempt": attempt, "kind": "TOOL", "status": "Error" if at else "Ok"}
            spans.span("search", agent, **tool, Attributes={"tool.name": "search"})
            spans.evaluation(root, 1.0 - at)
    failed = spans.root("failed", calls=1, GroupId="e", GroupSize=1)
    spans.call(failed, rollout="failed", ErrorType="APIError", HttpStatus=500, ResponseIds=[], Logprobs=[])
    spans.evaluation(failed, 0.0)
    mute = spans.root("mute", calls=1, GroupId="f", GroupSize=1)
    spans.call(mute, rollout="mute")
    return spans


def _held_out(model: Path) -> SpanFactory:
    """A group that is measured and never trained."""
    spans = SpanFactory(run="run")
    for at in range(2):
        root = spans.root(f"held-out-{at}", calls=1, GroupId="v", GroupSize=2)
        _call(spans, root, model, rollout=f"held-out-{at}", seed=at)
        spans.evaluation(root, 1.0)
    for row in (*spans.spans, *spans.calls, *spans.roots):
        row["Mode"] = "validate"
    return spans


def _call(spans: SpanFactory, parent: str, model: Path, *, seed: int, **where: Any) -> str:
    """A call that the model itself answered, as version 0."""
    response, logprobs = sample(model, list(PROMPT), 2, 1.0, seed=seed)
    facts = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
    return spans.call(parent, **facts, TokenizerHash=tokenizer_hash(model), **versions((0, 0)), **where)


def _send(store: StoreSettings, body: bytes) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer write"}
    httpx.post(f"{store.otlp_endpoint}/v1/traces", content=body, headers=headers, timeout=30).raise_for_status()


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
