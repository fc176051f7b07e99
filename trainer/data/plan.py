"""What a run would train, batch by batch, and why not the rest: without a lease, an expiry or a line of PyTorch.

In: every group that the store has built of the run, the ledger's conclusions, the trainer's settings. Out: a `Plan`. Invariant: nothing is
changed, in the ledger or in the store, so a plan can be asked for while a trainer is at work; the groups of its batches are those that
`train --once` takes now, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spangrad.settings import TrainerSettings
from spangrad.types import Mode
from trainer.data.group_checks import find_skips, same_ids
from trainer.data.source import BatchRollout, Group, GroupState, Loaded
from trainer.ledger.skips import SkipReason


class Fate(StrEnum):
    """What a run makes of a group."""

    BATCH = "batch"
    """It is trained."""
    LEFT = "left"
    """It is ready, and too few others are for a batch (trainer.groups_per_batch)."""
    SKIPPED = "skipped"
    """It may not be trained, now or later: the reason says why."""
    INCOMPLETE = "incomplete"
    """The store does not show all of its rows yet."""
    WAITING = "waiting"
    """Some of its rollouts are not built yet."""
    NO_GROUP = "no_group"
    """Rollouts that name no group of a known size: there is nothing to compare them with."""
    OTHER_MODE = "other_mode"
    """Of a mode that trainer.modes leaves out: held out, probes, production."""
    UNDER_WAY = "under_way"
    """Another trainer is at it, or one was when it died."""
    TRAINED = "trained"
    """A committed batch has used it."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group and its fate."""

    mode: str
    group_id: str
    """Empty: all rollouts of the mode that name no group."""
    rollouts: int
    """That are built."""
    size: int
    """That it has when it is whole; 0: nobody said."""
    fate: Fate
    batch: int | None = None
    """1 for the next batch. None: it is in none."""
    reason: SkipReason | None = None
    """Why it is skipped. None: it is not."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the ledger says."""

    lineage: Sequence[int]
    """Committed versions that led to the one about to be trained, which is last."""
    tokenizer_hash: str
    finished: frozenset[tuple[str, str]]
    """Mode and id of groups that must not be taken."""
    leased: frozenset[tuple[str, str]]
    """Those of them whose step is under way."""
    skipped: dict[Group, SkipReason]
    claimed: Callable[[Sequence[BatchRollout]], Mapping[Group, str]] = lambda _: {}
    """The groups of which a rollout is in a committed batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do now."""

    policy: str
    branch: str
    run_id: str
    build_spec: str
    version: int
    """That the next step trains."""
    groups_per_batch: int
    in_flight: int
    """Groups of mode train that are wanted beyond those that are trained, skipped or in a batch above (`demand.in_flight`)."""
    groups: tuple[PlannedGroup, ...]
    """All that the store knows of the run; the ready ones first, in the order in which they are taken."""
    unbuilt: int
    """Rollouts that have ended and are not built."""
    elsewhere: tuple[str, ...]
    """What is built of other runs, or by other specifications, in words, when nothing is of this run."""
    best: str = ""
    """A few words about the best version on held-out rollouts; empty: none has been measured."""

    @property
    def batches(self) -> int:
        """How many batches a run would train now."""
        return max((one.batch or 0 for one in self.groups), default=0)

    def having(self, *fates: Fate) -> list[PlannedGroup]:
        """The groups with one of these fates."""
        return [one for one in self.groups if one.fate in fates]

    @property
    def wanted(self) -> int:
        """How many groups more are wanted than the store knows of; those that no rollout was built of are not known."""
        return max(self.in_flight - self._there, 0)

    @property
    def demand(self) -> str:
        """How many groups more are wanted, and what became of others, in one sentence; empty: none are."""
        if not self.wanted:
            return ""
        told = f"{_count(self.wanted, 'more group')} {'is' if self.wanted == 1 else 'are'} wanted: {self.in_flight} shall be in flight"
        skips = self._skips()
        return f"{told}, {self._there} {'is' if self._there == 1 else 'are'} there{f'; {skips}' if skips else ''}."

    @property
    def _there(self) -> int:
        return sum(one.mode == Mode.TRAIN for one in self.having(Fate.LEFT, Fate.WAITING, Fate.INCOMPLETE, Fate.UNDER_WAY))

    def _skips(self) -> str:
        skips = Counter(one.reason.value for one in self.having(Fate.SKIPPED) if one.reason)
        return f"{_are(skips.total(), 'group')} skipped ({', '.join(f'{n} {why}' for why, n in sorted(skips.items()))})" if skips else ""

    @property
    def sentence(self) -> str:
        """What would be trained, or why nothing, in one sentence."""
        if self.batches:
            told = f"{_count(self.batches, 'batch', 'batches')} of {_count(self.groups_per_batch, 'group')} would be trained"
        else:
            told = "there is nothing to train"
        why = self._whys()
        return f"{told}: {'; '.join(why)}." if why else f"{told}."

    def _whys(self) -> list[str]:
        left, waiting, loose = (self.having(fate) for fate in (Fate.LEFT, Fate.WAITING, Fate.NO_GROUP))
        told: list[str] = []
        if left:
            told.append(f"{_are(len(left), 'group')} ready and a batch takes {self.groups_per_batch} (trainer.groups_per_batch)")
        if waiting:
            missing = sum(one.size - one.rollouts for one in waiting)
            told.append(f"{_wait(len(waiting))} for {_count(missing, 'rollout')} to be built")
        if incomplete := self.having(Fate.INCOMPLETE):
            told.append(f"{_wait(len(incomplete))} for rows that the store does not show yet")
        if self.unbuilt:
            told.append(f"{_count(self.unbuilt, 'rollout')} ended and not built (`spangrad build`)")
        if skips := self._skips():
            told.append(skips)
        if loose:
            told.append(f"{_count(sum(one.rollouts for one in loose), 'rollout')} without a group (docs/training.md)")
        for mode, n in sorted(Counter(one.mode for one in self.having(Fate.OTHER_MODE)).items()):
            told.append(f"{_are(n, 'group')} of mode {mode}")
        under_way, trained = len(self.having(Fate.UNDER_WAY)), len(self.having(Fate.TRAINED))
        if under_way:
            told.append(f"{_are(under_way, 'group')} in a step under way")
        if trained:
            told.append(f"{_count(trained, 'group')} trained before")
        if not self.groups and not self.unbuilt:
            others = f"; the store has {', '.join(self.elsewhere)}" if self.elsewhere else ""
            told.append(f"nothing is built of run {self.run_id!r} by specification {self.build_spec}{others}")
        return told


def planned(
    states: Sequence[GroupState], load: Callable[[Sequence[Group]], Loaded], past: Past, settings: TrainerSettings
) -> tuple[PlannedGroup, ...]:
    """Give every group its fate.

    Args:
        states: what is built of each group, in the order in which groups are taken.
        load: rollouts and transitions of some groups.
        past: the ledger's conclusions.
        settings: of the trainer.
    """
    fates: dict[Group, PlannedGroup] = {}
    ready: list[GroupState] = []
    for state in states:
        group = state.group
        key = (group.mode, group.group_id)
        if group in past.skipped:
            fates[group] = _fate(state, Fate.SKIPPED, reason=past.skipped[group])
        elif key in past.leased:
            fates[group] = _fate(state, Fate.UNDER_WAY)
        elif key in past.finished:
            fates[group] = _fate(state, Fate.TRAINED)
        elif group.mode not in settings.modes:
            fates[group] = _fate(state, Fate.OTHER_MODE)
        elif not state.size:
            fates[group] = _fate(state, Fate.NO_GROUP)
        elif not state.whole:
            fates[group] = _fate(state, Fate.WAITING)
        else:
            ready.append(state)
    lineage, batch = list(past.lineage), 0
    while ready:
        chosen = ready[: settings.groups_per_batch]
        loaded = load([one.group for one in chosen])
        if loaded.incomplete:
            fates |= {one.group: _fate(one, Fate.INCOMPLETE) for one in chosen if one.group in loaded.incomplete}
            ready = [one for one in ready if one.group not in loaded.incomplete]
            continue
        reasons = _reasons([one.group for one in chosen], loaded, lineage, past, settings)
        if reasons:
            fates |= {one.group: _fate(one, Fate.SKIPPED, reason=reasons[one.group]) for one in chosen if one.group in reasons}
            ready = [one for one in ready if one.group not in reasons]
        elif len(chosen) < settings.groups_per_batch:
            fates |= {one.group: _fate(one, Fate.LEFT) for one in chosen}
            break
        else:
            batch += 1
            lineage.append(lineage[-1] + 1)  # the number that it will have, or a smaller one; either way it is the newest
            fates |= {one.group: _fate(one, Fate.BATCH, batch=batch) for one in chosen}
            ready = ready[settings.groups_per_batch :]
    order = {fate: place for place, fate in enumerate(Fate)}
    return tuple(sorted(fates.values(), key=lambda one: (one.batch or 1 << 62, order[one.fate])))


def _reasons(
    groups: Sequence[Group], loaded: Loaded, lineage: Sequence[int], past: Past, settings: TrainerSettings
) -> dict[Group, SkipReason]:
    skips = find_skips(groups, loaded, settings, lineage=lineage, tokenizer_hash=past.tokenizer_hash)
    if not skips and (claimed := past.claimed(loaded.rollouts)):
        return dict.fromkeys(claimed, SkipReason.ALREADY_TRAINED)
    return {group: skip.reason for group, skip in (skips or same_ids(loaded.rollouts, groups)).items()}


def _fate(state: GroupState, fate: Fate, *, batch: int | None = None, reason: SkipReason | None = None) -> PlannedGroup:
    return PlannedGroup(state.group.mode, state.group.group_id, state.rollouts, state.size, fate, batch, reason)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _are(number: int, one: str) -> str:
    return f"{_count(number, one)} {'is' if number == 1 else 'are'}"


def _wait(number: int) -> str:
    return f"{_count(number, 'group')} {'waits' if number == 1 else 'wait'}"
