"""Loop of the builder: build once, or follow the store and build rollouts as they end.

Invariant: a builder that is killed anywhere can be started again: a rollout is forgotten here only after all its rows are written, and the
sink writes no revision twice.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from datetime import datetime

import polars as pl
import tenacity

from spangrad.errors import RuleError, StoreError
from spangrad.settings import Settings
from spangrad.store import datasets
from spangrad.store.clickhouse import connect
from transition_builder import specification
from transition_builder.batch_sizes import BuildBatches
from transition_builder.build import build
from transition_builder.completeness import reassigned_traces
from transition_builder.completeness.complete import decide, facts
from transition_builder.completeness.reassigned_traces import CONCLUDED, REASSIGNED
from transition_builder.completeness.resolve import NAMED, claim
from transition_builder.completeness.rootless_traces import merge, outdated_rollouts, rollouts_of, silent_rollouts
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.frames import Frames, Verdict, empty
from transition_builder.rewards import sql
from transition_builder.schemas import BUILT, MICROSECONDS, ROLLOUT, ROOTLESS, ROOTS, SPAN
from transition_builder.source import late_spans
from transition_builder.source.claims import Claims
from transition_builder.source.discovery import OVERLAP, Discovery
from transition_builder.source.queries import StoreReader
from transition_builder.source.rollouts import RolloutReader
from transition_builder.source.sink import Sink
from transition_builder.stopping import stoppable
from transition_builder.summary import ProgressCallback, Summary, no_progress

log = logging.getLogger(__name__)

_RECHECK_FRACTION = 0.05
"""Fraction of its waiting time after which a waiting rollout is checked again."""
ROLLOUTS_PER_READ = 1024
"""Rollouts whose spans without attributes are read at a time; bounds memory."""


class Builder:
    """Finds ended rollouts, remembers those that wait, builds those that are complete.

    Traces that no final root claims come second: their unconcluded calls are remembered, until their rollout ends, is silent for long
    enough, or turns out to have been built. Rollouts of which something arrives after they were built are processed like new ones.
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
        """Connect to the store.

        Args:
            settings: of the store and the build.
            since: build what has arrived since then; None: everything that was not built.
            run: build only rollouts whose spans name this run; None: of all runs.
            force: conclude everything that has ended, whatever of it may still arrive.
            on_progress: called with the progress.

        Raises:
            BuilderError: the specification is invalid.
            StoreError: the store does not answer.
        """
        specification.check(settings.builder)
        client = connect(settings.store, consistent=True)
        sql.check(client, settings.store.url, settings.builder)
        self._spec = settings.builder
        self._waiting_times = self._spec.model_copy(update={"incomplete_after_seconds": 0, "quiet_seconds": 0}) if force else self._spec
        self._force = force
        self._run = run
        self._on_progress = on_progress
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._reader = StoreReader(client, settings)
        self._discovery = Discovery(self._reader, since)
        self._source = RolloutReader(client, settings)
        self._claims = Claims(self._reader, name, settings.builder.lease_seconds)
        self._sink = Sink(self._reader, name)
        self._pending = empty({**ROOTS, "CheckedAt": MICROSECONDS})
        self._rootless = empty({**ROOTLESS, "CheckedAt": MICROSECONDS})
        of_rollouts = dict.fromkeys(ROLLOUT, pl.String())
        self._examined = empty(of_rollouts | {"Until": MICROSECONDS, "Examined": pl.UInt64()})
        self._late_rows = empty(of_rollouts | {"Rows": pl.UInt64()})
        self._reassigned = empty(REASSIGNED)
        self._done = 0
        self._batch_sizes = BuildBatches()

    def register(self, dataset: str) -> datasets.Dataset:
        """Register the specification under a dataset name.

        Raises:
            SettingsError: the name is invalid.
            StoreError: the store failed.
        """
        return datasets.register(self._reader.client, self._reader.url, dataset, self._spec.spec, self._spec.decides)

    def build_ready(self) -> Summary:
        """Build all rollouts that are complete now.

        Raises:
            BuilderError: a file of the specification was changed since the builder began.
            RuleError: a Python rule failed; nothing was written of the rollouts that it was evaluated for, and the next pass builds them.
            StoreError: the store failed; the next pass continues where this one stopped.
        """
        began = time.monotonic()
        specification.require_unchanged(self._spec, self._reader.spec)
        summary = Summary()
        now = self._reader.now()
        self._discover(now)
        self._done = 0
        self._progress(0)
        if self._reassigned.height:
            self._rebuild_former(summary)
        if self._pending.height:
            self._conclude(now, summary)
        if self._rootless.height:
            self._conclude_rootless(now, summary)
        summary.waiting = self._pending.height
        summary.seconds = time.monotonic() - began
        if summary.rollouts:
            log.info("built %s", summary)
        return summary

    def _discover(self, now: datetime) -> None:
        """Remember rollouts that ended, traces without a final root, and built rollouts that are out of date."""
        self._discovery.begin(now)
        self._add_pending(self._discovery.new_roots())
        self._remember_stale(self._discovery.arrivals())
        self._rootless = merge(self._rootless, self._of_run(self._discovery.rootless()))
        self._discovery.done()
        self._examined = self._examined.filter(now - pl.col("Until") < 2 * OVERLAP)

    def _remember_stale(self, arrived: pl.DataFrame) -> None:
        """Queue again the rollouts of which something has arrived since they were built."""
        if arrived.is_empty():
            return
        keys = self._discovery.keys(arrived)
        owners = self._discovery.owners(keys["TraceId"])
        self._remember_reassigned(arrived, reassigned_traces.former_owners(keys, owners))
        claimed = claim(arrived, owners).rename({"RolloutKey": "RolloutId"})
        built = self._built(claimed["RolloutId"])
        outdated = outdated_rollouts(claimed, built)
        if self._discovery.sweeps:
            outdated = pl.concat([outdated, self._with_late_rows(built.join(outdated, on=ROLLOUT, how="anti"))])
        if outdated.is_empty():
            return
        roots = self._discovery.roots(outdated["RolloutId"]).filter("Final").join(outdated, on=ROLLOUT, how="semi")
        self._add_pending(roots)
        rootless = outdated.join(roots, on=ROLLOUT, how="anti")
        named = claimed.select(ROLLOUT).with_row_index("row")
        matching = named.join(rootless.select("RolloutId").unique(), on="RolloutId", how="semi").filter(
            (pl.col("RunId") == "") | pl.struct(ROLLOUT).is_in(rootless.select(pl.struct(ROLLOUT)).to_series().implode())
        )
        self._rootless = merge(self._rootless, self._of_run(arrived[matching["row"]]))

    def _remember_reassigned(self, arrived: pl.DataFrame, former_owners: pl.DataFrame) -> None:
        """Remember rollouts that were built with calls that now belong to another rollout."""
        built = self._reader.built(former_owners["RolloutId"])
        traces = self._discovery.concluded(built["RolloutId"]).join(
            former_owners, on=["TraceId", "RolloutId"], how="semi", maintain_order="left"
        )
        newest = arrived.group_by("TraceId").agg(pl.col("IngestedAt").max())
        reassigned = self._of_run(traces).join(newest, on="TraceId", maintain_order="left")
        self._reassigned = pl.concat([self._reassigned.join(reassigned, on=list(CONCLUDED), how="anti"), reassigned])

    def _rebuild_former(self, summary: Summary) -> None:
        """Rebuild rollouts that lost calls to other rollouts, and queue those calls."""
        built = self._reader.built(self._reassigned["RolloutId"])
        for rollouts in self._batch_sizes.of(self._claims.take(reassigned_traces.to_rebuild(self._reassigned, built), built)):
            reassigned = self._reassigned.join(rollouts, on=ROLLOUT, how="semi")
            self._build(self._source.claimed_frames(rollouts, reassigned["TraceId"]), summary)
            self._rootless = merge(self._rootless, reassigned_traces.rootless(reassigned))
            self._reassigned = self._reassigned.join(rollouts, on=ROLLOUT, how="anti")

    def _with_late_rows(self, built: pl.DataFrame) -> pl.DataFrame:
        """Return those of BUILT that lack rows in flight when they were read, in the form of `outdated_rollouts`. Remembered until read."""
        candidates = late_spans.maybe_incomplete(built)
        incomplete = late_spans.with_new_rows(candidates, late_spans.count(self._discovery.tally(candidates["RolloutId"]), candidates))
        self._late_rows = pl.concat([self._late_rows.join(incomplete, on=ROLLOUT, how="anti"), incomplete])
        return candidates.join(incomplete, on=ROLLOUT, how="semi").select(*ROLLOUT, LastArrival="Watermark")

    def _conclude(self, now: datetime, summary: Summary) -> None:
        """Decide on the rollouts that are due, and build those that no longer wait."""
        due = _due(self._pending, now)
        for batch in due.iter_slices(ROLLOUTS_PER_READ):
            arrivals = self._source.arrivals(batch)
            owners = self._source.owners(arrivals)
            judged = self._judged(batch, arrivals, owners, now)
            # A rollout without a verdict has no final root any more, and waits like one that never had a root.
            self._pending = self._pending.join(batch.join(judged, on=ROLLOUT, how="anti"), on=ROLLOUT, how="anti")
            for rollouts in self._batch_sizes.of(self._claimed(_ended(judged))):
                frames = self._frames(rollouts, arrivals, owners, now)
                if frames.rollouts.height:
                    self._build(frames, summary)
        self._pending = _checked(self._pending, due, ROLLOUT, now)

    def _judged(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, owners: pl.DataFrame, now: datetime) -> pl.DataFrame:
        """Return ROLLOUTS for the given rollouts that have a final root."""
        return decide(facts(arrivals, owners), now, self._waiting_times).join(rollouts, on=ROLLOUT, how="semi")

    def _claimed(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """Claim those of the given ROLLOUTS that are still to be built by this builder; forget those that other builders have built."""
        if rollouts.is_empty():
            return rollouts
        built = self._built(rollouts["RolloutId"])
        current = rollouts.join(built, on=ROLLOUT).filter(pl.col("Watermark") >= pl.col("LastArrival"))
        self._forget(current)
        return self._claims.take(rollouts.join(current, on=ROLLOUT, how="anti"), built)

    def _built(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return BUILT of the rollouts; rows that were examined and changed nothing count as read."""
        built = self._reader.built(rollouts).join(self._examined, on=ROLLOUT, how="left").join(self._late_rows, on=ROLLOUT, how="left")
        read = pl.max_horizontal("RowsRead", "Examined")
        is_incomplete = (pl.col("Rows") > read).fill_null(False)
        until = (
            pl.when(is_incomplete)
            .then(pl.lit(late_spans.LONG_AGO).cast(BUILT["Watermark"]))
            .otherwise(pl.max_horizontal("Watermark", "Until"))
        )
        return built.with_columns(Watermark=until, RowsRead=read).drop("Until", "Examined", "Rows")

    def _frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, owners: pl.DataFrame, now: datetime) -> Frames:
        """Read the frames of ended rollouts, restricted to spans whose calls are visible as well."""
        frames = self._source.frames(rollouts, arrivals, owners)
        unseen = _unseen(frames)
        if unseen.is_empty():
            return frames
        seen = arrivals.join(unseen, on=SPAN, how="anti")
        return self._source.frames(_ended(self._judged(rollouts, seen, owners, now)), seen, owners)

    def _claimed_frames(self, rollouts: pl.DataFrame, rootless: pl.DataFrame, now: datetime) -> Frames:
        """Read the frames of silent rollouts, except those with calls not yet visible; `rootless`: rows of their calls, with TraceId."""
        frames = self._source.claimed_frames(rollouts, rootless.join(rollouts, on=ROLLOUT, how="semi")["TraceId"])
        incomplete = _unseen(frames).select(RolloutId="RolloutKey").unique()
        # Later than any insert ends, there is nothing to wait for.
        waiting = rollouts.filter(now - pl.col("LastArrival") < OVERLAP).join(incomplete, on="RolloutId", how="semi")
        return self._claimed_frames(rollouts.join(waiting, on=ROLLOUT, how="anti"), rootless, now) if waiting.height else frames

    def _conclude_rootless(self, now: datetime, summary: Summary) -> None:
        """Build the rollouts without a final root span that have been silent for long enough."""
        due = _due(self._rootless.filter(now - pl.col("IngestedAt") >= self._minimum_silence()), now)
        if due.is_empty():
            return
        owners = self._discovery.owners(due["TraceId"])
        activity = self._discovery.activity(claim(due, owners)["RolloutKey"])
        rootless = rollouts_of(due, owners, activity)
        built = self._built(rootless["RolloutId"])
        current = rootless.join(built, on=ROLLOUT).filter(pl.col("Watermark") >= pl.col("IngestedAt"))
        waiting = rootless.join(current, on=ROLLOUT, how="anti").join(self._pending, on=ROLLOUT, how="anti")
        roots, traces = self._discovery.roots(waiting["RolloutId"]), self._discovery.traces(waiting["TraceId"])
        silent = silent_rollouts(waiting, roots, activity, traces, now, self._spec, force=self._force)
        self._rootless = _checked(self._rootless, due, ["TraceId", "RolloutKey"], now)
        for batch in silent.iter_slices(ROLLOUTS_PER_READ):
            for rollouts in self._batch_sizes.of(self._claimed(batch)):
                frames = self._claimed_frames(rollouts, waiting, now)
                if frames.rollouts.height:
                    self._build(frames, summary)
        for batch in (current, rootless.join(roots.filter("Final"), on=ROLLOUT, how="semi")):
            self._rootless = self._rootless.join(batch, on="TraceId", how="anti")

    def _minimum_silence(self) -> pl.Expr:
        """Return the minimum silence of a row's rollout."""
        announced = NAMED & (pl.col("RunId") != "") & (pl.col("Mode") != "")
        seconds = pl.when(announced).then(self._spec.incomplete_after_seconds).otherwise(self._waiting_times.quiet_seconds)
        return pl.duration(milliseconds=seconds * 1000)

    def _build(self, frames: Frames, summary: Summary) -> None:
        self._batch_sizes.record(frames)
        summary.add(self._sink.write(build(frames, self._spec), frames.rollouts))
        self._forget(frames.rollouts)
        read = frames.spans["TraceId"].unique()
        self._rootless = self._rootless.filter(NAMED | ~pl.col("TraceId").is_in(read.implode()))
        examined = frames.rollouts.select(*ROLLOUT, Until="LastArrival", Examined="RowsRead")
        self._examined = pl.concat([self._examined.join(examined, on=ROLLOUT, how="anti"), examined])
        self._progress(frames.rollouts.height)

    def _forget(self, rollouts: pl.DataFrame) -> None:
        """Forget rollouts that are built."""
        self._late_rows = self._late_rows.join(rollouts, on=ROLLOUT, how="anti")
        self._pending = self._pending.join(rollouts, on=ROLLOUT, how="anti")
        named = pl.struct("RunId", RolloutId="RolloutKey").is_in(rollouts.select(pl.struct(ROLLOUT)).to_series().implode())
        any_run = (pl.col("RunId") == "") & pl.col("RolloutKey").is_in(rollouts["RolloutId"].implode())
        self._rootless = self._rootless.filter(~(NAMED & (named | any_run)))

    def _progress(self, done: int) -> None:
        self._done += done
        waiting = pl.concat([self._pending["RolloutId"], self._rootless["RolloutKey"].alias("RolloutId")]).n_unique()
        self._on_progress(self._done, self._done + waiting)

    def _add_pending(self, roots: pl.DataFrame) -> None:
        new = self._of_run(roots).sort("Attempt").unique(ROLLOUT, keep="last").join(self._pending, on=ROLLOUT, how="anti")
        self._pending = pl.concat([self._pending, new.with_columns(CheckedAt=pl.col("IngestedAt"))])

    def _of_run(self, rows: pl.DataFrame) -> pl.DataFrame:
        return rows if self._run is None else rows.filter(pl.col("RunId") == self._run)


def _ended(judged: pl.DataFrame) -> pl.DataFrame:
    """Return those of ROLLOUTS that no longer wait."""
    return judged.filter(pl.col("Verdict") != Verdict.WAITING.value)


def _unseen(frames: Frames) -> pl.DataFrame:
    """Return gateway spans whose calls are not visible yet: an insert appears in one table before the other."""
    return frames.spans.filter(IS_GATEWAY & (pl.col("RowKind") == "span")).join(frames.calls, on=SPAN, how="anti")


def _due(waiting: pl.DataFrame, now: datetime) -> pl.DataFrame:
    return waiting.filter((now - pl.col("CheckedAt")) >= (pl.col("CheckedAt") - pl.col("IngestedAt")) * _RECHECK_FRACTION)


def _checked(waiting: pl.DataFrame, due: pl.DataFrame, key: list[str], now: datetime) -> pl.DataFrame:
    """Return the waiting rows, with those that were due dated now."""
    was_due = pl.struct(key).is_in(due.select(pl.struct(key)).to_series().implode())
    return waiting.with_columns(CheckedAt=pl.when(was_due).then(now).otherwise("CheckedAt").cast(MICROSECONDS))


def build_once(settings: Settings) -> Summary:
    """Build every rollout that is complete now.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    summary = _started(settings).build_ready()
    if not summary.rollouts:
        log.info("nothing to build; %d rollouts wait", summary.waiting)
    return summary


def build_all(settings: Settings, on_progress: ProgressCallback = no_progress) -> Summary:
    """Conclude everything that has ended without waiting for late spans: those make a new revision.

    A rollout that a runner announced ends with its final root, or with `incomplete_after_seconds` of silence.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    return _started(settings, force=True, on_progress=on_progress).build_ready()


def rebuild(settings: Settings, since: datetime, on_progress: ProgressCallback, run: str | None = None) -> Summary:
    """Build everything that has ended, and whose root or calls arrived since a time, by the settings' specification.

    Builds of other specifications stay; what this one has built already is not built again. The dataset is not registered. With a
    run, only its rollouts are built.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    return Builder(settings, since=since, run=run, force=True, on_progress=on_progress).build_ready()


def follow(settings: Settings) -> None:
    """Build rollouts as they become complete, until SIGTERM or SIGINT.

    Failures of the store and of Python rules are retried with back-off while following.

    Raises:
        BuilderError: a file of the specification was changed.
        RuleError: a Python rule fails at the start.
        StoreError: the store does not answer at the start.
    """
    with stoppable():
        builder = _started(settings)
        builder.build_ready()
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreError, RuleError)),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5),
            before_sleep=lambda state: log.warning("%s Trying again.", state.outcome.exception() if state.outcome else ""),
        )
        while True:
            time.sleep(settings.builder.poll_seconds)
            retrying(builder.build_ready)


def _started(settings: Settings, *, force: bool = False, on_progress: ProgressCallback = no_progress) -> Builder:
    """Return a builder whose specification is registered under the dataset's name."""
    builder = Builder(settings, force=force, on_progress=on_progress)
    builder.register(settings.builder.dataset)
    return builder
