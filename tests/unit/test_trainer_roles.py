"""Rewards of several players: which count, and when they cancel."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.settings import BuilderSettings, TrainerSettings
from tests.support.policies import group_relative, trainer_settings, transition_row
from tests.support.spans import SpanFactory
from trainer.credit.assignment import advantages, returns
from trainer.credit.estimators import estimator
from trainer.credit.roles import cancelling_roles, count_own_roles, count_roles, missing_roles, role_metrics
from trainer.data.assemble import assemble
from trainer.data.masks import masks
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.monitor.batch_metrics import batch_metrics
from transition_builder.build import build

LISTS = {f"Rewards.{name}": pl.List(pl.String) for name in ("Name", "Role", "CallId")}
LISTS |= {"Rewards.Value": pl.List(pl.Float64), "Rewards.Turn": pl.List(pl.Int64)}
Entries = list[tuple[str, str, float]]
"""Name, role and value of rewards."""


def frame(rollouts: list[list[Entries]]) -> pl.DataFrame:
    """Transitions of one group: of each rollout the rewards of each call."""
    rows = list[dict[str, Any]]()
    for number, calls in enumerate(rollouts):
        for turn, entries in enumerate(calls):
            names, roles, values = ([*column] for column in zip(*entries, strict=True)) if entries else ([], [], [])
            lists = {"Rewards.Name": names, "Rewards.Role": roles, "Rewards.Value": values, "Rewards.CallId": [""] * len(entries)}
            lists["Rewards.Turn"] = [turn] * len(entries)
            rows.append(transition_row(f"r{number}", turn, **lists))
    return pl.DataFrame(rows, schema_overrides=LISTS)


def duel(*white: float) -> pl.DataFrame:
    """A zero-sum game: of each rollout what white earned, and black the opposite."""
    return frame([[[], [("reward", "white", value), ("reward", "black", -value)]] for value in white])


ENTRIES = st.lists(
    st.tuples(st.sampled_from(["reward", "style"]), st.sampled_from(["", "white", "black"]), st.integers(-4, 4).map(float)), max_size=4
)


@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=3), min_size=1, max_size=4), st.sets(st.sampled_from(["white", "black", "red"])))
def test_count_roles_keeps_rewards_of_its_roles_and_of_none(rollouts: list[list[Entries]], chosen: set[str]) -> None:
    transitions = frame(rollouts)
    counted = count_roles(transitions, sorted(chosen))
    kept = [[[entry for entry in call if not chosen or entry[1] in {*chosen, ""}] for call in calls] for calls in rollouts]
    columns = ["Rewards.Name", "Rewards.Role", "Rewards.Value"]
    assert [list(zip(*row, strict=True)) for row in counted.select(columns).rows()] == [call for calls in kept for call in calls]
    assert counted.drop(*LISTS).equals(transitions.drop(*LISTS))
    assert counted.columns == transitions.columns


def test_returns_of_zero_sum_game_by_role_are_own() -> None:
    transitions = duel(1.0, -1.0, 1.0, -1.0)
    of = {
        role: returns(count_roles(transitions, roles))["Return"].to_list()
        for role, roles in {"both": (), "white": ("white",), "black": ("black",), "both named": ("white", "black")}.items()
    }
    assert of == {"both": [0.0] * 4, "white": [1.0, -1.0, 1.0, -1.0], "black": [-1.0, 1.0, -1.0, 1.0], "both named": [0.0] * 4}


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        (duel(1.0, -1.0, 1.0, -1.0), 1.0),
        (duel(1.0, -1.0), None),  # too few to tell
        (duel(1.0, 1.0, 1.0, 1.0), None),  # nothing differs
        (frame([[[("reward", "white", value), ("reward", "black", 1.0 - value)]] for value in (0.0, 0.25, 0.5, 1.0)]), 1.0),
        (frame([[[("reward", "white", value), ("reward", "black", -value), ("form", "", value)]] for value in (0.0, 1.0, 0.0, 1.0)]), 0.0),
        (frame([[[("reward", "white", value), ("reward", "black", value)]] for value in (0.0, 1.0, 0.0, 1.0)]), 0.0),  # a team
        (frame([[[("reward", "white", value)]] for value in (0.0, 1.0, 0.0, 1.0)]), None),
        (frame([[[("reward", "", value)]] for value in (0.0, 1.0, 0.0, 1.0)]), None),
    ],
)
def test_role_metrics_report_whether_roles_cancel(rollouts: pl.DataFrame, expected: float | None) -> None:
    assert role_metrics(rollouts, {}).get("roles_cancel") == expected
    warning = cancelling_roles(rollouts, {})
    assert bool(warning) is (expected == 1.0)
    if warning:
        assert "the roles black, white earned different rewards" in warning
        assert "trainer.credit.reward_roles, such as ['black']" in warning


def test_role_metrics_look_at_weighted_returns() -> None:
    named = [[[("won", "white", value), ("lost", "black", -value / 2)]] for value in (0.0, 1.0, 0.0, 1.0)]
    assert role_metrics(frame(named), {})["roles_cancel"] == 0.0
    assert role_metrics(frame(named), {"lost": 2.0})["roles_cancel"] == 1.0


def test_missing_roles_names_roles_without_rewards() -> None:
    transitions = duel(1.0, -1.0)
    assert missing_roles(transitions, ("White",)) == (
        "no reward is of the roles in trainer.credit.reward_roles (White): those of the batch are of black, white. Name the policy's own "
        "as the "
        "evaluator does."
    )
    assert [missing_roles(transitions, ()), missing_roles(transitions, ("white", "red")), missing_roles(frame([[[]]]), ("red",))] == [
        ""
    ] * 3


def games(**policies: str) -> tuple[pl.DataFrame, list[BatchRollout]]:
    """Four games between two agents, as spans: white wins the first three, and what one wins the other loses."""
    spans = SpanFactory()
    for number, white in enumerate((1.0, 1.0, 1.0, -1.0)):
        rollout = f"game-{number}"
        root = spans.root(rollout, calls=4, GroupSize=4)
        for role, value in {"white": white, "black": -white}.items():
            spans.evaluation(root, value, role=role)
        for _ in range(2):
            for role in ("white", "black"):
                agent = spans.span(role, root, rollout=rollout, kind="AGENT")
                spans.call(spans.span("POST", agent, rollout=rollout), rollout=rollout, Policy=policies[role])
    built = build(spans.frames(), BuilderSettings())
    assert (built.transitions.height, built.drops.height) == (16, 0)
    transitions = built.transitions.drop("Rewards.Source").with_columns(pl.col(pl.Categorical).cast(pl.String))
    group = Group("run", "train", str(transitions["BuildSpec"][0]), "g")
    return transitions, [BatchRollout(group, f"game-{number}", 0, 0) for number in range(4)]


WIN, LOSS = 0.5, -1.5
"""(1 - mean) and (-1 - mean) over the sample standard deviation, mean 0.5 and deviation 1."""


def test_reward_roles_give_each_policy_own_return_and_advantage() -> None:
    transitions, batch_rollouts = games(white="white", black="black")
    assert role_metrics(transitions, {}) == {"roles_cancel": 1.0}
    for policy, expected in {"white": [WIN, WIN, WIN, LOSS], "black": [-WIN, -WIN, -WIN, -LOSS]}.items():
        settings = trainer_settings(policy=policy, reward_roles=(policy,), max_staleness=9)
        counted = count_roles(transitions, settings.credit.reward_roles)
        loaded = Loaded(batch_rollouts, counted)
        own = loaded.own(policy, settings.selection)
        values = advantages(counted, own, settings.credit, normalise=group_relative).to_list()
        assert values == pytest.approx([value for value in expected for _ in range(2)], rel=1e-5)
        _, metrics, _ = assemble(loaded, settings, estimator(settings), lineage=[3], divisor=1)
        assert (metrics["mean_return"], metrics["transitions"]) == (-0.5 if policy == "black" else 0.5, 8)
        assert batch_metrics(loaded, settings)["success"] == (0.25 if policy == "black" else 0.75)
    both = Loaded(batch_rollouts, transitions)
    assert set(advantages(transitions, both.own("white", TrainerSettings().selection), normalise=group_relative)) == {0.0}


@pytest.mark.parametrize("black", ["white", "past"])
@pytest.mark.parametrize("scheme", ["identical", "reward_to_go"])
def test_by_role_credits_one_policy_in_each_role_it_plays(black: str, scheme: str) -> None:
    transitions, batch_rollouts = games(white="white", black=black)
    baseline = "rollout" if scheme == "identical" else "turn"
    settings = trainer_settings(policy="white", by_role=True, scheme=scheme, baseline=baseline, max_staleness=9)
    counted = count_own_roles(transitions, "white")
    loaded = Loaded(batch_rollouts, counted)
    own = loaded.own("white", settings.selection)
    values = advantages(counted, own, settings.credit, normalise=group_relative)
    by_agent = {agent: part for (agent,), part in counted.filter(own).with_columns(values).group_by("AgentName", maintain_order=True)}
    expected = {"white": [WIN, WIN, WIN, LOSS], "black": [-WIN, -WIN, -WIN, -LOSS]}
    assert {agent: part["Advantage"].to_list() for agent, part in by_agent.items()} == {
        agent: pytest.approx([value for value in expected[agent] for _ in range(2)], rel=1e-5) for agent in by_agent
    }
    assert set(by_agent) == ({"white", "black"} if black == "white" else {"white"})
    _, metrics, _ = assemble(loaded, settings, estimator(settings), lineage=[3], divisor=1)
    assert metrics["mean_return"] == (0.0 if black == "white" else 0.5)


def test_agent_staleness_masks_older_calls_of_that_agent_alone() -> None:
    cases = [("white", 3), ("white", 1), ("white", 0), ("black", 3), ("black", 2)]
    rows = [transition_row(f"r{number}", AgentName=agent, Version=version) for number, (agent, version) in enumerate(cases)]
    settings = trainer_settings(max_staleness=2, agent_staleness={"black": 0})
    assert masks(pl.DataFrame(rows), settings, lineage=[0, 1, 2, 3]).to_list() == [None, None, "stale", None, "stale"]


@given(st.lists(st.lists(st.tuples(st.sampled_from(["white", "black"]), ENTRIES), min_size=1, max_size=5), min_size=1, max_size=3))
def test_count_own_roles_keeps_each_present_roles_sum(rollouts: list[list[tuple[str, Entries]]]) -> None:
    transitions = frame([[entries for _, entries in calls] for calls in rollouts]).with_columns(
        AgentName=pl.Series([agent for calls in rollouts for agent, _ in calls])
    )
    counted = count_own_roles(transitions, "policy")
    for number, calls in enumerate(rollouts):
        rows = counted.filter(pl.col("RolloutId") == f"r{number}")
        given_entries = [entry for _, entries in calls for entry in entries]
        for agent in {agent for agent, _ in calls}:
            own = rows.filter(pl.col("AgentName") == agent).select("Rewards.Role", "Rewards.Value").explode(pl.all()).drop_nulls()
            assert set(own["Rewards.Role"]) <= {"", agent}
            assert own["Rewards.Value"].sum() == sum(value for _, role, value in given_entries if role in {"", agent})
    assert counted.drop(*LISTS).equals(transitions.drop(*LISTS))
