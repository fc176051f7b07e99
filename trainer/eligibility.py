"""Which ready groups may be trained, and why the others never will be.

In: transitions of ready groups, the ledger's committed versions, the trainer's settings. Out: a reason for each group that must be put
aside. Invariant: a pure function of facts that do not get better with time, so that a group put aside stays so: versions only grow,
and a finished group gains no rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import polars as pl

from trainer.source import GROUP_COLUMNS, Group


class ExpiryReason(StrEnum):
    """Why a ready group is never trained."""

    NO_TRANSITIONS = "no_transitions"
    """Every call of this policy in it was dropped."""
    ONE_ROLLOUT = "one_rollout"
    """Only one of its rollouts left transitions, so there is nothing to compare it with."""
    UNKNOWN_VERSION = "unknown_version"
    """A call was sampled by a version that this branch never committed."""
    STALE = "stale"
    """A call was sampled by weights too many versions behind (trainer.max_staleness)."""
    OTHER_TOKENIZER = "other_tokenizer"
    """A call was sampled with another tokenizer or chat template than the policy's."""
    GREEDY = "greedy"
    """A call was sampled at temperature 0: its distribution has no logprobs to compare."""


def expiry_reasons(
    groups: Sequence[Group], transitions: pl.DataFrame, *, committed: Sequence[int], max_staleness: int, tokenizer_hash: str
) -> dict[Group, ExpiryReason]:
    """Find the groups that must be put aside; the first reason in the order of `ExpiryReason` that holds is given.

    Args:
        groups: ready groups.
        transitions: theirs; newest revisions only.
        committed: the branch's committed versions, oldest first; the last one is about to be trained.
        max_staleness: how many committed versions may lie between a call's and the weights that will be trained.
        tokenizer_hash: the policy's.
    """
    fresh = committed[-1 - max_staleness :]
    version, tokenizer = pl.col("Version"), pl.col("TokenizerHash")
    facts = transitions.group_by(*GROUP_COLUMNS).agg(
        rollouts=pl.col("RolloutId").n_unique(),
        unknown_version=~version.is_in(list(committed)).all(),
        stale=~version.is_in(list(fresh)).all(),
        other_tokenizer=((tokenizer != "") & (tokenizer != tokenizer_hash)).any(),
        greedy=(pl.col("Temperature") <= 0).any(),
    )
    found = {Group(*(row[name] for name in GROUP_COLUMNS)): row for row in facts.iter_rows(named=True)}
    reasons: dict[Group, ExpiryReason] = {}
    for group in groups:
        row = found.get(group)
        if row is None:
            reasons[group] = ExpiryReason.NO_TRANSITIONS
        elif row["rollouts"] < 2:
            reasons[group] = ExpiryReason.ONE_ROLLOUT
        else:
            holds = [reason for reason in ExpiryReason if row.get(reason.value) is True]
            if holds:
                reasons[group] = holds[0]
    return reasons
