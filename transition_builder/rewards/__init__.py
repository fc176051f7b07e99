"""Rewards of rollouts and calls from every source, each reward once and with its source.

Invariant: a missing or non-finite reward is never read as 0.

`evaluations` reads evaluators' scores and finds the calls that they are of, `sql` queries the store with reward files, `air` applies rules,
`precedence` chooses among sources, and `spread` gives every reward to a kept call.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from spangrad.settings import BuilderSettings
from transition_builder.frames import Frames, concat, conform
from transition_builder.rewards import air, evaluations, precedence
from transition_builder.rewards.precedence import REPORTED
from transition_builder.rewards.rules import columns
from transition_builder.rewards.rules.rule_input import RuleInput
from transition_builder.rewards.spread import SPREAD, spread
from transition_builder.schemas import ATTEMPT, GIVEN

__all__ = ["SPREAD", "Gathered", "gather", "spread"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rewards of some rollouts."""

    rewards: pl.DataFrame
    """GIVEN rows, in order."""
    faults: pl.DataFrame
    """Rollouts that must not be trained because they lack a reward: RunId, RolloutId, fault."""


def gather(
    frames: Frames,
    rows: pl.DataFrame,
    nodes: pl.DataFrame,
    calls: pl.DataFrame,
    caused: pl.DataFrame,
    rollouts: pl.DataFrame,
    spec: BuilderSettings,
) -> Gathered:
    """Gather rewards.

    Args:
        frames: source of SQL_REWARDS, RESPONSES, TOOL_EVENTS and TOOL_LOGS.
        rows: resolved evaluation rows of the attempts of `rollouts`.
        nodes: described, resolved spans, of any attempts.
        calls: placed canonical calls of final attempts, with Order, ParentCallId, Retried and DuplicateOf.
        caused: tools and the calls that caused them (`causes`).
        rollouts: ROLLOUTS of those that may have rewards: complete, and not failed.
        spec: the rules, and the names of SQL rewards.
    """
    by_sql = evaluations.resolve_targets(evaluations.of_sql(frames.sql_rewards, nodes, rollouts), calls, nodes, caused)
    reported = concat([evaluations.events(rows, rollouts), evaluations.scores(nodes, rollouts)], REPORTED)
    sources = [evaluations.resolve_targets(reported, calls, nodes, caused), by_sql.filter(pl.col("Name").is_in(spec.sql_rewards))]
    if spec.rules:
        rewarded = calls.join(rollouts[[*ATTEMPT, "Mode"]], on=ATTEMPT, maintain_order="left")
        rule_input = RuleInput(rewarded, caused, frames.responses, by_sql, nodes, columns.used(spec), frames.tool_events, frames.tool_logs)
        sources.append(air.earned(spec, rule_input))
    chosen = precedence.by_precedence(concat(sources, REPORTED))
    rewards = conform(chosen.filter(pl.col("Value").is_not_null()), GIVEN)
    return Gathered(
        rewards.sort(*ATTEMPT, "CallId", "Name", "Role", "Source", "RuleHash", "TraceId", "SpanId"),
        precedence.faults(rollouts, chosen, by_rules=spec.rewards_from == "rules"),
    )
