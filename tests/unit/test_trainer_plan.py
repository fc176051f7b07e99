"""Plans of training: the statement on every group, and the summary in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from tests.support.policies import trainer_settings, transition_row
from tests.support.trainers import SPEC, FakeSource, committed, group, settings, wired, write_base
from trainer import loop
from trainer.data.plan import GroupOutcome, LedgerHistory, TrainPlan, planned
from trainer.data.planning import history_of, make_plan
from trainer.data.source import Group, GroupState, Loaded
from trainer.ledger.recovery import open_ledger, prepare
from trainer.ledger.skips import Skip, SkipReason

SETTINGS = trainer_settings(groups_per_batch=2, max_staleness=1)
TOKENIZER = str(transition_row("r")["TokenizerHash"])
FRESH = LedgerHistory((0,), TOKENIZER, frozenset(), frozenset(), {})


def states(*names: str, built: int = 2, size: int = 2, mode: str = "train") -> list[GroupState]:
    return [GroupState(Group("run", mode, SPEC, name), built, size) for name in names]


def plan(of: Sequence[GroupState], past: LedgerHistory = FRESH, chosen: TrainerSettings = SETTINGS, **facts: object) -> TrainPlan:
    source = FakeSource([state.group.group_id for state in of])
    group_plans = planned(of, source.load, past, chosen)
    fixed = {"policy": "policy", "branch": "main", "run_id": "run", "build_spec": "spec", "version": past.lineage[-1]}
    return TrainPlan(**{**fixed, "groups_per_batch": 2, "in_flight": 4, "groups": group_plans, "unbuilt": 0, "elsewhere": (), **facts})  # type: ignore[arg-type]


def outcomes(reported: TrainPlan) -> dict[str, tuple[str, int | None, str | None]]:
    return {row.group_id: (row.outcome.value, row.batch, row.reason) for row in reported.groups}


def test_planned_later_batches_age_with_earlier_versions():
    """All were sampled by version 0; the third batch would train version 2, which is one too far."""
    reported = plan(states("a", "b", "c", "d", "e", "f", "g"))
    stale = ("skipped", None, SkipReason.STALE)
    first, second = ("batch", 1, None), ("batch", 2, None)
    assert outcomes(reported) == {"a": first, "b": first, "c": second, "d": second, "e": stale, "f": stale, "g": stale}
    assert reported.batches == 2
    assert reported.summary == "2 batches of 2 groups would be trained: 3 groups are skipped (3 stale)."
    assert reported.demand == "4 more groups are needed: 4 are to be in flight, 0 are there; 3 groups are skipped (3 stale)."


def test_planned_groups_of_oldest_versions_come_first(tmp_path: Path):
    """The loop itself takes them so: in the order of readiness, the second one would be too stale."""
    base = settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=1, groups_per_batch=1)
    first = wired(base, FakeSource(["begun"]))
    first.run(follow=False)
    ledger = first.ledger
    source = FakeSource(["new", "old"], changes={"new": {"Version": 1}})
    trainer = wired(base, source)
    group_plans = planned(states("new", "old"), source.load, history_of(base, ledger, SPEC), base.trainer)
    assert [(group_plan.group_id, group_plan.batch) for group_plan in group_plans] == [("old", 1), ("new", 2)]
    trainer.run(follow=False)
    batches = {version: {name.split("-")[0] for name in rollouts} for version, rollouts in committed(trainer).items() if rollouts}
    assert batches == {1: {"begun"}, 2: {"old"}, 3: {"new"}}


def test_planned_every_reason_not_to_train_is_reported():
    of = [
        *states("left"), *states("whole", built=1, size=4), *states("", built=5, size=0, mode="train"), *states("held", mode="validate"),
        *states("old"), *states("gone"), *states("busy"),
    ]  # fmt: skip
    busy = ("train", "busy")
    past = LedgerHistory((0, 1), TOKENIZER, frozenset({("train", "old"), busy}), frozenset({busy}), {group("gone"): SkipReason.GREEDY})
    reported = plan(of, past, unbuilt=1)
    assert outcomes(reported) == {
        "left": ("left", None, None), "gone": ("skipped", None, SkipReason.GREEDY), "whole": ("waiting", None, None),
        "": ("no_group", None, None), "held": ("other_mode", None, None), "busy": ("under_way", None, None), "old": ("trained", None, None),
    }  # fmt: skip
    assert reported.summary == (
        "there is nothing to train: 1 group is ready and a batch takes 2 (trainer.sampling.groups_per_batch); 1 group waits for 3 "
        "rollouts to be "
        "built; 1 rollout ended and not built (`spangrad build`); 1 group is skipped (1 greedy); 5 rollouts without a group "
        "(docs/guides/training.md); 1 group is of mode validate; 1 group is in a running step; 1 group trained before."
    )
    assert reported.missing_groups == 1
    assert reported.demand == "1 more group is needed: 4 are to be in flight, 3 are there; 1 group is skipped (1 greedy)."
    assert plan(of, past, in_flight=3).demand == ""


def test_past_of_branch_of_branch_begins_at_parent_version(tmp_path: Path):
    """Calls that the old branch sampled are as stale here as there; unknown weights have the policy's next number."""
    base = write_base(tmp_path / "base")
    old = wired(settings(base, tmp_path / "policies"), FakeSource(["a", "b", "c", "d"]))
    old.run(follow=False)
    for begun, lineage in ((1, [0, 1]), (2, [0, 1, 2])):
        files = Path(old.ledger.version(begun).policy_version.path)
        fork = settings(files, tmp_path / "policies", branch=f"fork-{begun}")
        ledger = open_ledger(fork)
        planned_from = history_of(fork, ledger, SPEC)
        prepare(ledger, fork)
        assert list(planned_from.lineage) == ledger.lineage() == lineage
        assert planned_from.tokenizer_hash == loop.newest_version(ledger).tokenizer_hash
        ledger.close()
    other = write_base(tmp_path / "other")
    save_file({"weight": np.ones(1, np.float32) * 7}, other / "model.safetensors")
    fork = settings(other, tmp_path / "policies", branch="new")
    ledger = open_ledger(fork)
    assert history_of(fork, ledger, SPEC).lineage == (3,)
    assert history_of(fork, None, SPEC).lineage == (0,)


def test_planned_rollout_id_of_an_earlier_batch_is_trained_once(tmp_path: Path):
    """Against the loop itself: a batch takes no rollout that one before it has trained."""

    class SameIds(FakeSource):
        def load(self, groups: Sequence[Group]) -> Loaded:
            loaded = super().load(groups)
            return replace(loaded, rollouts=[replace(row, rollout_id=row.rollout_id.replace("d-", "a-")) for row in loaded.rollouts])

    chosen, source = settings(write_base(tmp_path / "base"), tmp_path / "policies"), SameIds([*"abcde"])
    trainer = wired(chosen, source)
    past = replace(FRESH, tokenizer_hash=loop.newest_version(trainer.ledger).tokenizer_hash)
    group_plans = planned(states(*"abcde"), source.load, past, chosen.trainer)
    trainer.run(follow=False)
    assert trainer.ledger.skips.reasons() == {group("d"): SkipReason.ALREADY_TRAINED}
    batches = {"a": 1, "b": 1, "c": 2, "e": 2, "d": None}
    assert {row.group_id: (row.batch, row.reason) for row in group_plans} == {
        name: (batch, None if batch else SkipReason.ALREADY_TRAINED) for name, batch in batches.items()
    }


def test_history_of_skip_in_another_run_leaves_trained_group_trained(tmp_path: Path):
    """Runs may name their groups alike."""
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies")
    trainer = wired(chosen, FakeSource(["a", "b"]))
    trainer.run(follow=False)
    outdated = Skip(SkipReason.STALE)
    trainer.ledger.skips.enter({Group("another run", "train", SPEC, "a"): outdated, Group("run", "train", "other", "b"): outdated}, 77)
    history = history_of(chosen, trainer.ledger, SPEC)
    assert (history.finished, history.skipped) == ({("train", "a"), ("train", "b")}, {})


@pytest.mark.parametrize("refused", [{"credit__scheme": "own"}, {"phase_policies": ("other",)}])
def test_make_plan_with_settings_that_a_run_refuses_raises(tmp_path: Path, refused: dict[str, object]):
    with pytest.raises(SettingsError):
        make_plan(settings(write_base(tmp_path / "base"), tmp_path / "policies", **refused))


def test_planned_empty_store_names_other_runs():
    assert plan([]).summary == "there is nothing to train: nothing is built of run 'run' by specification spec."
    summary = plan([], elsewhere=("3 rollouts of run 'default'",)).summary
    assert (
        summary
        == "there is nothing to train: nothing is built of run 'run' by specification spec; the store has 3 rollouts of run 'default'."
    )


@pytest.mark.parametrize(("staleness", "skip"), [(0, False), (1, True), (9, True), (9, False)])
def test_planned_batches_equal_those_of_run(tmp_path: Path, staleness: int, skip: bool):
    """Against the loop itself: the same groups in the same batches, and the same skipped for the same reasons."""
    names = [f"g{i}" for i in range(7)]
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=staleness, skip_equal_groups=skip)
    source = FakeSource(names, changes={"g1": {"Temperature": 0.0}, "g2": {"Rewards.Value": [0.5]}})
    trainer = wired(chosen, source)
    past = replace(FRESH, tokenizer_hash=loop.newest_version(trainer.ledger).tokenizer_hash)
    group_plans = planned(states(*names), source.load, past, chosen.trainer)
    trainer.run(follow=False)
    batches: dict[int, list[str]] = {}
    for version in trainer.ledger.versions()[1:]:
        batches[version.version] = sorted({row.group.group_id for row in trainer.ledger.batch(version.policy_version.batch_id or "")})
    assert batches == {
        number: sorted(group_plan.group_id for group_plan in group_plans if group_plan.batch == number)
        for number in {group_plan.batch for group_plan in group_plans if group_plan.batch}
    }
    skips = {group(group_plan.group_id): group_plan.reason for group_plan in group_plans if group_plan.outcome is GroupOutcome.SKIPPED}
    assert trainer.ledger.skips.reasons() == skips
