"""Rollouts that were built, put into a real span store without anybody having run or built them.

In: settings, a model. Out: rows of `transitions`, `drops` and `builds`. Invariant: what a transition says was sampled was sampled from the
model, so that its logprobs are true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from sampling import sampled_rows
from trainer_world import FakeOptimizer, saved

from spangrad.settings import BuilderSettings, Settings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import tokenizer_hash
from trainer import loop
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.shutdown import Shutdown

SPEC = BuilderSettings().spec
CALL = {
    "TaskId": "task", "Choice": 0, "Timestamp": datetime(2026, 1, 1, tzinfo=UTC), "AgentName": "agent", "Policy": "policy",
    "Model": "policy", "FinishReason": "stop", "BuildSpec": SPEC,
}  # fmt: skip


class World:
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
        self.client.insert(f"otel.{table}", [list(row.values()) for row in rows], column_names=list(rows[0]))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.client.query(query, parameters={"run": self.run}).result_rows]


def _drop(row: dict[str, Any]) -> dict[str, Any]:
    """A rollout that ended without a call."""
    columns = {"RunId", "Mode", "BuildSpec", "GroupId", "GroupSize", "TaskId", "RolloutId", "Attempt", "Revision", "Choice", "Policy"}
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


def trainer_over(world: World, settings: Settings, optimizer: FakeOptimizer | None = None) -> loop.Trainer:
    """A trainer whose store is real and whose optimizer is a fake, begun; nothing is published."""
    ledger = loop.open_ledger(settings)
    newest = loop.prepare(ledger, settings)
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
