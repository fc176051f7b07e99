"""Roles of rewards: which roles a trainer counts, and returns in which the rewards of several players cancel.

Invariant: pure functions of whole columns; a reward without a role is shared by all roles, and always counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from trainer.credit.assignment import GROUP, KEY
from trainer.credit.earned import LISTS, only_rewards

_FEWEST = 4
"""Fewest rollouts with differing roles from which equal returns mean that the roles cancel."""
_EQUAL = 1e-9


def counts(role: str, roles: Sequence[str]) -> bool:
    """Return whether a reward of this role counts for a trainer of these roles (`trainer.credit.reward_roles`; empty: all)."""
    return not roles or role == "" or role in roles


def count_roles(transitions: pl.DataFrame, roles: Sequence[str]) -> pl.DataFrame:
    """Return the transitions with only those rewards that a trainer of these roles counts (`counts`)."""
    if not roles:
        return transitions
    names = [name for name in transitions.columns if name.startswith(LISTS)]
    entries = transitions.select(*names, Row=pl.int_range(pl.len())).explode(names, empty_as_null=False, keep_nulls=False)
    counted = entries.filter(pl.Series([counts(role, roles) for role in entries["Rewards.Role"]], dtype=pl.Boolean))
    return only_rewards(transitions, counted, names)


def count_own_roles(transitions: pl.DataFrame, policy: str) -> pl.DataFrame:
    """Return the transitions with each agent's own rewards, of its role or of none, on its calls; other policies' calls have none.

    A reward of a role that stands on another agent's call, as a rollout's own reward may, moves to the last call of the role's agent; one
    of no role is each agent's, and of the agents that did not earn it, the whole rollout's. Those of roles without an agent are left out.
    """
    names = [name for name in transitions.columns if name.startswith(LISTS)]
    rows = transitions.select(*KEY, "AgentName", "Turn", "Policy", Row=pl.int_range(pl.len()))
    last = rows.sort("Turn", "Row").group_by(*KEY, "AgentName", maintain_order=True).agg(pl.col("Row", "Turn").last())
    entries = transitions.select(*KEY, *names, At=rows["Row"]).explode(names, empty_as_null=False, keep_nulls=False)
    of_agents = entries.join(last, on=list(KEY), maintain_order="left_right").join(
        rows.select(At="Row", By="AgentName"), on="At", maintain_order="left"
    )
    role, own, unearned = pl.col("Rewards.Role"), pl.col("AgentName") == pl.col("By"), pl.col("Rewards.CallId") == ""
    shared = (role == "") & ~own
    counted = of_agents.filter((role == "") | (role == pl.col("AgentName"))).with_columns(
        pl.when(own).then("At").otherwise("Row").alias("Row"),
        pl.when(own | (~unearned & ~shared)).then("Rewards.Turn").otherwise("Turn").alias("Rewards.Turn"),
        pl.when(shared).then(pl.lit("")).otherwise("Rewards.CallId").alias("Rewards.CallId"),
    )
    trained = rows.filter(pl.col("Policy") == policy).select("Row")
    return only_rewards(transitions, counted.join(trained, on="Row", how="semi", maintain_order="left"), names)


def role_metrics(transitions: pl.DataFrame, weights: Mapping[str, float]) -> dict[str, float]:
    """Return `roles_cancel`: 1 where the returns of every group agree though what its roles earned differs, else 0.

    Nothing where fewer than two roles have rewards, or fewer than four rollouts differ in what a role earned. Transitions are whole groups,
    with the rewards that the trainer counts; `weights` are the factors of rewards by name, 1 for a name that is not listed.
    """
    roles = _named(transitions)
    if len(roles) < 2:
        return {}
    entries = _entries(transitions, weights)
    parts = [pl.col("Value").filter(pl.col("Role") == role).sum().alias(f"of {role}") for role in roles]
    earned = entries.group_by(*KEY).agg(pl.col("Value").sum().alias("Return"), *parts)
    rollouts = transitions.select(*KEY).unique(maintain_order=True).join(earned, on=KEY, how="left").fill_null(0.0)
    groups = rollouts.group_by(*GROUP).agg(
        pl.len(),
        (pl.col("Return").max() - pl.col("Return").min()).alias("spread"),
        pl.max_horizontal(pl.col(f"of {role}").max() - pl.col(f"of {role}").min() for role in roles).alias("differ"),
    )
    differing = groups.filter(pl.col("differ") > _EQUAL)
    if differing["len"].sum() < _FEWEST:
        return {}
    return {"roles_cancel": float((differing["spread"] <= _EQUAL).all())}


def cancelling_roles(transitions: pl.DataFrame, weights: Mapping[str, float]) -> str:
    """Return a warning where the rewards of several roles cancel in every return (`role_metrics`); empty where they do not."""
    if not role_metrics(transitions, weights).get("roles_cancel"):
        return ""
    roles = _named(transitions)
    names = ", ".join(roles)
    return (
        f"the returns of each group are equal, though the roles {names} earned different rewards: their sum is constant, as in a zero-sum "
        f"game, and teaches nothing. Let each policy count its own with trainer.credit.reward_roles, such as ['{roles[0]}'] "
        "(docs/concepts/credit.md)."
    )


def missing_roles(transitions: pl.DataFrame, roles: Sequence[str]) -> str:
    """Return a warning where rewards name roles, and none that the trainer counts; empty where that is not so."""
    known = _named(transitions) if roles else []
    if not known or set(roles) & set(known):
        return ""
    return (
        f"no reward is of the roles in trainer.credit.reward_roles ({', '.join(roles)}): those of the batch are of {', '.join(known)}. "
        "Name the policy's own as the evaluator does."
    )


def _named(transitions: pl.DataFrame) -> list[str]:
    """Return the roles that rewards name, in alphabetical order."""
    return sorted(set(transitions["Rewards.Role"].explode(empty_as_null=False)) - {""})


def _entries(transitions: pl.DataFrame, weights: Mapping[str, float]) -> pl.DataFrame:
    """Return a row a reward: KEY, Role and Value (weighted)."""
    rewards = transitions.select(*KEY, Name="Rewards.Name", Value="Rewards.Value", Role="Rewards.Role")
    entries = rewards.explode("Name", "Value", "Role", empty_as_null=False)
    weight = pl.col("Name").replace_strict(dict(weights), default=1.0, return_dtype=pl.Float64) if weights else pl.lit(1.0)
    return entries.select(*KEY, "Role", Value=pl.col("Value").cast(pl.Float64) * weight)
