"""Batches of sound groups: what a refused step skips, how a batch is refilled, what is looked at again, and when a run stops."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from commands.training.train_skips import restore, skipped
from spangrad.errors import BadRowsError, LedgerError, SettingsError, TrainerError
from spangrad.types import VersionStatus
from tests.support.policies import skip, transition_row
from tests.support.trainers import SPEC, FakeOptimizer, FakeSource, committed, group, settings, wired, write_base
from trainer import loop
from trainer.data import batch_queue
from trainer.data.batch import Batch
from trainer.data.plan import planned
from trainer.data.planning import history_of
from trainer.data.source import BatchRollout, Group, GroupState, Loaded, missing_rows
from trainer.ledger import skipped_groups
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import Skip, SkipReason

BAD = 99
"""First token of the prompts that the optimizer refuses."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@dataclass
class Refusing(FakeOptimizer):
    """Refuses a batch with rows whose prompt begins with BAD, and names them."""

    reason: str = "logprob_gap"

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        rows = np.flatnonzero((batch.prompts[:, 0] == BAD) & (batch.group >= 0)).tolist()
        if rows:
            self.batches.append(batch)
            raise BadRowsError(f"rows {rows} differ by 0.4 nats.", dict.fromkeys(rows, self.reason))
        return super().step(batch, before_update)


@dataclass
class Counted(FakeSource):
    """Tells which groups were loaded, call by call, and withholds rows of some."""

    loads: list[list[str]] = field(default_factory=list)
    hidden: Collection[str] = ()
    ids: dict[str, str] = field(default_factory=dict)
    """Rollouts that have another one's id."""

    def load(self, groups: Sequence[Group]) -> Loaded:
        self.loads.append([one.group_id for one in groups])
        loaded = super().load(groups)
        rollouts = [replace(rollout, rollout_id=self.ids.get(rollout.rollout_id, rollout.rollout_id)) for rollout in loaded.rollouts]
        incomplete = {one: "rollout 'x' has 3 of 4 transitions." for one in groups if one.group_id in self.hidden}
        return Loaded(rollouts, loaded.transitions, incomplete=incomplete)


def bad(*names: str) -> dict[str, dict[str, object]]:
    return {name: {"PromptIds": [BAD, 1, 2]} for name in names}


def statuses(ledger: Ledger) -> list[tuple[int, str | None]]:
    return [(version.version, version.status) for version in ledger.versions()]


def test_take_trains_groups_of_oldest_versions_first(tmp_path: Path, base: Path) -> None:
    source = FakeSource(["a", "b"])
    trainer = wired(settings(base, tmp_path, max_staleness=2), source)
    trainer.run(follow=False)
    versions = {"new1": 1, "old1": 0, "new2": 1, "old2": 0}
    tokenizer = trainer.loaded.tokenizer_hash
    source.names += versions
    source.changes = {name: {"Version": at, "TokenizerHash": tokenizer} for name, at in versions.items()}
    trainer.run(follow=False)
    batches = {version: sorted({rollout.split("-")[0] for rollout in rollouts}) for version, rollouts in committed(trainer).items()}
    assert batches == {0: [], 1: ["a", "b"], 2: ["old1", "old2"], 3: ["new1", "new2"]}


def test_step_that_names_rows_skips_their_groups_and_refills_the_batch(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    source = Counted(["bad", "b", "c", "d", "e"], changes=bad("bad"))
    trainer = wired(settings(base, tmp_path), source, Refusing())
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 2: ["b-0", "b-1", "c-0", "c-1"], 3: ["d-0", "d-1", "e-0", "e-1"]}
    assert trainer.ledger.skips.reasons() == {group("bad"): SkipReason.LOGPROB_GAP}
    assert statuses(trainer.ledger)[1] == (1, VersionStatus.ORPHANED), "its number is burnt, once"
    assert sorted(chain.from_iterable(source.loads)) == ["b", "bad", "c", "d", "e"], (
        "each once: what was loaded of the sound groups was kept"
    )
    assert "1 groups are skipped (logprob_gap): bad. bad: rows [2, 3] differ by 0.4 nats." in caplog.text
    newest = loop.newest_version(trainer.ledger)
    assert (newest.metrics["groups_failed"], newest.metrics["groups_skipped"]) == (1.0, 1.0)
    assert (Path(newest.policy_version.path) / "optimizer/weight").read_text() == "2.0"


def test_step_refused_with_too_few_groups_left_waits_for_more(tmp_path: Path, base: Path):
    source = Counted(["bad", "b"], changes=bad("bad"))
    trainer = wired(settings(base, tmp_path), source, Refusing())
    trainer.run(follow=False)
    assert (committed(trainer), trainer.ledger.holder()) == ({0: []}, None), "the lease is undone"
    source.names.append("c")
    source.changes["c"] = {"TokenizerHash": source.changes["b"]["TokenizerHash"]}
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 2: ["b-0", "b-1", "c-0", "c-1"]}


@pytest.mark.parametrize("refilled", [True, False])
def test_batch_refilled_after_skip_equals_that_of_fresh_start(tmp_path: Path, base: Path, refilled: bool):
    """Rows, their order and all that is computed of them: a crash between a skip and the step that follows changes nothing."""
    optimizer = Refusing()
    trainer = wired(settings(base, tmp_path), Counted(["z", "bad", "a"], changes=bad("bad")), optimizer)
    if not refilled:
        skip(trainer.ledger, [group("bad")], SkipReason.LOGPROB_GAP)
    trainer.run(follow=False)
    (batch,) = [batch for batch in optimizer.batches if BAD not in batch.prompts]
    ids = [row.rollout_id for row in trainer.ledger.batch(trainer.ledger.versions()[-1].policy_version.batch_id or "")]
    assert ids == ["a-0", "a-1", "z-0", "z-1"]
    assert (batch.group.tolist(), batch.advantages[:, 0].tolist()) == ([0, 0, 1, 1], [1.0, -1.0, 1.0, -1.0])


@pytest.mark.parametrize("named", [True, False])
def test_step_that_fails_without_bad_row_skips_whole_batch(tmp_path: Path, base: Path, named: bool):
    """A gradient is not finite, and no row is to blame more than the others."""

    class Exploding(FakeOptimizer):
        def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
            if (batch.prompts == BAD).any():
                raise BadRowsError("the gradient's norm is nan.", dict.fromkeys(range(batch.real_rows), "not_finite") if named else {})
            return super().step(batch, before_update)

    trainer = wired(settings(base, tmp_path), Counted([*"abcd"], changes=bad("b")), Exploding())
    trainer.run(follow=False)
    assert trainer.ledger.skips.reasons() == {group("a"): SkipReason.NOT_FINITE, group("b"): SkipReason.NOT_FINITE}
    assert committed(trainer) == {0: [], 2: ["c-0", "c-1", "d-0", "d-1"]}
    assert [version.status for version in trainer.mirror.written if version.version == 1] == [VersionStatus.ORPHANED]  # type: ignore[attr-defined]


class Adapted(FakeOptimizer):
    def load_adapters(self, directory: Path) -> None:
        assert directory.name == "base"


@pytest.mark.parametrize("of_adapter", [False, True])
def test_group_with_token_beyond_the_vocabulary_is_skipped_and_planned_so(tmp_path: Path, base: Path, of_adapter: bool):
    """A model has no row for it: the step would fail with no word on which group is at fault."""
    model = base
    if of_adapter:
        model = write_base(tmp_path / "whole")
        (base / "model.safetensors").rename(base / "adapter_model.safetensors")
        (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model), "r": 4, "lora_alpha": 8}))
    (model / "config.json").write_text(json.dumps({"vocab_size": BAD}))
    chosen, source = settings(base, tmp_path), FakeSource([*"abcde"], changes=bad("b"))
    trainer = wired(chosen, source, Adapted())
    states = [GroupState(group(name), 2, 2) for name in source.names]
    plans = planned(states, source.load, history_of(chosen, trainer.ledger, SPEC), chosen.trainer)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "c-0", "c-1"], 2: ["d-0", "d-1", "e-0", "e-1"]}
    assert trainer.ledger.skips.reasons() == {group("b"): SkipReason.CONTRADICTORY}
    assert {row.group_id: (row.batch, row.reason) for row in plans} == {
        **dict.fromkeys("ac", (1, None)), **dict.fromkeys("de", (2, None)), "b": (None, SkipReason.CONTRADICTORY)
    }  # fmt: skip


def test_batch_refills_load_each_group_once(tmp_path: Path, base: Path):
    equal: dict[str, object] = {"Rewards.Value": [1.0]}
    source = Counted([*"abcde"], changes={"a": equal, "c": equal, "d": equal})
    trainer = wired(settings(base, tmp_path, skip_equal_groups=True), source)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["b-0", "b-1", "e-0", "e-1"]}
    assert sorted(chain.from_iterable(source.loads)) == [*"abcde"]


def test_rollout_id_in_two_groups_is_trained_once_and_other_group_skipped(tmp_path: Path, base: Path):
    source = Counted([*"abcde"], ids={"a-0": "same", "b-0": "same", "e-1": "same"})
    trainer = wired(settings(base, tmp_path, groups_per_batch=2), source)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-1", "same", "c-0", "c-1"]}
    source.names.append("f")
    source.changes["f"] = source.changes["d"]
    trainer.run(follow=False)
    assert list(committed(trainer).values())[2:] == [["d-0", "d-1", "f-0", "f-1"]]
    details = {row.group.group_id: (row.reason, row.detail) for row in trainer.ledger.skips.read()}
    assert details == {
        "b": (SkipReason.ALREADY_TRAINED, "rollout 'same' is one of group 'a', too, which came first."),
        "e": (SkipReason.ALREADY_TRAINED, "version 1 was trained on its rollout 'same', as one of group 'a'."),
    }


def test_lease_refused_by_ledger_skips_groups_it_names(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    """Another trainer of the branch may have been faster."""
    source = Counted([*"abcd"], ids={"c-0": "a-0"})
    trainer = wired(settings(base, tmp_path), source)
    monkeypatch.setattr(trainer.ledger, "claimed", lambda rollouts, pending: {})
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "b-0", "b-1"]}
    assert trainer.ledger.skips.reasons() == {group("c"): SkipReason.ALREADY_TRAINED}


def test_group_with_missing_rows_waits_until_they_arrive(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.data.batch_queue._SOON_SECONDS", 0.0)
    source = Counted([*"abc"], hidden=["a"])
    trainer = wired(settings(base, tmp_path), source)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["b-0", "b-1", "c-0", "c-1"]}
    assert loop.newest_version(trainer.ledger).metrics["groups_incomplete"] == 1.0
    source.names.append("d")
    source.changes["d"] = source.changes["c"]
    trainer.run(follow=False)
    assert (len(committed(trainer)), trainer.ledger.skips.reasons()) == (2, {}), "it is neither trained nor skipped"
    source.hidden = ()
    trainer.run(follow=False)
    assert committed(trainer)[2] == ["a-0", "a-1", "d-0", "d-1"]
    assert caplog.text.count("group a is not ready yet: rollout 'x' has 3 of 4 transitions. It is looked at again.") == 1


def test_missing_rows_compares_transitions_and_rewards_with_built_counts():
    rows = [
        transition_row(rollout, turn, rewards=(1.0,) if turn == 3 else (), Content=1, GroupId=f"g-{rollout}")
        for rollout in ("whole", "short", "unpaid", "absent")
        for turn in range(4)
    ]
    frame = pl.DataFrame(rows, schema_overrides={"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)})
    builds = frame.unique(["RolloutId"], maintain_order=True).with_columns(Transitions=pl.lit(4), Rewards=pl.lit(1))
    turn, rollout = pl.col("Turn"), pl.col("RolloutId")
    lost = ((rollout == "short") & (turn == 0)) | (rollout == "absent")
    unpaid = pl.when((rollout == "unpaid") & (turn == 3)).then(pl.lit([], pl.List(pl.Float64))).otherwise("Rewards.Value")
    shown = frame.filter(~lost).with_columns(unpaid.alias("Rewards.Value"))
    assert missing_rows(builds, frame) == {}
    assert missing_rows(builds, shown) == {
        "g-short": "rollout 'short' has 3 of 4 transitions and 1 of 1 rewards in the store so far.",
        "g-unpaid": "rollout 'unpaid' has 4 of 4 transitions and 0 of 1 rewards in the store so far.",
        "g-absent": "rollout 'absent' has 0 of 4 transitions and 0 of 1 rewards in the store so far.",
    }


def test_rollback_trains_groups_that_are_fresh_again(tmp_path: Path, base: Path):
    names = [*"abcd"]
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(names))
    trainer.run(follow=False)
    assert trainer.ledger.skips.reasons() == {group("c"): SkipReason.STALE, group("d"): SkipReason.STALE}
    trainer.ledger.rollback(0)
    trainer.run(follow=False)  # the same process sees it
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "b-0", "b-1"], 2: ["c-0", "c-1", "d-0", "d-1"]}
    assert (trainer.ledger.skips.reasons(), trainer.ledger.lineage()) == ({}, [0, 2])


def test_rollback_undone_trains_groups_of_known_versions_again(tmp_path: Path, base: Path):
    source = FakeSource([*"abcd"], changes={"c": {"Version": 1}, "d": {"Version": 1}})
    chosen = settings(base, tmp_path, max_staleness=0)
    trainer = wired(chosen, FakeSource([*"ab"]))
    trainer.run(follow=False)
    trainer.ledger.rollback(0)
    trainer.ledger.close()
    back = wired(chosen, source)
    back.run(follow=False)
    assert back.ledger.skips.reasons() == {group("c"): SkipReason.UNKNOWN_VERSION, group("d"): SkipReason.UNKNOWN_VERSION}
    back.ledger.rollback(1)
    back.ledger.close()
    again = wired(chosen, source)  # another process
    again.run(follow=False)
    assert committed(again)[2] == ["c-0", "c-1", "d-0", "d-1"]


def test_setting_changed_restores_groups_skipped_for_it(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    source = FakeSource([*"abcd"])
    first = wired(settings(base, tmp_path, max_staleness=0), source)
    first.run(follow=False)
    assert {one.group_id for one in first.ledger.skips.reasons()} == {"c", "d"}
    source.names.append("e")
    skip(first.ledger, [group("e")], SkipReason.CONTRADICTORY)
    first.ledger.close()
    same = wired(settings(base, tmp_path, max_staleness=0, learning_rate=1.0), source)
    same.run(follow=False)
    assert len(committed(same)) == 2, "a setting that no reason depends on changes nothing"
    same.ledger.close()
    raised = wired(settings(base, tmp_path, max_staleness=1), source)
    raised.run(follow=False)
    assert committed(raised)[2] == ["c-0", "c-1", "d-0", "d-1"]
    assert raised.ledger.skips.reasons() == {group("e"): SkipReason.CONTRADICTORY}
    assert "2 groups that were skipped as stale are looked at again: what the reason depends on has changed" in caplog.text


def test_skip_beside_a_step_holds_once_the_version_of_the_step_is_committed(tmp_path: Path, base: Path):
    class Looking(FakeOptimizer):
        def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
            skip(trainer.ledger, [group("old")], SkipReason.STALE)
            return super().step(batch, before_update)

    chosen = settings(base, tmp_path)
    trainer = wired(chosen, FakeSource([*"ab"]), Looking())
    trainer.run(follow=False)
    (row,) = trainer.ledger.skips.read()
    assert (row.head, row.version, row.committed, trainer.ledger.lineage()) == (0, 1, 0, [0, 1])
    trainer.ledger.close()
    again = wired(chosen, FakeSource([*"ab"]))
    again.run(follow=False)
    assert again.ledger.skips.read() == [row]


def test_outdated_skips_are_removed_in_several_statements(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(skipped_groups, "_PAIRS_A_STATEMENT", 2)
    skips = wired(settings(base, tmp_path), FakeSource([])).ledger.skips
    for head, name in enumerate("abcdef"):
        skips.enter({group(name): Skip(SkipReason.STALE)}, head)
    assert skips.remove_outdated("run", SPEC, [0]) == {SkipReason.STALE: 5}
    assert skips.reasons() == {group("a"): SkipReason.STALE}


def test_look_without_changes_judges_no_skip_again(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource([*"abcd"]))
    calls = list[list[int]]()
    judge = trainer.ledger.skips.remove_outdated

    def counted(run_id: str, build_spec: str, lineage: list[int]) -> dict[SkipReason, int]:
        calls.append(lineage)
        return judge(run_id, build_spec, lineage)

    monkeypatch.setattr(trainer.ledger.skips, "remove_outdated", counted)
    trainer.run(follow=False)
    trainer.run(follow=False)
    assert (len(committed(trainer)), len(calls)) == (2, 1), "once at the start; its own commits change no reason"


def test_look_whose_judgement_of_skips_fails_judges_them_at_the_next(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    """A look beside a step is made once, and the ledger may be locked."""
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource([*"abcd"]))
    trainer.run(follow=False)
    trainer.ledger.rollback(0)
    judge, failures = trainer.ledger.skips.remove_outdated, [LedgerError("the ledger is locked.")]

    def locked_once(run_id: str, build_spec: str, lineage: list[int]) -> dict[SkipReason, int]:
        if failures:
            raise failures.pop()
        return judge(run_id, build_spec, lineage)

    monkeypatch.setattr(trainer.ledger.skips, "remove_outdated", locked_once)
    with pytest.raises(LedgerError, match="locked"):
        trainer.batches.look(trainer.source, trainer.branch.head())
    trainer.batches.look(trainer.source, trainer.branch.head())
    assert trainer.ledger.skips.reasons() == {}


def test_groups_that_another_trainer_took_are_held_no_more(tmp_path: Path, base: Path):
    source = Counted([*"abcd"], hidden=["b"])
    trainer = wired(settings(base, tmp_path), source)
    trainer.batches.look(source, trainer.branch.head())
    assert trainer.batches._held.groups == {group(name) for name in "acd"}
    other = Ledger(tmp_path, "policy", "main")
    lease = other.begin([BatchRollout(group(name), f"{name}-{i}", 0, 0) for name in "ab" for i in range(2)])
    assert lease
    other.commit(lease, checksum="float32:01", path="/v1", tokenizer_hash=trainer.loaded.tokenizer_hash, metrics={})
    other.close()
    trainer.batches.look(source, trainer.branch.head())
    assert trainer.batches._held.groups == {group(name) for name in "cd"}
    assert trainer.batches.figures()["groups_incomplete"] == 0


def test_groups_of_a_step_that_was_given_up_are_under_way_no_more(tmp_path: Path, base: Path):
    source = FakeSource([*"ab"])
    trainer = wired(settings(base, tmp_path, max_staleness=0), source)
    trainer.run(follow=False)
    source.names, source.version = [*"cd"], 1
    source.changes |= dict.fromkeys(source.names, source.changes["a"])
    batch = trainer.take()
    assert batch
    trainer.ledger.rollback(0)
    trainer.clock._free_since = -math.inf
    assert not trainer.step(batch)
    assert trainer.clock.waited < math.inf, "the wait begins anew: the step that was given up is no wait for rollouts"
    assert trainer.take() is None
    assert trainer.ledger.skips.reasons() == dict.fromkeys((group("c"), group("d")), SkipReason.UNKNOWN_VERSION)
    assert trainer.batches.sound_groups == set()


@pytest.fixture
def window_of_8_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_queue, "_WINDOW_GROUPS", 8)


def failing(tmp_path: Path, base: Path, names: Sequence[str], sick: Sequence[str], **changes: object):
    chosen = settings(base, tmp_path, **{"max_failed_share": 0.25, **changes})
    return wired(chosen, FakeSource([*names], changes=bad(*sick)), Refusing())


@pytest.mark.usefixtures("window_of_8_groups")
def test_run_with_too_many_failed_groups_stops_with_reason_and_remedy(tmp_path: Path, base: Path):
    sick = [f"bad{i}" for i in range(4)]
    trainer = failing(tmp_path, base, [*sick, *"abcd"], sick)
    with pytest.raises(TrainerError) as caught:
        trainer.run(follow=False)
    assert str(caught.value) == (
        "4 of the last 8 groups of run 'run' failed (4 logprob_gap), more than trainer.alarms.max_failed_share = 0.25 allows, most of "
        "them as "
        "logprob_gap. The newest is group 'bad2': rows [0, 1, 2, 3] differ by 0.4 nats. See that engine and trainer hold the same "
        "weights and tokenizer and that the recorded sampling parameters are those in effect (docs/guides/learning.md). "
        "`spangrad train skipped --reason logprob_gap` lists them. Once the cause is gone, "
        "`spangrad train restore --reason logprob_gap` brings them back; to go on without them, raise trainer.alarms.max_failed_share."
    )
    assert (committed(trainer), trainer.ledger.holder()) == ({0: []}, None), "the lease is undone"
    trainer.ledger.close()
    # The same at the next start, before anything else is skipped: what has failed stands in the ledger.
    again = failing(tmp_path, base, [*sick, *"abcd"], sick)
    with pytest.raises(TrainerError, match="4 of the last 8 groups"):
        again.run(follow=False)
    assert len(again.ledger.skips.reasons()) == 4
    again.ledger.close()
    tolerant = failing(tmp_path, base, [*sick, *"abcd"], sick, max_failed_share=0.5)
    tolerant.run(follow=False)
    assert list(committed(tolerant).values())[1:] == [["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]]


@pytest.mark.usefixtures("window_of_8_groups")
def test_failures_followed_by_sound_groups_do_not_count(tmp_path: Path, base: Path):
    names = [f"g{i:02}" for i in range(24)]
    sick = names[::6]
    trainer = failing(tmp_path, base, names, sick)
    trainer.run(follow=False)
    assert {one.group_id for one in trainer.ledger.skips.reasons()} == set(sick), "one in six: 4 of 24, and never more than 2 of the last 8"
    assert sum(len(batch) for batch in committed(trainer).values()) == 2 * 20
    assert trainer.ledger.skips.failures("run", 8).count <= 2
    assert trainer.ledger.skips.failures("run", 24).count == 4
    assert trainer.ledger.skips.failures("another run", 24).count == 0


@pytest.mark.usefixtures("window_of_8_groups")
def test_run_stopped_by_failed_groups_begins_once_their_setting_has_changed(tmp_path: Path, base: Path):
    names = [*"abcd"]
    trainer = failing(tmp_path, base, names, names)
    with pytest.raises(TrainerError, match="4 of the last 8 groups"):
        trainer.run(follow=False)
    trainer.ledger.close()
    changed = wired(settings(base, tmp_path, max_failed_share=0.25, dtype="fp32"), FakeSource(names))
    changed.run(follow=False)
    assert list(committed(changed).values())[1:] == [["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]]


@pytest.mark.usefixtures("window_of_8_groups")
def test_failures_exclude_stale_and_equal_groups(tmp_path: Path, base: Path):
    names = [f"g{i:02}" for i in range(12)]
    trainer = failing(tmp_path, base, names, [], max_staleness=0)
    trainer.run(follow=False)
    assert len(trainer.ledger.skips.reasons()) == 10


def overrides(ledger: Path) -> list[str]:
    return [f"trainer.directory={ledger}", "trainer.run_id=run"]


def test_train_skipped_lists_groups_and_restore_brings_them_back(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]):
    source = FakeSource(["bad", "b", "c", "d"], changes=bad("bad") | {"d": {"PromptIds": []}})
    trainer = wired(settings(base, tmp_path), source, Refusing())
    trainer.run(follow=False)
    trainer.ledger.close()
    own = overrides(tmp_path)
    skipped(set_=own)
    table = capsys.readouterr().out
    assert sorted(line.split()[0] for line in table.splitlines()) == ["bad", "contradictory:", "d", "group", "logprob_gap:"]
    assert f"logprob_gap: {SkipReason.LOGPROB_GAP.remedy}" in table
    assert SPEC in table
    skipped(reason="contradictory", json=True, set_=own)
    (row,) = json.loads(capsys.readouterr().out)
    assert row.pop("skipped_at").startswith("20")
    assert row == {
        "group": "d", "run": "run", "mode": "train", "build_spec": SPEC, "reason": "contradictory",
        "detail": "transition transition-d-0-0 has 0 prompt and 2 response tokens; both are needed.",
        "remedy": SkipReason.CONTRADICTORY.remedy,
        "depends_on": {"version": None, "settings": {}},
    }  # fmt: skip
    skipped(reason="equal", set_=own)
    assert capsys.readouterr().out == "policy/main has skipped no group as equal.\n"
    restore(reason="logprob_gap", set_=own)
    assert capsys.readouterr().out == "bad of run run is ready again; it was skipped as logprob_gap.\n"
    restore(["d"], set_=own)
    capsys.readouterr()
    restore(all_=True, set_=own)
    assert capsys.readouterr().out == "No group was skipped.\n"
    again = wired(settings(base, tmp_path), replace(source, names=["bad", "b", "c", "d"]))
    again.run(follow=False)
    assert again.ledger.skips.reasons() == {group("d"): SkipReason.CONTRADICTORY}, (
        "what would be skipped for the same cause is skipped again"
    )
    source.names.append("e")
    more = wired(settings(base, tmp_path), replace(source, names=["bad", "b", "c", "d", "e"]))
    more.run(follow=False)
    assert list(committed(more).values())[-1] == ["bad-0", "bad-1", "e-0", "e-1"], "what failed in a step is tried again"


def test_train_restore_with_invalid_arguments_raises(tmp_path: Path, base: Path):
    own = overrides(tmp_path)
    with pytest.raises(LedgerError, match="holds no ledger: nothing was trained there"):
        skipped(set_=own)
    wired(settings(base, tmp_path), FakeSource([])).ledger.close()
    with pytest.raises(SettingsError, match="nothing says which groups to bring back"):
        restore(set_=own)
    with pytest.raises(SettingsError, match="give one of them"):
        restore(["a"], all_=True, set_=own)
    with pytest.raises(
        SettingsError, match=r"'odd' is no reason that groups are skipped for\. The reasons are cancelled, no_transitions, "
    ):
        restore(reason="odd", set_=own)
    with pytest.raises(SettingsError, match=r"policy/main has not skipped a\. `spangrad train skipped` lists groups\."):
        restore(["a"], set_=own)


def test_enter_keeps_the_first_reason_of_a_group(tmp_path: Path, base: Path):
    ledger = wired(settings(base, tmp_path), FakeSource([])).ledger
    ledger.skips.enter({group("a"): Skip(SkipReason.STALE, "old")}, head=0)
    ledger.skips.enter({group("a"): Skip(SkipReason.EQUAL)}, head=0)
    (row,) = ledger.skips.read()
    assert (row.reason, row.detail, row.head) == (SkipReason.STALE, "old", 0)


def test_loaded_only_and_addition_are_inverse():
    source = FakeSource([])
    whole = source.load([group("a"), group("b"), group("c")])
    parts = whole.only([group("b")]) + whole.only([group("a"), group("c")])
    assert (parts.rollouts, parts.transitions.rows()) == (whole.rollouts, whole.transitions.rows())
    assert whole.only([]).transitions.is_empty()
    assert parts.only([group("b")]).rollouts == [BatchRollout(group("b"), f"b-{i}", 0, 0) for i in range(2)]
