"""The builder at work: once, or for as long as rollouts come.

In: settings. Out: transitions, drops and rewards in the store, and a line in the log for each build. Invariant: what is
killed anywhere can be started again: a rollout is forgotten here only after all its rows are written, and the sink
writes no row twice.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType

import polars as pl
import tenacity

from spangrad.clickhouse import connect
from spangrad.errors import BuilderError, StoreError
from spangrad.settings import BuilderSettings, Settings
from transition_builder.build import build
from transition_builder.complete import decide, facts
from transition_builder.dialects.gateway import IS_GATEWAY
from transition_builder.frames import LOOSE, ROLLOUTS, ROOTS, Built, Frames, Verdict, concat, empty
from transition_builder.sink import Sink
from transition_builder.source import Source
from transition_builder.unclaimed import claim, judge, late, rollouts_of

log = logging.getLogger(__name__)

CALLS_A_BUILD = 2048
"""Calls built at a time, about: bounds memory."""
_CALLS_UNKNOWN = 16
_PATIENCE = 0.05
"""A waiting rollout is looked at again after this fraction of the time that it has waited."""
ROLLOUTS_A_LOOK = 500
"""Rollouts whose spans are read at a time: bounds memory."""
_ROLLOUT = ["RunId", "RolloutId"]
_SPAN = ["TraceId", "SpanId"]


@dataclass(slots=True)
class Summary:
    """What a look at the store led to."""

    rollouts: int = 0
    transitions: int = 0
    drops: Counter[str] = field(default_factory=Counter[str])
    """Rows by reason."""
    rewards: int = 0
    waiting: int = 0
    """Rollouts that ended and are not complete."""
    seconds: float = 0.0

    def add(self, built: Built) -> None:
        """Count what was written."""
        self.transitions += built.transitions.height
        self.drops.update(built.drops["Reason"])
        self.rewards += built.rewards.height

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.drops.items()))
        return (
            f"{self.rollouts} rollouts: {self.transitions} transitions, {self.drops.total()} drops{f' ({reasons})' if reasons else ''}, "
            f"{self.rewards} rewards in {self.seconds:.3f} s; {self.waiting} wait"
        )


class Builder:
    """Looks for ended rollouts, remembers those that wait, builds those that are complete.

    What no final root claims is looked at second: calls that nobody has concluded are remembered, until their rollout ends, is
    silent for long enough, or turns out to have been built.
    """

    def __init__(self, settings: Settings) -> None:
        """Connect to the store.

        Raises:
            BuilderError: `builder.agent_pattern` is no regular expression.
            StoreError: it does not answer.
        """
        _check(settings.builder)
        client = connect(settings.store)
        self._spec = settings.builder
        self._source = Source(client, settings)
        self._sink = Sink(client, settings)
        self._pending = empty(ROOTS).with_columns(CheckedAt=pl.col("IngestedAt"))
        self._loose = empty(LOOSE).with_columns(CheckedAt=pl.col("IngestedAt"))

    def look(self) -> Summary:
        """Build whatever is complete now.

        Raises:
            StoreError: the store failed; the next look takes up what this one left.
        """
        began = time.monotonic()
        summary = Summary()
        self._admit(self._source.new_roots())
        if self._pending.height:
            self._conclude(self._source.now(), summary)
        self._conclude_unclaimed(summary)
        summary.waiting = self._pending.height
        summary.seconds = time.monotonic() - began
        if summary.rollouts:
            log.info("built %s", summary)
        return summary

    def _conclude(self, now: datetime, summary: Summary) -> None:
        """Judge the rollouts whose turn it is, and build those that no longer wait."""
        due = _due(self._pending, now)
        for some in due.iter_slices(ROLLOUTS_A_LOOK):
            arrivals = self._source.arrivals(some)
            for rollouts in _portions(self._ended(some, arrivals, now)):
                frames = self._frames(rollouts, arrivals, now)
                if frames.rollouts.height:
                    self._build(frames, summary)
                self._pending = self._pending.join(frames.rollouts, on=_ROLLOUT, how="anti")
        self._pending = _checked(self._pending, due, _ROLLOUT, now)

    def _ended(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, now: datetime) -> pl.DataFrame:
        """Those of the given rollouts (as ROLLOUTS) that wait no longer."""
        verdicts = decide(facts(arrivals), now, self._spec).join(rollouts, on=_ROLLOUT, how="semi")
        return verdicts.filter(pl.col("Verdict") != Verdict.WAITING.value)

    def _frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, now: datetime) -> Frames:
        """What to build rollouts from that have ended, as far as their calls are to be seen as well."""
        frames = self._source.frames(rollouts, arrivals)
        # An insert shows in one table before the other. Such a call has not arrived yet.
        unseen = frames.spans.filter(IS_GATEWAY & (pl.col("RowKind") == "span")).join(frames.calls, on=_SPAN, how="anti")
        if unseen.is_empty():
            return frames
        seen = arrivals.join(unseen, on=_SPAN, how="anti")
        return self._source.frames(self._ended(rollouts, seen, now), seen)

    def _conclude_unclaimed(self, summary: Summary) -> None:
        """Build what no final root claims: late calls at once, rollouts that fell silent."""
        new = self._source.loose_calls().join(self._loose, on="CallId", how="anti").with_columns(CheckedAt=pl.col("IngestedAt"))
        self._loose = pl.concat([self._loose, new])
        if self._loose.is_empty():
            return
        now = self._source.now()
        due = _due(self._loose.filter(now - pl.col("IngestedAt") >= self._least_silence()), now)
        looked_at = pl.concat([new, due]).unique("CallId", maintain_order=True)
        if looked_at.is_empty():
            return
        self._loose = _checked(self._loose, due, ["CallId"], now)
        owners = self._source.owners(looked_at["TraceId"])
        activity = self._source.activity(claim(looked_at, owners)["RolloutKey"])
        calls = rollouts_of(looked_at, owners, activity).join(self._pending, on=_ROLLOUT, how="anti")
        behind = late(calls, self._source.built(calls["RolloutId"]))
        quiet = calls.join(due, on="CallId", how="semi").join(behind, on=_ROLLOUT, how="anti")
        silent = judge(quiet, self._source.roots(quiet["RolloutId"]), activity, self._source.traces(quiet["TraceId"]), now, self._spec)
        for rollouts in _portions(concat([behind, silent], ROLLOUTS)):
            traces = calls.join(rollouts, on=_ROLLOUT, how="semi")["TraceId"]
            self._build(self._source.claimed_frames(rollouts, traces), summary)

    def _least_silence(self) -> pl.Expr:
        """How long at least a call's rollout must be silent."""
        announced = (pl.col("RolloutKeySource") == "rollout") & (pl.col("RunId") != "") & (pl.col("Mode") != "")
        seconds = pl.when(announced).then(self._spec.incomplete_after_seconds).otherwise(self._spec.quiet_seconds)
        return pl.duration(milliseconds=seconds * 1000)

    def _build(self, frames: Frames, summary: Summary) -> None:
        built = build(frames, self._spec)
        summary.add(self._sink.write(built))
        summary.rollouts += frames.rollouts.height
        for rows in (built.transitions, built.drops):
            self._loose = self._loose.join(rows, on="CallId", how="anti")

    def _admit(self, roots: pl.DataFrame) -> None:
        new = roots.sort("Attempt").unique(_ROLLOUT, keep="last").join(self._pending, on=_ROLLOUT, how="anti")
        self._pending = pl.concat([self._pending, new.with_columns(CheckedAt=pl.col("IngestedAt"))])


def _due(waiting: pl.DataFrame, now: datetime) -> pl.DataFrame:
    return waiting.filter((now - pl.col("CheckedAt")) >= (pl.col("CheckedAt") - pl.col("IngestedAt")) * _PATIENCE)


def _checked(waiting: pl.DataFrame, due: pl.DataFrame, key: list[str], now: datetime) -> pl.DataFrame:
    """The waiting rows, with those that were due dated now."""
    was_due = pl.struct(key).is_in(due.select(pl.struct(key)).to_series().implode())
    return waiting.with_columns(CheckedAt=pl.when(was_due).then(now).otherwise("CheckedAt").cast(pl.Datetime("us", "UTC")))


def build_once(settings: Settings) -> Summary:
    """Build every rollout that is complete now.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    summary = Builder(settings).look()
    if not summary.rollouts:
        log.info("nothing to build; %d rollouts wait", summary.waiting)
    return summary


def follow(settings: Settings) -> None:
    """Build rollouts as they become complete, until SIGTERM or SIGINT.

    A store that fails while following is waited for.

    Raises:
        StoreError: the store does not answer at the start.
    """
    with _stoppable():
        builder = Builder(settings)
        builder.look()
        patient = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreError),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5),
            before_sleep=lambda state: log.warning("%s Trying again.", state.outcome.exception() if state.outcome else ""),
        )
        while True:
            time.sleep(settings.builder.poll_seconds)
            patient(builder.look)


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived. No Exception, so that nobody's handler swallows it."""


@contextmanager
def _stoppable() -> Generator[None]:
    """Leave the block on SIGTERM or SIGINT, wherever it is: every write is idempotent, so nothing needs shielding."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        log.info("%s: stopped", signal.Signals(number).name)
        raise _Stopped

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _Stopped:
        pass
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _check(spec: BuilderSettings) -> None:
    try:
        pl.select(pl.lit("").str.contains(spec.agent_pattern))
    except pl.exceptions.ComputeError as error:
        reason = next((line.removeprefix("error: ") for line in str(error).splitlines() if line.startswith("error: ")), "Polars refuses it")
        raise BuilderError(f"builder.agent_pattern = {spec.agent_pattern!r} is no regular expression: {reason}. Mend it.") from None


def _portions(rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Whole rollouts, oldest first, about CALLS_A_BUILD calls at a time."""
    if rollouts.is_empty():
        return
    size = pl.col("Calls").fill_null(_CALLS_UNKNOWN) + 1
    numbered = rollouts.sort("IngestedAt", *_ROLLOUT).with_columns(portion=(size.cum_sum() - size) // CALLS_A_BUILD)
    yield from (portion.drop("portion") for portion in numbered.partition_by("portion", maintain_order=True))
