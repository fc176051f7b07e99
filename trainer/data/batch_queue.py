"""The next batch: groups that are ready, loaded, checked, and skipped where they may not be trained.

Invariant: a group leaves the queue of ready ones in two ways only, trained or skipped with a reason; one of which rows are missing stays,
and is looked at again later. A group is loaded once, as soon as it is ready, and memory holds no more of them than the steps within the
staleness bound can use.

Groups are checked when they are ready, not when a batch is full, so that one that is decided is replaced at once: a group that may not be
trained from one version may not be trained from a later one either. Those with calls of the oldest versions are trained first, since they
would be the first to be too stale. Groups that fail a check in the step itself are skipped by `refuse`; the next batch is filled up with
the next ones, and what was loaded of the sound ones is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import BadRowsError, TrainerError
from spangrad.probing.model import vocabulary_size
from spangrad.settings import TrainerSettings
from trainer.data.group_checks import PhaseSkips, already_trained, find_skips, same_ids
from trainer.data.ready_groups import ReadyGroups
from trainer.data.source import Group, GroupReader, Loaded
from trainer.ledger.skips import FAILURES, Skip, SkipReason
from trainer.ledger.tables import LedgerVersion
from trainer.ledger.working_branch import WorkingBranch
from trainer.monitor.watching import Clock
from trainer.publish.lora import model_of

logger = logging.getLogger(__name__)

_WINDOW_GROUPS = 64
"""Number of the run's latest groups, trained or failed, of which trainer.alarms.max_failed_share may fail."""
_BATCHES = 4
"""Smallest window of failures, in batches: a batch that fails as a whole is at most a quarter of it."""
_SOON_SECONDS = 2.0
"""First delay before a group with missing rows is loaded again, in seconds; it doubles each time, up to `_LATE_SECONDS`."""
_LATE_SECONDS = 300.0
_NAMED = 8
"""Largest number of groups that a warning names."""


@dataclass
class _Incomplete:
    """State of a group of which the store lacks rows."""

    detail: str
    delay: float
    again: float
    """Time of the next load, in seconds of the monotonic clock."""


class HeldGroups:
    """Loaded groups: each is read once, and held until it is freed."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None

    @property
    def groups(self) -> set[Group]:
        """Return the groups that are held."""
        return {rollout.group for rollout in self._loaded.rollouts} if self._loaded else set()

    def load(self, load: Callable[[Sequence[Group]], Loaded], groups: Collection[Group]) -> Loaded:
        """Load those of the groups, one at least, that are not held yet, and return what is held of all of them."""
        held = self.groups
        if missing := [group for group in groups if group not in held]:
            loaded = load(missing)
            self._loaded = self._loaded + loaded if self._loaded else loaded
        assert self._loaded
        return self._loaded.only(set(groups))

    def free(self, groups: Collection[Group]) -> None:
        """Free what is held of groups."""
        if self._loaded:
            kept = self.groups.difference(groups)
            self._loaded = self._loaded.only(kept) if kept else None


def most_held(settings: TrainerSettings) -> int:
    """Return the largest number of ready groups that are held: a batch more than the steps within the staleness bound can use."""
    return (settings.sampling.max_staleness + 2) * settings.sampling.groups_per_batch


def oldest_first(ready: Sequence[Group], checked: Mapping[Group, int]) -> list[Group]:
    """Return those of the ready groups that may be trained, in the order in which batches take them.

    `checked` has the oldest version that answered a call of each group that may be trained; of equal ones the first in `ready` comes first.
    """
    return sorted((group for group in ready if group in checked), key=checked.__getitem__)


class BatchQueue:
    """Takes batches of sound groups, in the order of their oldest versions, then of when they became ready."""

    def __init__(
        self, settings: TrainerSettings, branch: WorkingBranch, clock: Clock, on_stale: Callable[[], None], of_phases: PhaseSkips
    ) -> None:
        """Take nothing yet.

        Before groups are skipped as stale, `on_stale` is called, since an engine that serves old weights would make every group stale.
        """
        self._settings = settings
        self._branch = branch
        self._clock = clock
        self._on_stale = on_stale
        self._of_phases = of_phases
        self._groups = ReadyGroups(branch.ledger, settings)
        self._held = HeldGroups()
        self._sound: dict[Group, int] = {}
        """Held groups that may be trained from `_head`, with the oldest version that answered a call of each."""
        self._under_way: set[Group] = set()
        """Groups of the batch that was taken last, until it is trained or another is requested."""
        self._head: LedgerVersion | None = None
        """Version that skips were last compared with."""
        self._vocabulary: int | None = None
        """Number of tokens that the policy knows, by the first version: training changes no vocabulary. None: it is not known."""
        self._incomplete: dict[Group, _Incomplete] = {}
        self.ready: list[Group] = []
        """Groups that were ready, and not used yet, when a batch was last requested."""

    def look(self, source: GroupReader, head: LedgerVersion) -> None:
        """Load and check the oldest ready groups that were not yet, and skip those that may not be trained.

        Raises:
            TrainerError: too many groups of the run have failed (trainer.alarms.max_failed_share).
        """
        self._judge_again(source.build_spec, head)
        polled, waiting = self._groups.poll(source), self._waiting()
        self._free_unused(polled)
        self.ready = [group for group in polled if group not in waiting]
        while unchecked := [group for group in self.ready[: most_held(self._settings)] if group not in self._sound]:
            loaded = self._held.load(source.load, unchecked)
            for group in unchecked:
                if group not in loaded.incomplete:
                    self._incomplete.pop(group, None)
            if loaded.incomplete:
                self._wait(loaded.incomplete)
            complete = [group for group in unchecked if group not in loaded.incomplete]
            examined = loaded.only(set(complete)) if loaded.incomplete else loaded
            skips = self._checked(complete, examined, head) if complete else {}
            versions = examined.oldest_versions(self._settings.policy)
            self._sound |= {group: versions.get(group, head.version) for group in complete if group not in skips}
            if skips:
                self._skip(skips, head)

    def take(self, source: GroupReader, head: LedgerVersion) -> Loaded | None:
        """Return the groups of the oldest versions that make a whole batch, once those that may not be trained are skipped.

        Returns:
            None: too few are ready.

        Raises:
            TrainerError: too many groups of the run have failed (trainer.alarms.max_failed_share).
        """
        began = time.time_ns()
        self._under_way = set()
        self.look(source, head)
        count = self._settings.sampling.groups_per_batch
        while len(chosen := oldest_first(self.ready, self._sound)[:count]) == count:
            loaded = self._held.load(source.load, chosen)
            if skips := self._claimed(chosen, loaded):
                self._skip(skips, head)
                self.look(source, head)
                continue
            self._clock.begin(began)
            self._under_way = set(chosen)
            return loaded
        return None

    def refuse(self, error: BadRowsError, groups: Sequence[Group], rows: Sequence[int], head: LedgerVersion) -> None:
        """Skip the groups of the rows that failed in a step; where no row is named, all groups of the batch, as `not_finite`.

        For each row of the batch, `rows` has the number of its group among `groups`; -1: it is of none.

        Raises:
            TrainerError: too many groups of the run have failed (trainer.alarms.max_failed_share).
        """
        skips: dict[Group, Skip] = {}
        for row, reason in error.rows.items():
            if rows[row] >= 0:
                skips.setdefault(groups[rows[row]], Skip(SkipReason(reason), str(error)))
        self._skip(skips or dict.fromkeys(groups, Skip(SkipReason.NOT_FINITE, str(error))), head)

    def skip_claimed(self, groups: Mapping[Group, str], head: LedgerVersion) -> None:
        """Skip groups of which a rollout is in a batch already, given a sentence about each.

        Raises:
            TrainerError: too many groups of the run have failed (trainer.alarms.max_failed_share).
        """
        self._skip(already_trained(groups), head)

    def forget(self, batch: Loaded) -> None:
        """Free what was loaded of a batch: it is trained."""
        self._under_way = set()
        self._free({rollout.group for rollout in batch.rollouts})

    @property
    def sound_groups(self) -> set[Group]:
        """Return the ready groups that may be trained, and those of the batch under way."""
        return {group for group in self.ready if group in self._sound} | self._under_way

    def figures(self) -> dict[str, float]:
        """Return metrics: groups that wait for rows that the store does not show yet, and those that failed among the newest."""
        failures = self._branch.ledger.skips.failures(self._settings.run_id, self._window)
        return {"groups_incomplete": float(len(self._incomplete)), "groups_failed": float(failures.count)}

    @property
    def _window(self) -> int:
        return max(_WINDOW_GROUPS, _BATCHES * self._settings.sampling.groups_per_batch)

    def _judge_again(self, build_spec: str, head: LedgerVersion) -> None:
        """Forget skips whose reason no longer holds: at the start, since settings may have changed, and after the branch went back."""
        before = self._head
        if before is None or head.version != before.version:
            self._sound.clear()
            if before is None or (head.parent_branch, head.policy_version.parent) != (before.branch, before.version):
                self._remove_outdated_skips(build_spec)
            if before is None:
                self._vocabulary = vocabulary_size(model_of(Path(head.policy_version.path)))
                self._stop_if_too_many_failed()
        self._head = head  # last: where the ledger fails, the next look judges again

    def _remove_outdated_skips(self, build_spec: str) -> None:
        again = self._branch.ledger.skips.remove_outdated(self._settings.run_id, build_spec, self._branch.lineage())
        for reason, count in again.items():
            logger.info("%d groups that were skipped as %s are looked at again: what the reason depends on has changed", count, reason)

    def _free_unused(self, ready: Collection[Group]) -> None:
        """Free what is held of groups that were taken by another trainer or changed: they are neither ready nor in the batch under way."""
        kept = {*ready, *self._under_way}
        self._incomplete = {group: state for group, state in self._incomplete.items() if group in kept}
        if unused := self._held.groups - kept:
            self._free(unused)

    def _free(self, groups: Collection[Group]) -> None:
        """Free what is held of groups."""
        self._sound = {group: version for group, version in self._sound.items() if group not in groups}
        self._held.free(groups)

    def _checked(self, groups: Sequence[Group], loaded: Loaded, head: LedgerVersion) -> dict[Group, Skip]:
        """Return those of the groups that may not be trained now."""
        return find_skips(
            groups,
            loaded,
            self._settings,
            lineage=self._branch.lineage(),
            tokenizer_hash=head.tokenizer_hash,
            vocabulary=self._vocabulary,
            of_phases=self._of_phases,
            claimed=self._branch.claimed,
        )

    def _claimed(self, chosen: Sequence[Group], loaded: Loaded) -> dict[Group, Skip]:
        """Return those groups of a batch of which a rollout is trained by now, or is in an earlier group of the batch as well."""
        return already_trained(self._branch.claimed(loaded.rollouts)) or same_ids(loaded.rollouts, chosen)

    def _skip(self, skips: Mapping[Group, Skip], head: LedgerVersion) -> None:
        if any(skip.reason is SkipReason.STALE for skip in skips.values()):
            self._on_stale()
        self._branch.ledger.skips.enter(skips, head.version)
        for reason in dict.fromkeys(skip.reason for skip in skips.values()):
            groups = [group for group, skip in skips.items() if skip.reason is reason]
            names = ", ".join(group.group_id for group in groups[:_NAMED]) + (", ..." if len(groups) > _NAMED else "")
            detail = f". {groups[0].group_id}: {skips[groups[0]].detail}" if skips[groups[0]].detail else ""
            logger.warning("%d groups are skipped (%s): %s%s. %s", len(groups), reason, names, detail.removesuffix("."), reason.remedy)
        self.ready = [group for group in self.ready if group not in skips]
        self._free(skips.keys())
        if any(skip.reason in FAILURES for skip in skips.values()):
            self._stop_if_too_many_failed()

    def _waiting(self) -> set[Group]:
        """Return the groups with missing rows whose next load is not due yet."""
        now = time.monotonic()
        return {group for group, incomplete in self._incomplete.items() if incomplete.again > now}

    def _wait(self, incomplete: Mapping[Group, str]) -> None:
        """Defer groups with missing rows; log each group once per state that it is seen in."""
        for group, detail in incomplete.items():
            before = self._incomplete.get(group)
            delay = min(2 * before.delay, _LATE_SECONDS) if before and before.detail == detail else _SOON_SECONDS
            if before is None or before.detail != detail:
                logger.warning("group %s is not ready yet: %s It is looked at again.", group.group_id, detail)
            self._incomplete[group] = _Incomplete(detail, delay, time.monotonic() + delay)
        self.ready = [group for group in self.ready if group not in incomplete]
        self._free(incomplete.keys())

    def _stop_if_too_many_failed(self) -> None:
        """Raise where more than trainer.alarms.max_failed_share of the newest groups failed."""
        settings, window = self._settings, self._window
        failures = self._branch.ledger.skips.failures(settings.run_id, window)
        if failures.count <= settings.alarms.max_failed_share * window or failures.newest is None:
            return
        reason, newest = failures.newest.reason, failures.newest
        others = ", ".join(f"{count} {name.value}" for name, count in failures.reasons.items())
        raise TrainerError(
            f"{failures.count} of the last {window} groups of run {settings.run_id!r} failed ({others}), more than "
            f"trainer.alarms.max_failed_share = {settings.alarms.max_failed_share:g} allows, most of them as {reason.value}. The newest is "
            f"group {newest.group.group_id!r}: {newest.detail} {reason.remedy} `spangrad train skipped --reason {reason.value}` lists "
            f"them. Once the cause is gone, `spangrad train restore --reason {reason.value}` brings them back; to go on without them, "
            "raise trainer.alarms.max_failed_share."
        )
