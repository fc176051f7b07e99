"""Held-out rollouts in a real store: metrics and ratings of versions, and what a read of new ones costs after many old ones."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from spangrad.settings import BuilderSettings, Settings, StoreSettings
from tests.support.built_rollouts import BuiltRollouts
from tests.support.policies import changed, trainer_settings
from trainer.data.source import BatchRollout, Group, GroupReader
from trainer.ledger.recovery import open_ledger, prepare
from trainer.monitor.batch_metrics import batch_metrics
from trainer.monitor.evaluate import Evaluation
from trainer.monitor.held_out import HeldOutRollouts

SPEC = BuilderSettings().spec
HISTORY = """
INSERT INTO spangrad_internal.{table} SELECT * EXCEPT number
    REPLACE (format('old-{{}}', number) AS RolloutId, format('old-{{}}', number) AS GroupId, toDateTime64('2026-11-01', 6) AS IngestedAt)
FROM (SELECT * FROM spangrad_internal.{table} WHERE RunId = %(run)s AND RolloutId = 'first-0') AS first CROSS JOIN numbers(20000) AS n
"""
"""Statement that copies a rollout to 20,000 older ones."""


@pytest.fixture
def run() -> str:
    return f"held-out-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def settings(store: StoreSettings, tiny_model: Path, tmp_path: Path, run: str) -> Settings:
    return Settings(store=store, trainer=trainer_settings(run_id=run, branch=run, model=tiny_model, directory=tmp_path / "policies"))


@pytest.fixture
def world(settings: Settings, tiny_model: Path) -> BuiltRollouts:
    return BuiltRollouts(settings, tiny_model)


def known(rollouts: HeldOutRollouts) -> tuple[Any, ...]:
    """Return all that a reader has read, by version."""
    return dict(rollouts.games), {version: sorted(map(repr, rollouts.of_version(version))) for version in range(5)}


def test_held_out_reads_of_new_builds_equal_one_read_of_all(settings: Settings, world: BuiltRollouts, run: str) -> None:
    """A revision with another version and reward; one without transitions; two versions in one rollout; the same revision again."""
    follower = HeldOutRollouts(world.client, settings, SPEC)
    assert follower.read() == set()
    changes: list[tuple[dict[str, Any], set[int]]] = [
        ({"name": "a", "rewards": [1.0, 0.0], "Version": 1}, {1}),
        ({"name": "b", "rewards": [0.5], "Version": 2}, {2}),
        ({"name": "a", "rewards": [0.25], "size": 2, "Version": 3, "Revision": 1}, {1, 3}),
        ({"name": "b", "rewards": [None], "Revision": 1}, {2}),
        ({"name": "c", "rewards": [1.0], "calls": ({"Version": 3}, {"Version": 4})}, set()),
        ({"name": "a", "rewards": [0.25], "size": 2, "Version": 3, "Revision": 1}, set()),
        ({"name": "d", "rewards": [1.0], "RunId": f"{run}-other", "Version": 1}, set()),
        ({"name": "e", "rewards": [1.0], "Mode": "train", "Version": 1}, set()),
    ]
    for change, versions in changes:
        world.group(**{"Mode": "validate", **change})
        assert follower.read() == versions, change
        assert follower.read() == set()
        whole = HeldOutRollouts(world.client, settings, SPEC)
        whole.read()
        assert known(follower) == known(whole)
    assert [len(follower.of_version(version)) for version in range(5)] == [0, 1, 0, 1, 0]


def test_held_out_read_returns_new_rollouts_only(
    settings: Settings, world: BuiltRollouts, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 20,000 rollouts that were built days ago; the first is one of the last two minutes, in which inserts may be late."""
    world.group("first", [1.0], Mode="validate", Version=1)
    for table in ("transitions", "builds"):
        world.client.command(HISTORY.format(table=table), parameters={"run": run})
    follower = HeldOutRollouts(world.client, settings, SPEC)
    assert follower.read() == {1}
    assert len(follower.of_version(1)) == 20_001
    world.group("new", [0.5], Mode="validate", Version=2)
    sent, scanned = list[int](), list[int]()
    query = world.client.query

    def recorded(statement: str, **options: Any) -> Any:
        result = query(statement, **options)
        sent.append(len(result.result_rows))
        scanned.append(sum(rows for *_, rows, _ in query(f"EXPLAIN ESTIMATE {statement}", **options).result_rows))
        return result

    monkeypatch.setattr(world.client, "query", recorded)
    assert follower.read() == {2}
    assert sent == [1, 1, 2], "arrivals, twice, and the rollouts"
    assert max(scanned) <= 2 * 1024, "one granule a part"


def test_success_of_rollout_with_reward_0_ignores_other_rewards(settings: Settings, world: BuiltRollouts, run: str):
    """ClickHouse's sumMap forgets names whose sum is 0."""
    reward = {"Name": "tool_ok", "Value": 1.0, "Source": "air", "CallId": "", "Role": "", "Turn": 0}
    paid = {f"Rewards.{name}": [value] for name, value in reward.items()}
    world.group("v", [1.0, 0.0, 0.0, 0.0], Mode="validate", Version=0, calls=({**paid}, {}))
    ledger = open_ledger(settings)
    newest = prepare(ledger, settings)
    (measured,) = Evaluation(world.client, settings, SPEC).measure(ledger)
    ledger.close()
    assert measured.version == newest.version == 0
    assert measured.metrics == {
        "validate_rollouts": 4.0, "validate_return": 1.25, "validate_success": 0.25, "validate_reward_reward": 0.25,
        "validate_reward_tool_ok": 1.0,
    }  # fmt: skip
    batch = GroupReader(world.client, settings).load([Group(run, "validate", SPEC, "v")])
    assert batch_metrics(batch, settings.trainer)["success"] == 0.25


def test_evaluation_rates_versions_by_role_from_held_out_games(settings: Settings, world: BuiltRollouts, run: str):
    """Four games that `first` wins, against an older version of the same number; then what was read is rated once."""
    won = {"Name": "reward", "Value": 1.0, "Source": "evaluation_event", "CallId": "", "Role": "first", "Turn": 0}
    paid = {f"Rewards.{name}": [value] for name, value in won.items()}
    world.group(
        "v", [0.0] * 4, Mode="validate", Version=0, calls=({**paid, "AgentName": "first"}, {"AgentName": "second", "Policy": "past"})
    )
    chosen = settings.model_copy(update={"trainer": changed(settings.trainer, {"past_policy": "past"})})
    ledger = open_ledger(chosen)
    prepare(ledger, chosen)
    evaluation = Evaluation(world.client, chosen, SPEC)
    assert evaluation.rate(ledger) == []
    evaluation.measure(ledger)
    (rated,) = evaluation.rate(ledger)
    assert evaluation.rate(ledger) == []
    ledger.close()
    assert rated.metrics["validate_rating_first"] == -rated.metrics["validate_rating_second"] > 100
    assert rated.metrics["validate_return"] == 1.0


def test_evaluation_measures_version_once_its_step_is_committed(settings: Settings, world: BuiltRollouts, run: str) -> None:
    """A version is served a little before its step is committed: its first rollouts may be there by then."""
    ledger = open_ledger(settings)
    prepare(ledger, settings)
    lease = ledger.begin([BatchRollout(Group(run, "train", SPEC, "g"), "g-0", 0, 0)])
    assert lease
    world.group("v", [1.0, 0.0], Mode="validate", Version=lease.version)
    evaluation = Evaluation(world.client, settings, SPEC)
    assert evaluation.measure(ledger) == evaluation.measure(ledger) == []
    ledger.commit(lease, checksum="c", path="p", tokenizer_hash="t", metrics={"loss": 1.0})
    (measured,) = evaluation.measure(ledger)
    assert (measured.version, measured.metrics["validate_return"]) == (lease.version, 0.5)
    assert evaluation.measure(ledger) == []
    ledger.close()
