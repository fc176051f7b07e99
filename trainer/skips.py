"""Which ready groups may be trained, and why the others never will be.

In: transitions of ready groups, the ledger's committed versions, the trainer's settings. Out: a reason for each group that must be
skipped. Invariant: a pure function of facts that do not get better with time, so that a skipped group stays so: versions only grow,
and a finished group gains no rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import polars as pl

from spangrad.settings import TrainerSettings
from trainer.credit import GROUP, CreditRule, live_groups, with_greedy
from trainer.learning import ESTIMATORS
from trainer.source import GROUP_COLUMNS, Group, Loaded


class SkipReason(StrEnum):
    """Why a ready group is never trained."""

    CANCELLED = "cancelled"
    """A rollout of it was cancelled: it has not ended by itself, and the queue does not count the group."""
    NO_TRANSITIONS = "no_transitions"
    """Every call of this policy in it was dropped, or is not selected."""
    ONE_ROLLOUT = "one_rollout"
    """Only one of its rollouts left transitions, so there is nothing to compare it with."""
    UNKNOWN_VERSION = "unknown_version"
    """A call was sampled by a version that is none of this branch's past."""
    STALE = "stale"
    """A call was sampled by weights too many versions behind (trainer.max_staleness)."""
    OTHER_TOKENIZER = "other_tokenizer"
    """A call was sampled with another tokenizer or chat template than the policy's."""
    GREEDY = "greedy"
    """A call was sampled at temperature 0: its distribution has no logprobs to compare."""
    TOO_LONG = "too_long"
    """Every call of this policy in it is longer than a device takes (trainer.max_tokens_per_device)."""
    NO_BASELINE = "no_baseline"
    """Its greedy rollout, which the estimator compares with, failed, left no transitions, or was not sampled greedily by weights within
    trainer.max_staleness."""
    EQUAL = "equal"
    """No value in it differs from one that it is compared with, and trainer.skip_equal_groups says to leave such groups out."""


def find_skips(
    groups: Sequence[Group], loaded: Loaded, settings: TrainerSettings, *, lineage: Sequence[int], tokenizer_hash: str
) -> dict[Group, SkipReason]:
    """The groups that the settings' trainer never trains, and why: those of which a rollout was cancelled, and see `skip_reasons`."""
    own, transitions = loaded.own(settings.policy, settings.selection), loaded.transitions
    compared: pl.DataFrame | None = None
    if loaded.greedy is not None:
        transitions = with_greedy(transitions, loaded.greedy, settings.reward_weights)
        compared = _compared(loaded.greedy.filter(pl.col("Policy") == settings.policy), lineage[-1 - settings.max_staleness :])
    cancelled = dict.fromkeys((group for group in groups if group.group_id in loaded.cancelled), SkipReason.CANCELLED)
    return cancelled | skip_reasons(
        [group for group in groups if group not in cancelled],
        transitions.filter(own),
        lineage=lineage,
        max_staleness=settings.max_staleness,
        tokenizer_hash=tokenizer_hash,
        max_tokens=settings.max_tokens_per_device,
        alone=ESTIMATORS[settings.estimator].scope in {"all", "greedy"},
        live=live_groups(transitions, own, CreditRule.of(settings)) if settings.skip_equal_groups else None,
        compared=compared,
    )


def skip_reasons(
    groups: Sequence[Group],
    transitions: pl.DataFrame,
    *,
    lineage: Sequence[int],
    max_staleness: int,
    tokenizer_hash: str,
    max_tokens: int,
    alone: bool = False,
    live: pl.DataFrame | None = None,
    compared: pl.DataFrame | None = None,
) -> dict[Group, SkipReason]:
    """Find the groups that must be skipped; the first reason in the order of `SkipReason` that holds is given.

    Args:
        groups: ready groups.
        transitions: those of theirs that would be trained; newest revisions only.
        lineage: the committed versions that led to the one about to be trained, which is last.
        max_staleness: how many committed versions may lie between a call's and the weights that will be trained.
        tokenizer_hash: the policy's.
        max_tokens: the longest call that fits a device.
        alone: whether a rollout without another of its group has something to be compared with.
        live: groups with something to learn from (`credit.live_groups`). None: those without are trained too.
        compared: run and id of the groups whose greedy rollout can be compared with. None: none is needed.
    """
    fresh = lineage[-1 - max_staleness :]
    version, tokenizer = pl.col("Version"), pl.col("TokenizerHash")
    facts = transitions.group_by(*GROUP_COLUMNS).agg(
        rollouts=pl.col("RolloutId").n_unique(),
        unknown_version=~version.is_in(list(lineage)).all(),
        stale=~version.is_in(list(fresh)).all(),
        other_tokenizer=((tokenizer != "") & (tokenizer != tokenizer_hash)).any(),
        greedy=(pl.col("Temperature") <= 0).any(),
        too_long=(~fits(max_tokens)).all(),
    )
    if live is not None:
        marked = live.with_columns(equal=pl.lit(value=False))
        facts = facts.join(marked, on=GROUP, how="left").with_columns(pl.col("equal").fill_null(value=True))
    if compared is not None:
        there = compared.with_columns(no_baseline=pl.lit(value=False))
        facts = facts.join(there, on=compared.columns, how="left").with_columns(pl.col("no_baseline").fill_null(value=True))
    found = {Group(*(row[name] for name in GROUP_COLUMNS)): row for row in facts.iter_rows(named=True)}
    reasons: dict[Group, SkipReason] = {}
    for group in groups:
        row = found.get(group)
        if row is None:
            reasons[group] = SkipReason.NO_TRANSITIONS
        elif row["rollouts"] < 2 and not alone:
            reasons[group] = SkipReason.ONE_ROLLOUT
        else:
            holds = [reason for reason in SkipReason if row.get(reason.value) is True]
            if holds:
                reasons[group] = holds[0]
    return reasons


def _compared(greedy: pl.DataFrame, fresh: Sequence[int]) -> pl.DataFrame:
    """Run and id of the groups whose greedy rollout's calls are all greedy, and of weights that are fresh enough."""
    sound = (pl.col("Temperature") <= 0) & pl.col("Version").is_in(list(fresh))
    return greedy.group_by("RunId", "GroupId").agg(sound.all().alias("sound")).filter("sound").drop("sound")


def fits(max_tokens: int) -> pl.Expr:
    """Whether a call's prompt and response fit a device together."""
    return pl.col("PromptIds").list.len() + pl.col("ResponseIds").list.len() <= max_tokens
