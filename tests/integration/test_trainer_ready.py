"""Looks of a source at a real store: history once, then what has arrived."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spangrad.settings import Settings, StoreSettings
from tests.support.built_rollouts import BuiltRollouts
from tests.support.policies import changed, trainer_settings
from tests.support.trainers import SPEC
from trainer.data import built_groups
from trainer.data.source import Group, GroupReader


@pytest.fixture
def settings(store: StoreSettings, tiny_model: Path, tmp_path: Path) -> Settings:
    run = uuid.uuid4().hex[:8]
    return Settings(store=store, trainer=trainer_settings(run_id=run, branch=run, model=tiny_model, directory=tmp_path, publish=False))


@pytest.fixture
def world(settings: Settings, tiny_model: Path) -> BuiltRollouts:
    return BuiltRollouts(settings, tiny_model)


def names(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def with_trainer(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"trainer": changed(settings.trainer, changes)})


def test_ready_lists_groups_in_order_of_completion(settings: Settings, world: BuiltRollouts) -> None:
    source = GroupReader(world.client, settings)
    assert source.ready() == []
    world.group("b", [1.0], size=2)
    assert source.ready() == []
    world.group("c", [1.0, 0.0])
    assert names(source.ready()) == ["c"]
    world.group("b", [None, 0.0], size=2)
    world.group("a", [1.0, 0.0])
    ready = source.ready()
    assert names(ready) == names(GroupReader(world.client, settings).ready()) == ["c", "b", "a"]
    assert source.ready() is ready, "nothing has changed"


def test_ready_after_release_omits_groups_until_changed_or_rescan(settings: Settings, world: BuiltRollouts) -> None:
    source = GroupReader(world.client, settings)
    for name in "abc":
        world.group(name, [1.0, 0.0])
    source.release(source.ready()[:2])
    assert names(source.ready()) == ["c"]
    world.group("a", [0.5], size=2, Revision=1)
    assert names(source.ready()) == ["a", "c"], "whoever released it is asked again"
    source.rescan()
    assert names(source.ready()) == ["a", "b", "c"]


def test_ready_after_revision_that_moves_rollout_or_changes_size_counts_again(settings: Settings, world: BuiltRollouts) -> None:
    source = GroupReader(world.client, settings)
    world.group("a", [1.0, 0.0])
    world.group("b", [1.0], size=2)
    assert names(source.ready()) == ["a"]
    world.group("b", [0.0], size=2, RolloutId="a-1", Revision=1)
    assert names(source.ready()) == names(GroupReader(world.client, settings).ready()) == ["b"]
    world.group("b", [0.0], size=3, RolloutId="a-1", Revision=2)
    assert source.ready() == GroupReader(world.client, settings).ready() == []


def test_ready_forgets_stalled_groups_until_another_rollout_arrives(
    settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GroupReader(world.client, settings)
    source.ready()
    for name in ("cancelled", "slow"):
        world.group(name, [1.0], size=2)
    world.group("whole", [1.0, 0.0])
    assert names(source.ready()) == ["whole"]
    members = source._built._members
    assert {group for _, group in members} >= {"cancelled", "slow"}

    monkeypatch.setattr(built_groups, "_SECONDS_BETWEEN_SWEEPS", 0.0)
    monkeypatch.setattr(built_groups, "_STALLED", 0)
    source._built._next_sweep = 0.0
    assert names(source.ready()) == ["whole"]
    assert {group for _, group in members}.isdisjoint({"cancelled", "slow"})

    world.group("slow", [None, 0.0], size=2)
    assert names(source.ready()) == ["whole", "slow"]


def test_ready_waits_for_the_greedy_rollout_of_remax(settings: Settings, world: BuiltRollouts) -> None:
    source = GroupReader(world.client, with_trainer(settings, estimator="remax"))
    for name, size in (("g", 1), ("h", 0)):
        world.group(name, [1.0, 0.25])
        assert source.ready() == []
        world.group(name, [0.5], Mode="greedy", GroupSize=size, RolloutId=f"{name}-greedy", temperature=1.0, Temperature=0.0)
        assert source.ready() == [Group(settings.trainer.run_id, "train", SPEC, name)]
        source.release(source.ready())
    assert not source._built._members, "nothing is kept of what is trained"


def test_ready_with_as_of_omits_later_groups(settings: Settings, world: BuiltRollouts) -> None:
    world.group("early", [1.0, 0.0])
    then = GroupReader(world.client, with_trainer(settings, as_of=datetime.now(UTC) + timedelta(milliseconds=1)))
    assert names(then.ready()) == ["early"]
    world.group("late", [1.0, 0.0])
    assert names(then.ready()) == ["early"]


@pytest.mark.parametrize("sweeps", [False, True])
def test_ready_finds_rows_visible_long_after_their_date(
    settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch, sweeps: bool
) -> None:
    """Usual looks read 10 s again, and one now and then 120 s."""
    clock = built_groups.time.monotonic
    source = GroupReader(world.client, settings)
    assert source.ready() == []
    dated = datetime.now(UTC) - timedelta(seconds=60 if sweeps else 5)
    insert = world.insert
    monkeypatch.setattr(world, "insert", lambda table, rows: insert(table, [{**row, "IngestedAt": dated} for row in rows]))
    world.group("a", [1.0, 0.0])
    if sweeps:
        assert source.ready() == []
        monkeypatch.setattr(built_groups.time, "monotonic", lambda: clock() + 31)
    assert names(source.ready()) == ["a"]


def test_ready_without_arrivals_reads_no_history(settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GroupReader(world.client, settings)
    for name in "abc":
        world.group(name, [1.0, 0.0])
    source.ready()
    source.ready()
    asked: list[str] = []
    query: Callable[..., object] = world.client.query
    monkeypatch.setattr(world.client, "query", lambda text, **options: asked.append(text) or query(text, **options))
    assert names(source.ready()) == [*"abc"]
    assert len(asked) == 1
    assert "b.IngestedAt >=" in asked[0]


def test_ready_of_group_whose_rollouts_all_arrived_is_known_by_one_statement(
    settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GroupReader(world.client, settings)
    assert source.ready() == []
    world.group("a", [1.0], size=2)
    assert source.ready() == []
    asked: list[str] = []
    query: Callable[..., object] = world.client.query
    world.group("a", [0.0], size=2, RolloutId="a-later")
    world.group("b", [1.0, 0.0])
    monkeypatch.setattr(world.client, "query", lambda text, **options: asked.append(text) or query(text, **options))
    assert names(source.ready()) == names(GroupReader(world.client, settings).ready()) == ["a", "b"]
    assert len([text for text in asked if "b.IngestedAt >=" in text]) == 1 + 1, "the second reader reads all of history"
    assert len(asked) == 1 + 3


def test_ready_and_load_after_any_builds_are_those_of_new_reader(settings: Settings, world: BuiltRollouts) -> None:
    source, chance, revisions = GroupReader(world.client, settings), random.Random(4), dict[str, int]()
    world.group("old", [1.0], size=2)
    source.ready()
    whole, moved = 0, 0
    for _ in range(20):
        for _ in range(chance.choice([1, 1, 2, 4])):
            rollout, group = f"r{chance.randrange(12)}", chance.choice(["old", *"abcd"])
            moved += rollout in revisions
            size = chance.choice([2, 2, 2, 3, 0])
            world.group(group, [chance.random()], GroupSize=size, RolloutId=rollout, Revision=revisions.get(rollout, 0))
            revisions[rollout] = revisions.get(rollout, 0) + 1
        new = GroupReader(world.client, settings)
        ready = source.ready()
        assert ready == new.ready()
        known, read = source.load(ready), new.load(ready)
        assert known.rollouts == read.rollouts
        assert known.transitions.equals(read.transitions)
        assert known.incomplete == read.incomplete
        whole += len(ready)
    assert min(whole, moved) > 4, "some groups were whole, and some rollouts built anew"


def test_load_of_groups_that_arrived_reads_their_transitions_alone(
    settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GroupReader(world.client, settings)
    source.ready()
    world.group("a", [1.0], size=2)
    source.ready()
    world.group("a", [0.0], size=2, RolloutId="a-1")
    ready = source.ready()
    asked: list[str] = []
    query: Callable[..., object] = world.client.query_arrow
    monkeypatch.setattr(world.client, "query_arrow", lambda text, **options: asked.append(text) or query(text, **options))
    assert [rollout.rollout_id for rollout in source.load(ready).rollouts] == ["a-0", "a-1"]
    assert len(asked) == 1
    assert "spangrad_internal.transitions" in asked[0]
    assert "spangrad_internal.builds" not in asked[0]


def test_ready_asks_store_for_builds_only_when_lately_arrived_or_to_sweep(
    settings: Settings, world: BuiltRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lately = False
    source = GroupReader(world.client, settings, arrived=lambda seconds: lately)
    assert source.ready() == []
    world.group("a", [1.0, 0.0])
    assert source.ready() == []
    lately = True
    assert names(source.ready()) == ["a"]
    lately = False
    world.group("b", [1.0, 0.0])
    assert names(source.ready()) == ["a"]
    clock = built_groups.time.monotonic
    monkeypatch.setattr(built_groups.time, "monotonic", lambda: clock() + 31)
    assert names(source.ready()) == ["a", "b"]
