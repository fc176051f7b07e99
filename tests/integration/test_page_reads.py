"""Reads of the page over a real store, without a browser: numbers and filters of rollouts, versions over branches, the last hour."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from page import training
from page.overview import OverviewReader
from page.reading import PageStore
from page.rollouts.filters import RolloutFilter, RolloutOrder
from page.rollouts.listing import BINS, export, numbers_of, page_of
from page.training import StepOrder, comparison, step_rows, training_view, version_view
from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def run() -> str:
    return f"reads-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def page_store(store: StoreSettings) -> PageStore:
    return PageStore(store)


def insert(store: StoreSettings, table: str, rows: Sequence[dict[str, Any]]) -> None:
    with connect(store) as client:
        for row in rows:
            client.insert(f"spangrad_internal.{table}", [list(row.values())], column_names=list(row))


def build(run: str, rollout: str, rewards: dict[str, float], **columns: Any) -> dict[str, Any]:
    """A build of a rollout; rewards by role."""
    totals = {
        "RewardTotals.Name": ["reward"] * len(rewards),
        "RewardTotals.Role": list(rewards),
        "RewardTotals.Value": list(rewards.values()),
    }
    return {"RunId": run, "RolloutId": rollout, "BuildSpec": "s", "IngestedAt": LONG_AGO, **totals, **columns}


@pytest.mark.parametrize("width", [1.0, 0.1, 1 / 3])
def test_histogram_bar_counts_the_rollouts_of_its_address(store: StoreSettings, page_store: PageStore, run: str, width: float) -> None:
    insert(store, "builds", [build(run, f"r{number}", {"": number * width}) for number in range(BINS + 1)])
    bars = numbers_of(page_store, RolloutFilter(run=run))["Histogram"]
    listed = [RolloutFilter(run=run, reward_from=bar["from"], reward_to=bar["to"]) for bar in bars]
    assert [numbers_of(page_store, chosen)["Count"] for chosen in listed] == [bar["count"] for bar in bars]
    assert (len(bars), sum(bar["count"] for bar in bars)) == (BINS, BINS + 1)


def test_histogram_bounds_are_those_of_newest_revisions(store: StoreSettings, page_store: PageStore, run: str) -> None:
    insert(store, "builds", [build(run, "a", {"": 100.0}), build(run, "a", {"": 1.0}, Revision=1), build(run, "b", {"": 0.0})])
    numbers = numbers_of(page_store, RolloutFilter(run=run))
    assert (numbers["Count"], numbers["Least"], numbers["Largest"]) == (2, 0.0, 1.0)
    assert [bar["count"] for bar in numbers["Histogram"]] == [1, *[0] * (BINS - 2), 1]


def test_return_filter_leaves_out_rollouts_without_a_return(store: StoreSettings, page_store: PageStore, run: str) -> None:
    rewards = {"low": {"": 0.25}, "high": {"": 1.0}, "duel": {"black": -1.0, "white": 1.0}, "none": {"": math.nan}}
    insert(store, "builds", [build(run, rollout, totals) for rollout, totals in rewards.items()])
    bounds = {"low": RolloutFilter(run=run, reward_to=0.5), "high low": RolloutFilter(run=run, reward_from=-1e301)}
    for expected, chosen in ((names.split(), chosen) for names, chosen in bounds.items()):
        assert sorted(row["RolloutId"] for row in page_of(page_store, chosen, RolloutOrder())["rows"]) == expected
        assert numbers_of(page_store, chosen)["Count"] == len(expected)


def test_version_view_names_branches_of_versions_that_sampled_and_trained(store: StoreSettings, page_store: PageStore, run: str) -> None:
    """Versions 0 to 3 of main; branch fork begins with 2 and makes 4 of what 1, 2 and an unknown one sampled."""
    lines = [
        ("main", 0, None, ""),
        *(("main", number, number - 1, "main") for number in (1, 2, 3)),
        ("fork", 2, 2, "main"),
        ("fork", 4, 2, "fork"),
    ]
    names = ("Branch", "Version", "Parent", "ParentBranch")
    insert(store, "policy_versions", [{"Policy": run, "Status": "committed", **dict(zip(names, line, strict=True))} for line in lines])
    trained = [("main", 3, "a", [2]), ("fork", 4, "b", [2, 1]), ("fork", 4, "c", [9])]
    names = ("Branch", "Version", "CallId", "SampledVersions")
    insert(store, "trained_calls", [{"Policy": run, "RolloutId": run, **dict(zip(names, call, strict=True))} for call in trained])

    fork, base, begin = (
        version_view(page_store, run, branch, version) or {} for branch, version in (("fork", 4), ("main", 2), ("fork", 2))
    )

    sampled = [(row["Sampled"], row["Branch"], row["Calls"]) for row in fork["sampledBy"]]
    assert sampled == [(9, "", 1), (2, "main", 1), (1, "main", 1)]
    for view in (base, begin):
        assert [(row["Version"], row["Branch"], row["Calls"]) for row in view["samples"]] == [(3, "main", 1), (4, "fork", 1)]


def test_version_view_of_many_branches_has_the_nearest_versions(store: StoreSettings, page_store: PageStore, run: str) -> None:
    branches = [f"b{number:02}" for number in range(30)]
    versions = [(branch, version) for branch in branches for version in range(17)]
    with connect(store) as client:
        rows = [[run, branch, version, "committed"] for branch, version in versions]
        client.insert("spangrad_internal.policy_versions", rows, column_names=["Policy", "Branch", "Version", "Status"])
    near = [(row["Branch"], row["Version"]) for row in (version_view(page_store, run, "b29", 8) or {})["near"]]
    assert set(near) >= {(branch, version) for branch in branches for version in range(6, 11)}
    assert near == sorted(near, key=lambda row: row[::-1])


def test_held_out_returns_of_many_runs_of_a_branch_are_all_there(store: StoreSettings, page_store: PageStore, run: str) -> None:
    """A job of every night trains in a run of its own."""
    nights = [(f"{run}-{number}", number) for number in range(40)]
    rows = [{"Policy": run, "Branch": "main", "RunId": night, "Version": number, "Status": "committed"} for night, number in nights]
    insert(store, "policy_versions", rows)
    held_out = {"Mode": "validate", "TaskId": "rome"}
    insert(store, "builds", [build(night, f"r{number}", {"": 1.0}, **held_out, PolicyVersions=[number]) for night, number in nights])
    insert(store, "builds", [build(f"{run}-other", "r", {"": 0.0}, **held_out, PolicyVersions=[7])])
    returns = training_view(page_store, run, "main")["heldOut"]
    assert [(row["Version"], row["Return"], row["Rollouts"]) for row in returns] == [(number, 1.0, 1) for _, number in nights]
    assert len(comparison(page_store, run, 3, 39)["tasks"]) == 1
    assert training_view(page_store, run, "other")["heldOut"] == []


def test_comparison_of_more_tasks_than_it_lists_counts_all(
    store: StoreSettings, page_store: PageStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(store, "policy_versions", [{"Policy": run, "Branch": "main", "RunId": run, "Version": 2, "Status": "committed"}])
    played = [(task, version) for task in range(5) for version in (1, 2)]
    columns = [{"Mode": "validate", "TaskId": f"t{task}", "PolicyVersions": [version]} for task, version in played]
    builds = [
        build(run, f"{task}-{version}", {"": float(task * version)}, **of) for (task, version), of in zip(played, columns, strict=True)
    ]
    insert(store, "builds", builds)
    monkeypatch.setattr(training, "TASKS_MOST", 2)
    view = comparison(page_store, run, 1, 2)
    assert ([row["task"] for row in view["tasks"]], view["both"], view["better"], view["worse"]) == (["t4", "t3"], 5, 4, 0)


def test_step_rows_sort_puts_steps_without_the_metric_last(store: StoreSettings, page_store: PageStore, run: str) -> None:
    metrics = ({"loss": -1.0}, {"loss": -2.0}, {"other": 1.0}, {"loss": math.nan}, {"loss": 3.0})
    steps = [{"Policy": run, "Branch": "main", "Version": number, "BatchId": "b", "Metrics": of} for number, of in enumerate(metrics, 1)]
    insert(store, "policy_versions", [{**step, "Status": "committed"} for step in steps])
    for shown in ("loss", "other"):  # the order is that of the metric, whether it is shown or not
        rows = step_rows(page_store, run, "main", [shown], StepOrder("loss"))["rows"]
        assert [row["Version"] for row in rows] == [5, 1, 2, 4, 3]


def test_overview_rollout_of_two_revisions_counts_once_as_its_newest(store: StoreSettings, page_store: PageStore, run: str) -> None:
    now = datetime.now(UTC)
    first, newest = build(run, "a", {"": 0.0}, IngestedAt=now), build(run, "a", {"": 1.0}, Revision=1, Drops=2, IngestedAt=now)
    insert(store, "builds", [first, newest, build(run, "old", {"": 5.0})])
    rollouts = OverviewReader(page_store, Settings(store=store)).read()["rollouts"]
    assert (rollouts["Built"], rollouts["Succeeded"], rollouts["Mean"], rollouts["Drops"]) == (1, 1, 1.0, 2)


def test_export_return_that_is_no_number_is_null_in_json(store: StoreSettings, page_store: PageStore, run: str) -> None:
    insert(store, "builds", [build(run, "a", {"": math.inf})])
    (line,) = b"".join(export(page_store, RolloutFilter(run=run), RolloutOrder(), "jsonl")).splitlines()
    assert msgspec.json.decode(line)["Return"] is None
