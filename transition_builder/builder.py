"""The builder: finds what ended, remembers what waits, builds what is complete, a pass at a time.

Invariant: a builder that is killed anywhere can be started again: a rollout is forgotten here only after all its rows are written, and the
sink writes no revision twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import polars as pl

from spangrad.settings import Settings
from spangrad.store import datasets
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from spangrad.types import Mode
from transition_builder import specification, waiting
from transition_builder.batch_sizes import ROLLOUTS_A_READ, BuildBatches
from transition_builder.build import build
from transition_builder.completeness import reassigned_traces
from transition_builder.completeness.reassigned_traces import REASSIGNED
from transition_builder.completeness.resolve import NAMED, claim
from transition_builder.completeness.rootless_traces import decide_rootless, merge, outdated_rollouts, rollouts_of, without
from transition_builder.ended import EndedRollouts, ended
from transition_builder.frames import Frames, conform, empty
from transition_builder.rewards import sql
from transition_builder.schemas import ARRIVED, BUILT, MICROSECONDS, PENDING, ROLLOUT, ROOTLESS
from transition_builder.slices import SlicePace, slice_seconds
from transition_builder.source.claims import Claims, new_builder_name
from transition_builder.source.discovery import BETWEEN_SWEEPS, Discovery
from transition_builder.source.examined_builds import ExaminedBuilds
from transition_builder.source.known_builds import KnownBuilds
from transition_builder.source.marks import Marks
from transition_builder.source.queries import StoreReader
from transition_builder.source.rollouts import RolloutReader
from transition_builder.source.sink import Sink
from transition_builder.summary import ProgressCallback, Summary, no_progress

log = logging.getLogger(__name__)

BEHIND_SECONDS = 2.0
"""Longest time, in seconds, for which spans that end no rollout wait for others; shorter where `builder.quiet_seconds` is."""
_NAMES_ITSELF = NAMED & (pl.col("RunId") != "")


class Builder:
    """Finds ended rollouts, remembers those that wait, builds those that are complete.

    Production and trials come behind, in slices; between two slices it looks for training again. Traces that no final root claims are among
    them: their calls are remembered until their rollout ends, is silent for long enough, or turns out to have been built. Rollouts of which
    something arrives after they were built are processed like new ones.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        since: datetime | None = None,
        run: str | None = None,
        force: bool = False,
        on_progress: ProgressCallback = no_progress,
    ) -> None:
        """Connect to the store, and say that this builder is at work.

        Args:
            settings: of the store and the build.
            since: build what has arrived since then; None: everything that was not built, from the newest mark on.
            run: build only rollouts whose spans name this run; None: of all runs.
            force: conclude everything that has ended, whatever of it may still arrive.
            on_progress: called with the progress.

        Raises:
            BuilderError: a rule, or the file of an SQL reward, is invalid.
            SettingsError: a pattern of the selection is no regular expression, or a file is not there.
            StoreError: the store does not answer.
        """
        specification.check(settings.builder)
        client = connect(settings.store, consistent=True, settled=True)
        sql.check(client, settings.builder)
        self._spec = settings.builder
        self._waiting_times = self._spec.model_copy(update={"incomplete_after_seconds": 0, "quiet_seconds": 0}) if force else self._spec
        self._silence = waiting.silence(self._spec, self._waiting_times.quiet_seconds)
        self._force = force
        self._run = run
        self._on_progress = on_progress
        name = new_builder_name()
        self._reader = StoreReader(client, settings)
        is_usual = since is None and run is None and not force and self._reader.as_of is None
        self._discovery = Discovery(self._reader, since, Marks(self._reader, name) if is_usual else None)
        self._source = RolloutReader(client, settings)
        self._ended = EndedRollouts(self._source, self._waiting_times)
        self._claims = Claims(self._reader, name, settings.builder.lease_seconds)
        self._known = KnownBuilds(self._reader)
        self._builds = ExaminedBuilds(self._known, self._discovery)
        self._sink = Sink(self._reader, self._known, name)
        self._arrivals = Arrivals(client, settings.store, [Topic.ROOTS, Topic.SPANS], self._spec.poll_seconds)
        self._claims.renew()
        self._now, self._looked = self._reader.now(), time.monotonic()
        self._pending = empty({**PENDING, "DueAt": MICROSECONDS})
        self._behind = empty(ARRIVED)
        self._behind_due = time.monotonic()
        self._announced_at = float("-inf")
        self._rootless = empty({**ROOTLESS, "DueAt": MICROSECONDS})
        self._reassigned = empty(REASSIGNED)
        self._batch_sizes, self._pace = BuildBatches(), SlicePace()
        self._is_quiet = False
        """True if nothing has arrived since the last pass."""
        self._done = 0

    def register(self, dataset: str) -> datasets.Dataset:
        """Register the specification under a dataset name.

        Raises:
            SettingsError: the name is invalid.
            StoreError: the store failed.
        """
        return datasets.register(self._reader.client, dataset, self._spec.spec, self._spec.decides)

    def build_ready(self, *, urgent: bool = False) -> Summary:
        """Build all rollouts that are complete now.

        Args:
            urgent: leave production and trials to a later pass.

        Raises:
            BuilderError: a file of the specification was changed since the builder began.
            RuleError: a rule failed; nothing was written of the rollouts that it was evaluated for, and the next pass builds them.
            StoreError: the store failed; the next pass continues where this one stopped.
        """
        began, summary, self._done = time.monotonic(), Summary(), 0
        specification.require_unchanged(self._spec, self._reader.spec)
        # Training is looked for alone after a pass that failed: it may be the sweep that fails.
        is_quiet, self._is_quiet = self._is_quiet, False
        self._look(summary, sweeps=self._discovery.is_first or (is_quiet and self._discovery.sweep_is_due(self._clock())))
        if not urgent:
            # After training: a sweep reads much.
            if self._discovery.sweep_is_due(self._clock()):
                self._look(summary, sweeps=True)
            self._build_behind(summary)
            if self._reassigned.is_empty() and not self._builds.lacks_rows:
                self._discovery.mark(waiting.oldest(self._pending, self._rootless))
        summary.waiting = self._pending.height
        summary.seconds = time.monotonic() - began
        if summary.rollouts:
            log.info("built %s", summary)
        return summary

    def wait(self) -> bool:
        """Wait until there may be something to build; return whether it is urgent, so that production and trials can wait.

        Raises:
            StoreError: the store, which is not ours, failed.
        """
        if (arrived := self._arrivals.wait(self._seconds_to_rest())) == frozenset({Topic.SPANS}):
            # They end no rollout: more of them will come, unless a rollout waits for these.
            patience = 0.0 if self._pending.height else self._behind_due - time.monotonic()
            self._arrivals.wait(max(self._spec.poll_seconds, patience), Topic.ROOTS)
        self._is_quiet = not arrived
        return time.monotonic() < self._behind_due

    def lags(self) -> Mapping[str, tuple[float, int]]:
        """Return, by mode, the age in seconds of the oldest rollout that ended and is not built, and the number of those."""
        now = self._clock()
        return waiting.lags(self._pending, self._rootless.filter(now - pl.col("IngestedAt") >= self._silence), now, [*Mode])

    def _seconds_to_rest(self) -> float:
        """Return the time until something is due by its age, in seconds, if nothing arrives."""
        now, until_behind = self._clock(), self._behind_due - time.monotonic()
        pending = waiting.seconds_until_due(self._pending, now)
        rootless = 0.0 if self._behind.height else waiting.seconds_until_due(self._rootless, now, self._silence)
        until = min(pending, max(rootless, until_behind), BETWEEN_SWEEPS / timedelta(seconds=1))
        return max(self._spec.poll_seconds, until)

    def _clock(self) -> datetime:
        """Return the store's clock, as far as this process knows it."""
        return self._now + timedelta(seconds=time.monotonic() - self._looked)

    def _look(self, summary: Summary, *, sweeps: bool = False) -> None:
        """Remember what ended or is out of date, and all else that arrived, for later; build what is complete of training."""
        self._claims.renew()
        self._known.forget()
        self._discovery.begin(self._reader.as_of or self._clock(), sweeps=sweeps)
        self._remember_arrivals()
        self._progress(0)
        self._build_announced(summary)

    def _remember_arrivals(self) -> None:
        """Remember what has arrived since the last look; in a sweep, all of it."""
        arrived = self._discovery.arrivals()
        self._now, self._looked = self._discovery.now, time.monotonic()
        if self._discovery.is_first:
            self._add_pending(self._discovery.new_roots())
        self._pending = waiting.touched(self._pending, arrived)
        self._rootless = waiting.continued(self._rootless, arrived, self._now + timedelta(seconds=self._waiting_times.quiet_seconds))
        named = arrived.filter(_NAMES_ITSELF)
        rollouts, built = named.rename({"RolloutKey": "RolloutId"}), empty(BUILT)
        if named.height or self._pending.height:
            ending = self._of_run(rollouts.filter("HasRoot"))
            self._claims.begin()
            # What a sweep finds is built but for a few: reading it ahead would be for nothing.
            unbuilt = ending.clear() if self._discovery.sweeps else ending
            self._source.begin(waiting.to_conclude(self._pending, unbuilt, self._now))
            built = self._remember_stale(named, rollouts)
            self._add_pending(ending.join(built, on=ROLLOUT, how="anti"))
        behind = pl.concat([self._behind, arrived])
        if self._discovery.sweeps:
            # Kept only when it is done: a sweep that fails reads the same again.
            # Rows of built rollouts bring no call without a root. The first sweep reads no other rows: such calls may have come before it.
            all_built = named.height == arrived.height and rollouts.join(built, on=ROLLOUT, how="anti").is_empty()
            brings_none = all_built and not self._discovery.is_first
            self._look_behind(behind, empty(ROOTLESS) if brings_none else self._discovery.rootless())
        else:
            self._behind = behind
        self._discovery.done()
        self._builds.forget_before(self._now)

    def _look_behind(self, arrived: pl.DataFrame, rootless: pl.DataFrame | None = None) -> None:
        """Remember traces without a final root (ROOTLESS of a sweep, else of what arrived), and built rollouts that are out of date."""
        if arrived.height:
            keys = self._discovery.keys(arrived)
            owners = self._discovery.owners(keys["TraceId"])
            self._remember_reassigned(arrived, reassigned_traces.former_owners(keys, owners))
            if (unnamed := arrived.filter(~_NAMES_ITSELF)).height:
                claimed = claim(unnamed, owners)
                self._pending = waiting.touched(self._pending, claimed)
                self._remember_stale(unnamed, claimed.rename({"RolloutKey": "RolloutId"}))
        new = self._discovery.rootless_of(arrived) if rootless is None else rootless
        if new.height:
            self._rootless = merge(self._rootless, self._of_run(new))
        self._behind = self._behind.clear()

    def _remember_stale(self, arrived: pl.DataFrame, claimed: pl.DataFrame) -> pl.DataFrame:
        """Queue again those of which something (ARRIVED; `claimed`: by rollout) has arrived since they were built; return BUILT."""
        built = self._builds.of(claimed["RolloutId"])
        if built.is_empty():
            return built
        outdated = outdated_rollouts(claimed, built)
        if self._discovery.sweeps:
            outdated = pl.concat([outdated, self._builds.with_late_rows(built.join(outdated, on=ROLLOUT, how="anti"))])
        if outdated.is_empty():
            return built
        roots = self._discovery.roots(outdated["RolloutId"]).filter("Final").join(outdated, on=ROLLOUT, how="semi")
        self._add_pending(roots)
        rootless = outdated.join(roots, on=ROLLOUT, how="anti")
        named = claimed[ROLLOUT].with_row_index("row")
        matching = named.join(rootless.select("RolloutId").unique(), on="RolloutId", how="semi").filter(
            (pl.col("RunId") == "") | pl.struct(ROLLOUT).is_in(rootless.select(pl.struct(ROLLOUT)).to_series().implode())
        )
        self._rootless = merge(self._rootless, self._of_run(conform(arrived[matching["row"]], ROOTLESS)))
        return built

    def _remember_reassigned(self, arrived: pl.DataFrame, former_owners: pl.DataFrame) -> None:
        """Remember rollouts that were built with calls that now belong to another rollout."""
        if former_owners.is_empty():
            return
        built = self._known.of(former_owners["RolloutId"])
        traces = self._discovery.concluded(built["RolloutId"]).join(
            former_owners, on=["TraceId", "RolloutId"], how="semi", maintain_order="left"
        )
        self._reassigned = reassigned_traces.merge(self._reassigned, self._of_run(traces), arrived)

    def _rebuild_former(self, summary: Summary) -> None:
        """Rebuild rollouts that lost calls to other rollouts, and queue those calls."""
        built = self._known.of(self._reassigned["RolloutId"])
        for rollouts in self._batch_sizes.of(self._claims.take(reassigned_traces.to_rebuild(self._reassigned, built), built)):
            reassigned = self._reassigned.join(rollouts, on=ROLLOUT, how="semi")
            self._build(self._source.claimed_frames(rollouts, reassigned["TraceId"]), summary)
            self._rootless = merge(self._rootless, reassigned_traces.rootless(reassigned))
            self._reassigned = self._reassigned.join(rollouts, on=ROLLOUT, how="anti")

    def _build_announced(self, summary: Summary) -> None:
        """Build what is complete of training, validation and their baselines, the oldest first."""
        due = waiting.due(self._pending.filter(~waiting.IS_BEHIND), self._now).sort("IngestedAt")
        if due.height:
            self._announced_at = time.monotonic()
        for batch in due.iter_slices(ROLLOUTS_A_READ):
            self._conclude(batch, summary)

    def _build_behind(self, summary: Summary) -> None:
        """Build what is complete of production and of trials in slices, and what ends of training between two of them."""
        self._look_behind(self._behind)
        if self._reassigned.height:
            self._rebuild_former(summary)
        for batch in self._slices(waiting.due(self._pending.filter(waiting.IS_BEHIND), self._now), "RolloutId", summary):
            self._conclude(batch, summary)
        silent = self._rootless.filter(self._now - pl.col("IngestedAt") >= self._silence)
        for batch in self._slices(waiting.due(silent, self._now), "RolloutKey", summary):
            self._conclude_rootless(batch, summary)
        self._behind_due = time.monotonic() + min(BEHIND_SECONDS, self._spec.quiet_seconds / 4)

    def _slices(self, rows: pl.DataFrame, key: str, summary: Summary) -> Iterator[pl.DataFrame]:
        """Return rows by slices of rollouts; after each, build what has ended of training since, and sweep if due: a backlog takes long."""

        def look() -> None:
            if (sweeps := self._discovery.sweep_is_due(self._clock())) or self._arrivals.wait(0, Topic.ROOTS):
                self._look(summary, sweeps=sweeps)

        return self._pace.slices(rows, key, lambda: slice_seconds(time.monotonic() - self._announced_at), look)

    def _conclude(self, due: pl.DataFrame, summary: Summary) -> None:
        """Decide on rollouts with a root that are due (PENDING), and build those that no longer wait."""
        now = self._now
        for portion in self._source.portions(due):
            arrivals = self._source.arrivals(portion)
            owners = self._source.owners(arrivals)
            judged = self._ended.judged(portion, arrivals, owners, now)
            # A rollout without a verdict has no final root, and waits like one that never had a root.
            if judged.height < portion.height:
                self._pending = self._pending.join(portion.join(judged, on=ROLLOUT, how="anti"), on=ROLLOUT, how="anti")
            for rollouts in self._batch_sizes.of(self._claimed(ended(judged))):
                self._build(self._ended.frames(rollouts, arrivals, owners, now), summary)
            self._pending = waiting.checked(self._pending, judged, ROLLOUT, now)

    def _claimed(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """Claim those of the given ROLLOUTS that are still to be built by this builder; forget those that other builders have built."""
        if rollouts.is_empty():
            return rollouts
        built = self._builds.of(rollouts["RolloutId"])
        if built.height:
            current = rollouts.join(built, on=ROLLOUT).filter(pl.col("Watermark") >= pl.col("LastArrival"))
            self._forget(current)
            rollouts = rollouts.join(current, on=ROLLOUT, how="anti")
        taken = self._claims.take(rollouts, built)
        if not self._claims.alone:
            self._known.forget()
        return taken

    def _conclude_rootless(self, due: pl.DataFrame, summary: Summary) -> None:
        """Build those rollouts without a final root span that have been silent for long enough, of ROOTLESS that are due."""
        now = self._now
        owners = self._discovery.owners(due["TraceId"])
        activity = self._discovery.activity(claim(due, owners)["RolloutKey"])
        rootless = rollouts_of(due, owners, activity)
        built = self._builds.of(rootless["RolloutId"])
        # Of several traces of a rollout, one may have been read and another not.
        current = rootless.join(built, on=ROLLOUT).filter(pl.col("Watermark") >= pl.col("IngestedAt").max().over(ROLLOUT))
        unbuilt = rootless.join(current, on=ROLLOUT, how="anti").join(self._pending, on=ROLLOUT, how="anti")
        roots = self._discovery.roots(unbuilt.select(pl.col("RolloutId").filter("Ours")).to_series())
        traces = self._discovery.traces(unbuilt["TraceId"])
        judged = decide_rootless(unbuilt, roots, activity, traces, now, self._spec, force=self._force)
        changes_at = rootless.join(judged, on=ROLLOUT, how="left", maintain_order="left")["ChangesAt"]
        self._rootless = waiting.checked(self._rootless, due.with_columns(changes_at), ["TraceId", "RolloutKey"], now)
        for rollouts in self._batch_sizes.of(self._claimed(ended(judged))):
            self._build(self._ended.claimed_frames(rollouts, unbuilt, now), summary)
        concluded = pl.concat([current[ROLLOUT], roots.filter("Final")[ROLLOUT]])
        self._rootless = without(self._rootless, due, rootless, concluded)

    def _build(self, frames: Frames, summary: Summary) -> None:
        if frames.rollouts.is_empty():
            return
        self._batch_sizes.record(frames)
        self._pace.count(frames.rollouts.height, frames.spans.height)
        built = build(frames, self._spec)
        specification.require_unchanged(self._spec, self._reader.spec)  # again: its files were read since
        summary.add(self._sink.write(built, frames.rollouts))
        self._forget(frames.rollouts)
        if self._rootless.height:
            read = frames.spans["TraceId"].unique()
            self._rootless = self._rootless.filter(NAMED | ~pl.col("TraceId").is_in(read.implode()))
        self._builds.examined(frames.rollouts)
        self._progress(frames.rollouts.height)

    def _forget(self, rollouts: pl.DataFrame) -> None:
        """Forget rollouts that are built."""
        self._builds.up_to_date(rollouts)
        if self._pending.height:
            self._pending = self._pending.join(rollouts, on=ROLLOUT, how="anti")
        if self._rootless.is_empty():
            return
        named = pl.struct("RunId", RolloutId="RolloutKey").is_in(rollouts.select(pl.struct(ROLLOUT)).to_series().implode())
        any_run = (pl.col("RunId") == "") & pl.col("RolloutKey").is_in(rollouts["RolloutId"].implode())
        self._rootless = self._rootless.filter(~(NAMED & (named | any_run)))

    def _progress(self, done: int) -> None:
        self._done += done
        left = pl.concat([self._pending["RolloutId"], self._rootless["RolloutKey"].alias("RolloutId")]).n_unique()
        self._on_progress(self._done, self._done + left)

    def _add_pending(self, roots: pl.DataFrame) -> None:
        """Remember rollouts by any frame with the columns of PENDING, and Attempt."""
        if roots.is_empty():
            return
        new = self._of_run(roots).sort("Attempt").unique(ROLLOUT, keep="last").join(self._pending, on=ROLLOUT, how="anti")
        self._pending = pl.concat([self._pending, conform(new, PENDING).with_columns(DueAt=pl.col("IngestedAt"))])

    def _of_run(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows if self._run is None else rows.filter(pl.col("RunId") == self._run)
