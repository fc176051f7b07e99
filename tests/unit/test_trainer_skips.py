"""Skipped groups and masked calls: the conditions of each reason, and the settings that it depends on."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policies import changed, trainer_settings, transition_row
from trainer.data.assemble import assemble, batch_groups, with_token_values
from trainer.data.batch import TokenValues
from trainer.data.group_checks import find_skips, same_ids
from trainer.data.masks import masks
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.ledger.skips import DEPENDENCES, FAILURES, MASKS, Skip, SkipReason, bases

GROUP = Group("run", "train", "spec", "group")
OTHER = Group("run", "train", "spec", "other")
SCHEMA = {"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String), "Logprobs": pl.List(pl.Float64)}
SETTINGS = trainer_settings(run_id="run", max_tokens_per_device=5)


def loaded(rows: list[dict[str, object]]) -> Loaded:
    frame = pl.DataFrame(rows, schema_overrides=SCHEMA)
    names = dict.fromkeys((str(row["GroupId"]), str(row["RolloutId"])) for row in rows)
    return Loaded([BatchRollout(Group("run", "train", "spec", group), rollout, 0, 0) for group, rollout in names], frame)


def skips(rows: list[dict[str, object]], *groups: Group, lineage: tuple[int, ...] = (0,), **changes: Any) -> dict[Group, Skip]:
    chosen = changed(SETTINGS, changes)
    of = loaded(rows or [transition_row("elsewhere", GroupId="elsewhere")])
    return find_skips(groups or (GROUP,), of, chosen, lineage=lineage, tokenizer_hash="tokenizer")


def reasons(rows: list[dict[str, object]], **changes: Any) -> dict[Group, SkipReason]:
    return {group: skip.reason for group, skip in skips(rows, **changes).items()}


PAIR = [transition_row("a", rewards=(1.0,)), transition_row("b", rewards=(0.0,))]


def pair(**changes: object) -> list[dict[str, object]]:
    return [transition_row(name, **changes) for name in "ab"]


def test_find_skips_of_two_rollouts_of_the_newest_version_finds_none() -> None:
    assert reasons(PAIR) == {}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], SkipReason.NO_TRANSITIONS),
        ([transition_row("a"), transition_row("a", 1)], SkipReason.ONE_ROLLOUT),
        (pair(Version=9), SkipReason.UNKNOWN_VERSION),
        (pair(TokenizerHash="another"), SkipReason.OTHER_TOKENIZER),
        (pair(Temperature=0.0), SkipReason.GREEDY),
        (pair(PromptIds=[1, 2, 3, 4]), SkipReason.TOO_LONG),
        ([*PAIR, transition_row("c", PromptIds=[])], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", ResponseIds=[], Logprobs=[])], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", Logprobs=[-0.5])], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", **{"Versions.Start": [1]})], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", **{"Versions.Start": [0, 5], "Versions.Version": [0, 0]})], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", **{"Versions.Start": [0, 0], "Versions.Version": [0, 0]})], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", **{"Versions.Start": [0, 1], "Versions.Version": [0]})], SkipReason.CONTRADICTORY),
        ([*PAIR, transition_row("c", Logprobs=[-0.5, float("nan")])], SkipReason.NOT_FINITE),
        ([*PAIR, transition_row("c", Logprobs=[-0.5, float("-inf")])], SkipReason.NOT_FINITE),
        ([*PAIR, transition_row("c", rewards=(float("nan"),))], SkipReason.NOT_FINITE),
        # What another policy was paid is part of the rollout's return.
        ([*PAIR, transition_row("b", 1, rewards=(float("inf"),), Policy="judge")], SkipReason.NOT_FINITE),
    ],
)  # fmt: skip
def test_find_skips_gives_the_reason_of_a_group_that_cannot_be_trained(rows: list[dict[str, object]], reason: SkipReason) -> None:
    assert reasons(rows) == {GROUP: reason}


@pytest.mark.parametrize("versions", [{"Versions.Start": [0], "Versions.Version": [2**63]}, {"Version": 2**64 - 1}], ids=str)
def test_find_skips_of_version_beyond_63_bits_is_unknown_version(versions: dict[str, object]) -> None:
    """A span may name any version, and the store keeps 64 bits without a sign."""
    rows = [{**row, "Versions.Start": [], "Versions.Version": [], **versions} for row in PAIR]
    types = {**SCHEMA, "Version": pl.UInt64(), "Versions.Start": pl.List(pl.UInt32), "Versions.Version": pl.List(pl.UInt64)}
    of = Loaded(loaded(PAIR).rollouts, pl.DataFrame(rows, schema_overrides=types))
    skipped = find_skips([GROUP], of, SETTINGS, lineage=(0,), tokenizer_hash="tokenizer")
    assert {group: skip.reason for group, skip in skipped.items()} == {GROUP: SkipReason.UNKNOWN_VERSION}


def test_find_skips_of_versions_in_order_is_none() -> None:
    assert reasons([*PAIR, transition_row("c", **{"Versions.Start": [0, 1], "Versions.Version": [0, 0]})]) == {}
    assert reasons([*PAIR, transition_row("c", **{"Versions.Start": [], "Versions.Version": []})]) == {}


@pytest.mark.parametrize("name", ["PromptIds", "ResponseIds"])
def test_find_skips_of_token_beyond_the_vocabulary_is_contradictory(name: str) -> None:
    rows = [*PAIR, transition_row("c", **{name: [1, 50]})]
    own = {"lineage": (0,), "tokenizer_hash": "tokenizer"}
    detail = "transition transition-c-0 has token id 50, and the policy's vocabulary has 50 tokens."
    assert find_skips([GROUP], loaded(rows), SETTINGS, vocabulary=50, **own) == {GROUP: Skip(SkipReason.CONTRADICTORY, detail)}  # type: ignore[arg-type]
    for vocabulary in (51, None):
        assert find_skips([GROUP], loaded(rows), SETTINGS, vocabulary=vocabulary, **own) == {}  # type: ignore[arg-type]


def test_find_skips_names_contradictory_row_and_non_finite_value() -> None:
    rows = [*PAIR, transition_row("c", Logprobs=[-0.5]), *(transition_row(name, GroupId="other") for name in "de")]
    rows += [transition_row("f", GroupId="other", rewards=(float("nan"),))]
    assert skips(rows, GROUP, OTHER) == {
        GROUP: Skip(SkipReason.CONTRADICTORY, "transition transition-c-0 has 2 response tokens and 1 logprobs."),
        OTHER: Skip(SkipReason.NOT_FINITE, "transition transition-f-0 has a reward of nan."),
    }


def test_find_skips_of_bad_group_leaves_other_groups_alone() -> None:
    """A reward that is no number reaches no other group's comparison."""
    bad = [transition_row(name, GroupId="other", rewards=(reward,)) for name, reward in (("c", float("nan")), ("d", 1.0))]
    assert reasons([*PAIR, *bad], skip_equal_groups=True) == {}


ODD = (
    {"Temperature": 0.0},
    {"Version": 2},
    {"Version": 9},
    {"TokenizerHash": "another"},
    {"PromptIds": [1] * 99},
    {"Versions.Start": [0, 1], "Versions.Version": [5, 2]},
)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_find_skips_of_one_odd_call_among_many_skips_nothing(odd: dict[str, object]) -> None:
    """The fault of a call is the call's: 63 others are trained, and the reward of the odd one counts."""
    rows = [
        transition_row(f"r{r}", t, rewards=(float(r % 2),) if t == 7 else (), **{"Version": 5, **(odd if (r, t) == (3, 7) else {})})  # type: ignore[arg-type]
        for r in range(8)
        for t in range(8)
    ]
    lineage, chosen = (0, 1, 2, 3, 4, 5), changed(SETTINGS, {"max_staleness": 2})
    assert find_skips([GROUP], loaded(rows), chosen, lineage=lineage, tokenizer_hash="tokenizer") == {}
    own = {"lineage": lineage, "tokenizer_hash": "tokenizer"}
    batch, facts, calls = assemble(loaded(rows), chosen, lambda units: units.values - units.values.mean(), divisor=1, **own)  # type: ignore[arg-type]
    assert (batch.real_rows, facts["mean_return"]) == (63, 0.5)
    assert calls.height == 63
    kept = with_token_values(calls, batch.response_mask, TokenValues(batch.advantages, batch.logprobs, batch.logprobs)).filter(
        pl.col("RolloutId") == "r3"
    )
    assert kept["Advantage"].unique().to_list() == [0.5], "what the step used is what is kept"
    masked = {name: value for name, value in facts.items() if name.startswith("masked_") and value}
    (reason,) = set(masks(loaded(rows).transitions, chosen, **own).drop_nulls())  # type: ignore[arg-type]
    assert masked == {f"masked_{reason}": 1.0}
    # Rollout 3 won by the masked call alone: its other calls are reinforced for it.
    assert {float(value) for row, value in zip(batch.rollout, batch.advantages[:, 0], strict=True) if row == 3} == {0.5}


def test_assemble_staleness_is_that_of_trained_tokens() -> None:
    """A call three versions behind is masked; of the trained ones, one has a token that is two versions behind."""
    facts: list[dict[str, object]] = [{}, {"Version": 2}, {"Versions.Start": [0, 1], "Versions.Version": [5, 3]}, {}]
    rows = [transition_row(f"r{r}", t, rewards=(float(r),), **{"Version": 5, **facts[2 * r + t]}) for r in range(2) for t in range(2)]  # type: ignore[arg-type]
    chosen = changed(SETTINGS, {"max_staleness": 2})
    batch, metrics, calls = assemble(loaded(rows), chosen, lambda units: units.values, lineage=(0, 1, 2, 3, 4, 5), divisor=1)
    assert (calls.height, metrics["masked_stale"], metrics["staleness_max"]) == (3, 1.0, 2.0)
    assert metrics["staleness_mean"] == pytest.approx(2.0 / batch.response_mask.sum())


def test_assemble_of_masked_last_call_credits_the_call_before_it_by_final_only() -> None:
    rows = [*pair(), transition_row("a", 1, rewards=(1.0,)), transition_row("b", 1, PromptIds=[1] * 99)]
    chosen = changed(SETTINGS, {"credit__scheme": "final_only"})
    batch, _, calls = assemble(loaded(rows), chosen, lambda units: units.values - units.values.mean(), lineage=(0,), divisor=1)  # type: ignore[arg-type]
    credited = dict(zip(calls.select("RolloutId", "Turn").rows(), batch.advantages[:, 0].tolist(), strict=True))
    assert credited == {("a", 0): 0.0, ("a", 1): 0.5, ("b", 0): -0.5}


def test_masks_of_call_use_its_oldest_token() -> None:
    rows = [
        transition_row("a", Version=4, **{"Versions.Start": [0, 1], "Versions.Version": [4, 6]}),
        transition_row("b", Version=6, **{"Versions.Start": [0, 1], "Versions.Version": [6, 5]}),
        transition_row("c", Version=6, **{"Versions.Start": [], "Versions.Version": []}),
    ]
    lineage = (0, 4, 6)
    for bound, expected in ((0, ["stale", "unknown_version", None]), (1, [None, "unknown_version", None])):
        chosen = changed(SETTINGS, {"max_staleness": bound})
        assert masks(loaded(rows).transitions, chosen, lineage=lineage).to_list() == expected


@given(st.lists(st.sampled_from([{}, *ODD]), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_masks_of_call_are_independent_of_other_calls(odds: list[dict[str, object]], random: Any) -> None:
    rows = [transition_row(f"r{place}", **{"Version": 5, **odd}) for place, odd in enumerate(odds)]  # type: ignore[arg-type]
    random.shuffle(rows)
    chosen = changed(SETTINGS, {"max_staleness": 2})
    own = {"settings": chosen, "lineage": (0, 1, 2, 3, 4, 5), "tokenizer_hash": "tokenizer"}
    together = masks(loaded(rows).transitions, **own).to_list()
    assert together == [masks(loaded([row]).transitions, **own)[0] for row in rows]


def test_find_skips_where_every_call_is_masked_gives_the_most_frequent_reason() -> None:
    rows = [*pair(Temperature=0.0), *(transition_row(name, 1, Version=3) for name in "ab"), transition_row("a", 2, Version=3)]
    (skip,) = skips(rows, lineage=(3, 4)).values()
    assert skip.reason is SkipReason.STALE
    assert skip.detail == (
        "all 5 calls of the policy are masked: 2 unknown_version, 3 stale (trainer.sampling.max_staleness = 0); "
        "the oldest is of version 0, and version 4 is trained."
    )


def test_find_skips_of_call_without_tokenizer_hash_is_none() -> None:
    assert reasons([*PAIR, transition_row("c", TokenizerHash="")]) == {}


def test_find_skips_counts_committed_versions_as_staleness() -> None:
    old = [transition_row("a", Version=4), transition_row("b", Version=4)]
    # 5 was orphaned: 4 is one version behind 6, not two.
    assert reasons(old, lineage=(0, 4, 6), max_staleness=0) == {GROUP: SkipReason.STALE}
    assert reasons(old, lineage=(0, 4, 6), max_staleness=1) == {}
    assert reasons(old, lineage=(0, 4, 6, 7), max_staleness=1) == {GROUP: SkipReason.STALE}
    assert reasons(old, lineage=(0, 4, 6, 7), max_staleness=9) == {}


def test_find_skips_of_single_rollout_is_none_for_batch_estimators() -> None:
    assert reasons([transition_row("a")], estimator="reinforce_plus_plus") == {}


def test_find_skips_skip_equal_groups_ignores_masked_calls() -> None:
    equal = [transition_row(name, GroupId="other", rewards=(1.0,)) for name in "cd"]
    assert skips([*PAIR, *equal], GROUP, OTHER, skip_equal_groups=True) == {OTHER: Skip(SkipReason.EQUAL)}
    assert skips([*PAIR, *equal], GROUP, OTHER) == {}
    # By turn: the calls that differ are greedy, and those that are trained do not differ.
    turns = [transition_row(name, turn, Temperature=float(turn)) for name in "ab" for turn in (0, 1)]
    turns[0] = transition_row("a", rewards=(1.0,), Temperature=0.0)
    assert reasons(turns, skip_equal_groups=True, credit__scheme="own", baseline="turn") == {GROUP: SkipReason.EQUAL}


def test_same_ids_keeps_the_first_group_of_each_rollout_id() -> None:
    rollouts = [BatchRollout(GROUP, "same", 0, 0), BatchRollout(OTHER, "same", 0, 0), BatchRollout(OTHER, "b", 0, 0)]
    detail = "rollout 'same' is one of group {!r}, too, which came first."
    assert same_ids(rollouts, [GROUP, OTHER]) == {OTHER: Skip(SkipReason.ALREADY_TRAINED, detail.format("group"))}
    assert same_ids(rollouts, [OTHER, GROUP]) == {GROUP: Skip(SkipReason.ALREADY_TRAINED, detail.format("other"))}
    again = BatchRollout(GROUP, "same", 1, 0)
    assert same_ids([rollouts[0], again, rollouts[2]], [GROUP, OTHER]) == {}, "another attempt of it is another one"


def test_batch_groups_are_numbered_as_the_rows_of_the_batch() -> None:
    rows = [
        transition_row(f"{name}{i}", GroupId=name, **odd)
        for name, odd in (("z", {}), ("a", ODD[0]), ("m", {}), ("b", {}))
        for i in range(2)
    ]  # type: ignore[arg-type]
    batch, _, calls = assemble(loaded(rows), SETTINGS, lambda units: units.values, lineage=(0,), divisor=4)
    groups = batch_groups(calls)
    assert [groups[number].group_id if number >= 0 else None for number in batch.group] == ["b", "b", "m", "m", "z", "z", None, None]


def test_skip_reasons_have_dependences_and_remedies() -> None:
    assert set(DEPENDENCES) == set(SkipReason)
    assert all(reason.remedy.endswith((".", ").")) for reason in SkipReason)
    named = {name for dependence in DEPENDENCES.values() for name in dependence.settings}
    assert SETTINGS.values_of(named).keys() == named
    assert not set(MASKS) & set(FAILURES)


def test_basis_changes_with_settings_of_its_reason_only() -> None:
    before = bases(SETTINGS)
    after = bases(changed(SETTINGS, {"max_staleness": 3, "learning_rate": 1.0}))
    differing = {reason for reason in SkipReason if before[reason] != after[reason]}
    assert differing == {*MASKS, SkipReason.NO_BASELINE, SkipReason.EQUAL}
    assert bases(SETTINGS)[SkipReason.CONTRADICTORY] == "{}"
    weighed = bases(changed(SETTINGS, {"step_weight": 0.0}))
    assert {reason for reason in SkipReason if before[reason] != weighed[reason]} == {SkipReason.EQUAL}, "values of steps count by it"
