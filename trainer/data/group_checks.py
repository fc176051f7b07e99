"""Checks of ready groups before they are trained: which are skipped, and why.

Invariant: pure functions; what each reason depends on stands in `trainer.ledger.skips`.

A fault of a call is the call's: it is masked (`trainer.data.masks`), its reward counts in the return and in the baseline, and the group is
skipped only where no call of it is left to train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import polars as pl

from spangrad.settings import TrainerSettings
from trainer.credit.assignment import GROUP, live_groups, with_greedy
from trainer.credit.learning import ESTIMATORS
from trainer.data.masks import masks
from trainer.data.source import GROUP_COLUMNS, AttemptKey, BatchRollout, Group, Loaded
from trainer.data.token_versions import versions_of_calls
from trainer.ledger.skips import MASKS, Skip, SkipReason

_IDS = ("PromptIds", "ResponseIds", "Logprobs")
PhaseSkips = Callable[[Sequence[Group], Loaded], Mapping[Group, Skip]]
"""Function that returns those of some groups, all loaded, that versions of other phases played."""
Claimed = Callable[[Sequence[BatchRollout]], Mapping[Group, str]]
"""Function that returns the groups of which a rollout is in a batch of the branch, with a sentence about each."""


def find_skips(
    groups: Sequence[Group],
    loaded: Loaded,
    settings: TrainerSettings,
    *,
    lineage: Sequence[int],
    tokenizer_hash: str,
    vocabulary: int | None = None,
    of_phases: PhaseSkips = lambda _groups, _loaded: {},
    claimed: Claimed = lambda _: {},
) -> dict[Group, Skip]:
    """Find the groups that the settings' trainer does not train now; of several reasons the first in the order of `SkipReason` is given.

    A group that versions of other phases played, or that is trained already, is given that reason where it has no other.

    Args:
        groups: ready groups, all of them loaded.
        loaded: their rollouts and transitions; newest revisions only.
        settings: policy, selection, bounds of calls, credit and estimator.
        lineage: the committed versions that led to the one about to be trained, which is last.
        tokenizer_hash: the policy's.
        vocabulary: number of tokens that the policy knows. None: it is not known.
        of_phases: returns the groups that versions of other phases played.
        claimed: returns the groups of which a rollout is trained already.
    """
    own = loaded.own(settings.policy, settings.selection)
    masked = masks(loaded.transitions, settings, lineage=lineage, tokenizer_hash=tokenizer_hash)
    skips = {group: Skip(SkipReason.CANCELLED) for group in groups if group.group_id in loaded.cancelled}
    trained = own & masked.is_null()
    skips = _not_finite(loaded, trained) | _contradictions(loaded.transitions.filter(trained), vocabulary) | skips
    alone = ESTIMATORS[settings.credit.estimator].scope in {"all", "greedy"}
    for group, facts in _facts(groups, loaded.transitions.filter(own), masked.filter(own)):
        if group not in skips and (skip := _of_calls(facts, settings, lineage, alone=alone)):
            skips[group] = skip
    valid = [group for group in groups if group not in skips]
    compared = _with_baseline(loaded, settings, lineage, valid)
    skips |= {group: Skip(SkipReason.NO_BASELINE) for group in valid if group not in compared}
    if settings.sampling.skip_equal_groups:
        live = _live(loaded, own, trained, settings, [group for group in valid if group in compared])
        skips |= {group: Skip(SkipReason.EQUAL) for group in compared if group not in live}
    skips = {group: skips[group] for group in groups if group in skips}
    skips |= {group: skip for group, skip in of_phases(groups, loaded).items() if group not in skips}
    return skips | already_trained(claimed([rollout for rollout in loaded.rollouts if rollout.group not in skips]))


def already_trained(claimed: Mapping[Group, str]) -> dict[Group, Skip]:
    """Return the skips of groups of which a rollout is in a batch of the branch, with a sentence about each."""
    return {group: Skip(SkipReason.ALREADY_TRAINED, detail) for group, detail in claimed.items()}


def same_ids(rollouts: Sequence[BatchRollout], groups: Sequence[Group]) -> dict[Group, Skip]:
    """Find the groups that hold a rollout's id which an earlier one of `groups` holds as well: one batch trains it once."""
    holders, skips = dict[AttemptKey, Group](), dict[Group, Skip]()
    order_of = {group: number for number, group in enumerate(groups)}
    for rollout in sorted(rollouts, key=lambda rollout: order_of[rollout.group]):
        holder = holders.setdefault(rollout.key, rollout.group)
        if holder != rollout.group and holder not in skips:
            detail = f"rollout {rollout.rollout_id!r} is one of group {holder.group_id!r}, too, which came first."
            skips[rollout.group] = Skip(SkipReason.ALREADY_TRAINED, detail)
    return skips


def _contradictions(trained: pl.DataFrame, vocabulary: int | None) -> dict[Group, Skip]:
    """Return the groups with a call whose columns contradict each other; the first such call is named."""
    prompt, response, logprobs = (pl.col(name).list.len().fill_null(0) for name in _IDS)
    starts = pl.col("Versions.Start")
    ordered = (
        (starts.list.first() == 0)
        & (starts.list.last() < response)
        & (starts.list.eval(pl.element().diff().drop_nulls().min() > 0).list.first().fill_null(value=True))
        & (starts.list.len() == pl.col("Versions.Version").list.len())
    )
    largest = pl.max_horizontal(pl.col(name).list.max() for name in ("PromptIds", "ResponseIds"))
    facts = trained.select(
        *GROUP_COLUMNS,
        "TransitionId",
        Prompt=prompt,
        Response=response,
        Logprobs=logprobs,
        Versions=ordered,
        Unknown=None if vocabulary is None else pl.when(largest >= vocabulary).then(largest),
        Vocabulary=vocabulary,
    )
    inconsistent = facts.filter(
        (pl.min_horizontal("Prompt", "Response") == 0)
        | (pl.col("Response") != pl.col("Logprobs"))
        | ~pl.col("Versions")
        | pl.col("Unknown").is_not_null()
    )
    if inconsistent.is_empty():
        return {}
    return {
        Group(*(row[name] for name in GROUP_COLUMNS)): Skip(SkipReason.CONTRADICTORY, _contradiction(row))
        for row in inconsistent.unique(GROUP_COLUMNS, keep="first", maintain_order=True).iter_rows(named=True)
    }


def _contradiction(row: dict[str, object]) -> str:
    name, prompt, response, logprobs = (row[key] for key in ("TransitionId", "Prompt", "Response", "Logprobs"))
    if not prompt or not response:
        return f"transition {name} has {prompt} prompt and {response} response tokens; both are needed."
    if response != logprobs:
        return f"transition {name} has {response} response tokens and {logprobs} logprobs."
    if row["Unknown"] is not None:
        return f"transition {name} has token id {row['Unknown']}, and the policy's vocabulary has {row['Vocabulary']} tokens."
    return f"transition {name} names versions that begin at no tokens of its response, or at none in order."


def _not_finite(loaded: Loaded, trained: pl.Series) -> dict[Group, Skip]:
    """Return the groups with a trained logprob, or a reward of any call, that is not finite; the first one is named."""
    skips = dict[Group, Skip]()
    for kind, column, rows in (
        ("reward", "Rewards.Value", loaded.transitions),
        ("logprob", "Logprobs", loaded.transitions.filter(trained)),
    ):
        if rows[column].explode().is_finite().all():
            continue
        values = rows.select(*GROUP_COLUMNS, "TransitionId", Value=pl.col(column)).explode("Value").filter(~pl.col("Value").is_finite())
        for row in values.unique(GROUP_COLUMNS, keep="first", maintain_order=True).iter_rows(named=True):
            detail = f"transition {row['TransitionId']} has a {kind} of {row['Value']}."
            skips[Group(*(row[name] for name in GROUP_COLUMNS))] = Skip(SkipReason.NOT_FINITE, detail)
    return skips


def _facts(groups: Sequence[Group], calls: pl.DataFrame, masked: pl.Series) -> Iterator[tuple[Group, dict[str, int]]]:
    """Yield for each group its numbers of rollouts with calls of the policy, of such calls, and of masked calls by reason."""
    counts = (
        calls.select(*GROUP_COLUMNS, "RolloutId", Version=versions_of_calls().list.min())
        .with_columns(masked)
        .group_by(*GROUP_COLUMNS)
        .agg(
            pl.col("RolloutId").n_unique().alias("rollouts"),
            pl.len().alias("calls"),
            pl.col("Version").min().alias("oldest"),
            *((pl.col("Masked") == reason.value).sum().alias(reason.value) for reason in MASKS),
        )
    )
    known = {Group(*(row[name] for name in GROUP_COLUMNS)): row for row in counts.iter_rows(named=True)}
    for group in groups:
        yield group, known.get(group, {})


def _of_calls(facts: dict[str, int], settings: TrainerSettings, lineage: Sequence[int], *, alone: bool) -> Skip | None:
    """Return the skip of a group that has no calls of the policy, calls of one rollout only, or only masked calls. None: it is sound."""
    if not facts:
        return Skip(SkipReason.NO_TRANSITIONS)
    if facts["rollouts"] < 2 and not alone:
        return Skip(SkipReason.ONE_ROLLOUT)
    masked = {reason: facts[reason.value] for reason in MASKS if facts[reason.value]}
    if sum(masked.values()) < facts["calls"]:
        return None
    most = max(masked, key=lambda reason: masked[reason])  # of several the first, in the order of reasons
    by_agent = f", agent_staleness = {settings.sampling.agent_staleness}" if settings.sampling.agent_staleness else ""
    bounds = {
        SkipReason.STALE: f" (trainer.sampling.max_staleness = {settings.sampling.max_staleness}{by_agent})",
        SkipReason.TOO_LONG: f" (trainer.max_tokens_per_device = {settings.max_tokens_per_device})",
    }
    counts = ", ".join(f"{count} {reason.value}" for reason, count in masked.items())
    sampled = f"; the oldest is of version {facts['oldest']}, and version {lineage[-1]} is trained" if lineage else ""
    return Skip(most, f"all {facts['calls']} calls of the policy are masked: {counts}{bounds.get(most, '')}{sampled}.")


def _with_baseline(loaded: Loaded, settings: TrainerSettings, lineage: Sequence[int], groups: Sequence[Group]) -> list[Group]:
    """Return the groups that have a baseline: where the estimator needs greedy rollouts, those with a sound one."""
    if loaded.greedy is None:
        return list(groups)
    fresh = lineage[-1 - settings.sampling.max_staleness :]
    older = versions_of_calls().list.set_difference(pl.lit(list(fresh), pl.List(pl.UInt64)))
    valid = (pl.col("Temperature") <= 0) & (older.list.len() == 0)
    greedy = loaded.greedy.filter(pl.col("Policy") == settings.policy).group_by("RunId", "GroupId").agg(valid.all().alias("Sound"))
    names = set(greedy.filter("Sound").select("RunId", "GroupId").rows())
    return [group for group in groups if (group.run_id, group.group_id) in names]


def _live(loaded: Loaded, own: pl.Series, trained: pl.Series, settings: TrainerSettings, groups: Sequence[Group]) -> set[Group]:
    """Return the groups with something to learn from: a trained call whose value differs from the values that it is compared with."""
    if not groups:
        return set()
    names = pl.DataFrame([(group.run_id, group.mode, group.group_id) for group in groups], schema=list(GROUP), orient="row")
    transitions = loaded.transitions
    if loaded.greedy is not None:
        transitions = with_greedy(transitions, loaded.greedy, settings.credit.reward_weights)
    rows = transitions.with_columns(own.alias("_Own"), trained.alias("_Trained")).join(names, on=GROUP, how="semi", maintain_order="left")
    live = live_groups(rows.drop("_Own", "_Trained"), rows["_Own"], settings.credit, rows["_Trained"])
    keys = set(live.rows())
    return {group for group in groups if (group.run_id, group.mode, group.group_id) in keys}
