"""Plan of the batches that a run would train, and the reasons for groups left out: without a lease, a skip or PyTorch.

Invariant: nothing is changed, in the ledger or in the store, so a plan can be asked for while a trainer is at work; the groups of its
batches are those that `train --once` takes now, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spangrad.settings import TrainerSettings
from spangrad.store.rollout.record import counted
from spangrad.types import Mode
from trainer.data.batch_queue import HeldGroups, most_held, oldest_first
from trainer.data.group_checks import Claimed, PhaseSkips, find_skips, same_ids
from trainer.data.source import AttemptKey, BatchRollout, Group, GroupState, Loaded
from trainer.ledger.skips import Skip, SkipReason


class GroupOutcome(StrEnum):
    """Outcome of a group in a run."""

    BATCH = "batch"
    """It is trained."""
    LEFT = "left"
    """It is ready, and too few others are for a batch (trainer.sampling.groups_per_batch)."""
    PHASE = "phase"
    """It is ready, and its phase begins once other policies are updated (trainer.phase_policies)."""
    SKIPPED = "skipped"
    """It may not be trained, now or later: `PlannedGroup.reason` names the reason."""
    INCOMPLETE = "incomplete"
    """The store does not show all of its rows yet."""
    WAITING = "waiting"
    """Some of its rollouts are not built yet."""
    NO_GROUP = "no_group"
    """Rollouts that name no group of a known size: there is nothing to compare them with."""
    OTHER_MODE = "other_mode"
    """Its mode is not in trainer.modes: held out, probes, production."""
    UNDER_WAY = "under_way"
    """Another trainer is training it, or one was when it died."""
    TRAINED = "trained"
    """A committed batch has used it."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group and its outcome."""

    mode: str
    group_id: str
    """Empty: all rollouts of the mode that name no group."""
    rollouts: int
    """Number of its rollouts that are built."""
    size: int
    """Number of rollouts of the whole group; 0: unknown."""
    outcome: GroupOutcome
    batch: int | None = None
    """Number of its batch, 1 for the next. None: it is in none."""
    reason: SkipReason | None = None
    """Reason for which it is skipped. None: it is not."""


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """State of a branch in the ledger."""

    lineage: Sequence[int]
    """Committed versions, oldest first, that led to the one about to be trained, which is last."""
    tokenizer_hash: str
    finished: frozenset[tuple[str, str]]
    """Mode and id of groups that are trained or skipped."""
    leased: frozenset[tuple[str, str]]
    """Mode and id of groups whose step is under way."""
    skipped: dict[Group, SkipReason]
    claimed: Claimed = lambda _: {}
    """Groups of which a rollout is in a batch of the branch."""
    awaited: Sequence[str] = ()
    """Other policies that must be updated and served before the policy's phase begins (`Phases.awaited`)."""
    of_phases: PhaseSkips = lambda _groups, _loaded: {}
    """Groups that versions of other phases played."""
    vocabulary: int | None = None
    """Number of tokens that the policy knows. None: it is not known."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Plan of a run: the outcome of each group, now."""

    policy: str
    branch: str
    run_id: str
    build_spec: str
    version: int
    """Policy version that the next step trains."""
    groups_per_batch: int
    in_flight: int
    """Number of groups of mode train needed beyond those that are trained, skipped or in a batch above (`demand.in_flight`)."""
    groups: tuple[PlannedGroup, ...]
    """All groups of the run in the store; the ready ones first, in the order in which batches take them."""
    unbuilt: int
    """Number of rollouts that have ended and are not built."""
    elsewhere: tuple[str, ...]
    """Descriptions of rollouts built of other runs or by other specifications; empty where this run has groups."""
    awaited: tuple[str, ...] = ()
    """Other policies that must be updated and served before anything is trained (trainer.phase_policies)."""
    best: str = ""
    """Description of the best version on held-out rollouts; empty: none has been evaluated."""

    @property
    def batches(self) -> int:
        """Return the number of batches that a run would train now."""
        return max((group.batch or 0 for group in self.groups), default=0)

    def with_outcome(self, *outcomes: GroupOutcome) -> list[PlannedGroup]:
        """Return the groups with one of these outcomes."""
        return [group for group in self.groups if group.outcome in outcomes]

    @property
    def missing_groups(self) -> int:
        """Return the number of groups needed beyond those in the store, which knows no group before a rollout of it is built."""
        return max(self.in_flight - self._groups_in_store, 0)

    @property
    def demand(self) -> str:
        """Return a sentence about the groups that are still needed, and the skipped ones; empty: none are needed."""
        if not self.missing_groups:
            return ""
        text = f"{_are(self.missing_groups, 'more group')} needed: {self.in_flight} are to be in flight"
        skips = self._skips()
        return f"{text}, {self._groups_in_store} {'is' if self._groups_in_store == 1 else 'are'} there{f'; {skips}' if skips else ''}."

    @property
    def _groups_in_store(self) -> int:
        return sum(
            group.mode == Mode.TRAIN
            for group in self.with_outcome(
                GroupOutcome.LEFT, GroupOutcome.PHASE, GroupOutcome.WAITING, GroupOutcome.INCOMPLETE, GroupOutcome.UNDER_WAY
            )
        )

    def _skips(self) -> str:
        skips = Counter(group.reason.value for group in self.with_outcome(GroupOutcome.SKIPPED) if group.reason)
        return f"{_are(skips.total(), 'group')} skipped ({', '.join(f'{n} {why}' for why, n in sorted(skips.items()))})" if skips else ""

    @property
    def summary(self) -> str:
        """Return a sentence about what would be trained, or the reasons for which nothing would be."""
        if self.batches:
            batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
            text = f"{batches} of {counted(self.groups_per_batch, 'group')} would be trained"
        else:
            text = "there is nothing to train"
        reasons = self._outcome_texts()
        return f"{text}: {'; '.join(reasons)}." if reasons else f"{text}."

    def _outcome_texts(self) -> list[str]:
        left, waiting, ungrouped = (
            self.with_outcome(outcome) for outcome in (GroupOutcome.LEFT, GroupOutcome.WAITING, GroupOutcome.NO_GROUP)
        )
        reasons: list[str] = []
        if self.awaited:
            reasons.append(f"the phase begins once {', '.join(self.awaited)} is updated and served (trainer.phase_policies)")
        if left:
            reasons.append(
                f"{_are(len(left), 'group')} ready and a batch takes {self.groups_per_batch} (trainer.sampling.groups_per_batch)"
            )
        if waiting:
            missing = sum(group.size - group.rollouts for group in waiting)
            reasons.append(f"{_wait(len(waiting))} for {counted(missing, 'rollout')} to be built")
        if incomplete := self.with_outcome(GroupOutcome.INCOMPLETE):
            reasons.append(f"{_wait(len(incomplete))} for rows that the store does not show yet")
        if self.unbuilt:
            reasons.append(f"{counted(self.unbuilt, 'rollout')} ended and not built (`spangrad build`)")
        if skips := self._skips():
            reasons.append(skips)
        if ungrouped:
            reasons.append(f"{counted(sum(group.rollouts for group in ungrouped), 'rollout')} without a group (docs/guides/training.md)")
        for mode, n in sorted(Counter(group.mode for group in self.with_outcome(GroupOutcome.OTHER_MODE)).items()):
            reasons.append(f"{_are(n, 'group')} of mode {mode}")
        under_way, trained = len(self.with_outcome(GroupOutcome.UNDER_WAY)), len(self.with_outcome(GroupOutcome.TRAINED))
        if under_way:
            reasons.append(f"{_are(under_way, 'group')} in a running step")
        if trained:
            reasons.append(f"{counted(trained, 'group')} trained before")
        if not self.groups and not self.unbuilt:
            others = f"; the store has {', '.join(self.elsewhere)}" if self.elsewhere else ""
            reasons.append(f"nothing is built of run {self.run_id!r} by specification {self.build_spec}{others}")
        return reasons


def planned(
    states: Sequence[GroupState], load: Callable[[Sequence[Group]], Loaded], history: LedgerHistory, settings: TrainerSettings
) -> tuple[PlannedGroup, ...]:
    """Return every group with its outcome; states are in the order in which groups are taken."""
    outcomes: dict[Group, _Outcome] = {}
    ready: list[Group] = []
    for state in states:
        group = state.group
        key = (group.mode, group.group_id)
        if group in history.skipped:
            outcomes[group] = (GroupOutcome.SKIPPED, None, history.skipped[group])
        elif key in history.leased:
            outcomes[group] = (GroupOutcome.UNDER_WAY, None, None)
        elif key in history.finished:
            outcomes[group] = (GroupOutcome.TRAINED, None, None)
        elif group.mode not in settings.modes:
            outcomes[group] = (GroupOutcome.OTHER_MODE, None, None)
        elif not state.size:
            outcomes[group] = (GroupOutcome.NO_GROUP, None, None)
        elif not state.whole:
            outcomes[group] = (GroupOutcome.WAITING, None, None)
        else:
            ready.append(group)
    outcomes |= _outcomes_of_ready(ready, load, history, settings)
    order = {outcome: index for index, outcome in enumerate(GroupOutcome)}
    known = {state.group: state for state in states}
    groups = [
        PlannedGroup(group.mode, group.group_id, known[group].rollouts, known[group].size, *outcome) for group, outcome in outcomes.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.batch or 1 << 62, order[group.outcome])))


_Outcome = tuple[GroupOutcome, int | None, SkipReason | None]
"""Outcome of a group, number of its batch, and reason for which it is skipped."""


def _outcomes_of_ready(
    ready: list[Group], load: Callable[[Sequence[Group]], Loaded], history: LedgerHistory, settings: TrainerSettings
) -> dict[Group, _Outcome]:
    """Return the outcomes of groups that are whole, as `BatchQueue` would take them batch after batch."""
    lineage, batch, count = list(history.lineage), 0, settings.sampling.groups_per_batch
    held, checked, outcomes = HeldGroups(), dict[Group, int](), dict[Group, _Outcome]()
    trained = set[AttemptKey]()

    def claimed(rollouts: Sequence[BatchRollout]) -> dict[Group, str]:
        return {**history.claimed(rollouts), **{rollout.group: "" for rollout in rollouts if rollout.key in trained}}

    while not history.awaited:
        decided: dict[Group, _Outcome] = {}
        skips: Mapping[Group, Skip] = {}
        if unchecked := [group for group in ready[: most_held(settings)] if group not in checked]:
            loaded = held.load(load, unchecked)
            decided = dict.fromkeys(loaded.incomplete, (GroupOutcome.INCOMPLETE, None, None))
            if complete := [group for group in unchecked if group not in decided]:
                examined = loaded.only(set(complete))
                skips = find_skips(
                    complete,
                    examined,
                    settings,
                    lineage=lineage,
                    tokenizer_hash=history.tokenizer_hash,
                    vocabulary=history.vocabulary,
                    of_phases=history.of_phases,
                    claimed=claimed,
                )
                versions = examined.oldest_versions(settings.policy)
                checked |= {group: versions.get(group, lineage[-1]) for group in complete if group not in skips}
        elif len(chosen := oldest_first(ready, checked)[:count]) < count:
            break
        elif not (skips := same_ids(rollouts := held.load(load, chosen).rollouts, chosen)):
            batch += 1
            trained |= {rollout.key for rollout in rollouts}
            lineage.append(lineage[-1] + 1)  # the number that it will have, or a smaller one; either way it is the newest
            checked = {}
            decided = dict.fromkeys(chosen, (GroupOutcome.BATCH, batch, None))
        decided |= {group: (GroupOutcome.SKIPPED, None, skip.reason) for group, skip in skips.items()}
        outcomes |= decided
        ready = [group for group in ready if group not in decided]
        held.free(decided)
    left = GroupOutcome.PHASE if history.awaited else GroupOutcome.LEFT
    return outcomes | dict.fromkeys(ready, (left, None, None))


def _are(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def _wait(number: int) -> str:
    return f"{counted(number, 'group')} {'waits' if number == 1 else 'wait'}"
