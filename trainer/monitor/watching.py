"""Events of a training run for its watchers, and the clock that times its stages.

Invariant: a watcher that fails is named in the log and changes nothing: by the time that it is called, the step is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.data.source import BatchRollout
from trainer.ledger.tables import LedgerVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepStage:
    """Timed stage of a step."""

    name: str
    """Name of the stage: load, credit, lease, train, settle (wait until the previous version is committed), collect (copies of weights and
    state to main memory), checkpoint or publish. A stage that another one interrupts is recorded in parts."""
    began: int
    """Start, in nanoseconds since 1970, as are all times of spans."""
    ended: int
    """End, in nanoseconds since 1970."""
    beside: bool = False
    """True if it was done beside the next step, or may have been: it took no time of the trainer's."""

    @property
    def seconds(self) -> float:
        """Return its duration, in seconds."""
        return (self.ended - self.began) / 1e9


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """Step that was committed, and published where versions are."""

    number: int
    """Number of the step, 1 for the first of the branch."""
    version: LedgerVersion
    rollouts: Sequence[BatchRollout]
    """Rollouts that it trained on."""
    stages: list[StepStage]

    @property
    def seconds_idle(self) -> float:
        """Return the seconds in which the trainer waited for the step's rollouts."""
        return self.version.metrics.get("seconds_idle", 0.0)

    @property
    def seconds_whole(self) -> float:
        """Return the seconds of wall-clock time from the previous step's end to this one's, without what was done beside the next."""
        own = [stage for stage in self.stages if not stage.beside]
        return self.seconds_idle + ((own[-1].ended - own[0].began) / 1e9 if own else 0.0)

    @property
    def idle_share(self) -> float:
        """Return the share of the whole time in which the trainer waited for rollouts."""
        return self.seconds_idle / self.seconds_whole if self.seconds_whole > 0 else 0.0


@contextmanager
def timed(stages: list[StepStage], name: str, *, beside: bool = False) -> Generator[None]:
    """Add a stage with the block's times; one that fails is not recorded."""
    began = time.time_ns()
    yield
    stages.append(StepStage(name, began, max(time.time_ns(), began), beside))


def stage_seconds(stages: Sequence[StepStage]) -> dict[str, float]:
    """Return metrics: seconds of each stage, and of all stages that took the trainer's time together (seconds_step)."""
    seconds: dict[str, float] = {}
    for stage in stages:
        seconds[f"seconds_{stage.name}"] = seconds.get(f"seconds_{stage.name}", 0.0) + stage.seconds
    return {**seconds, **({"seconds_step": sum(stage.seconds for stage in stages if not stage.beside)} if stages else {})}


class Clock:
    """Timer of the stages of the step under way, and of the wait before it."""

    def __init__(self) -> None:
        self.stages: list[StepStage] = []
        self._running: tuple[str, int] | None = None
        """Name and begin of the stage under way."""
        self._idle = 0.0
        self._free_since = time.monotonic()

    @property
    def waited(self) -> float:
        """Return the seconds of the wait so far."""
        return time.monotonic() - self._free_since

    def begin(self, load_began: int | None = None) -> None:
        """End the wait: rollouts for a batch are there.

        Args:
            load_began: time at which the look began that found and loaded them, in nanoseconds since 1970: the wait ended then. None: now.
        """
        now, self._running = time.time_ns(), None
        self.stages = [] if load_began is None else [StepStage("load", load_began, max(now, load_began))]
        self._idle = max(self.waited - sum(stage.seconds for stage in self.stages), 0.0)

    def end(self) -> None:
        """End the step, and begin the next wait."""
        self._free_since = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time a stage of the step under way; one within another interrupts it, and one that fails is not recorded."""
        outer = self._end_running()
        self._running = (name, time.time_ns())
        yield
        self._end_running()
        self._running = (outer, time.time_ns()) if outer else None

    def seconds(self) -> dict[str, float]:
        """Return metrics: seconds of the wait, and those of the stages so far (`stage_seconds`)."""
        return {"seconds_idle": self._idle, **stage_seconds(self.stages)}

    def _end_running(self) -> str | None:
        """Record the stage under way, and return its name. None: none is."""
        if self._running is None:
            return None
        name, began = self._running
        self.stages.append(StepStage(name, began, max(time.time_ns(), began)))
        return name


class Watcher:
    """Observer of a training run, which ignores what it does not override."""

    def stepped(self, step: CommittedStep) -> None:
        """Handle a version that was committed, and published where versions are."""

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Handle new metrics of a version's held-out rollouts, while version `newest` is the newest."""

    def close(self) -> None:
        """Close the watcher at the end of the run, after success or failure."""


class Watchers(Watcher):
    """Group of watchers, as one that never fails."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def stepped(self, step: CommittedStep) -> None:
        """Pass the step to each watcher."""
        self._each(lambda watcher: watcher.stepped(step))

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Pass the evaluated version to each watcher."""
        self._each(lambda watcher: watcher.evaluated(version, newest))

    def close(self) -> None:
        """Close each watcher."""
        self._each(lambda watcher: watcher.close())

    def _each(self, call: Callable[[Watcher], None]) -> None:
        for watcher in self._watchers:
            try:
                call(watcher)
            except Exception as error:  # trackers are other people's code, over other people's networks
                logger.warning("%s failed, and training continues: %s: %s", type(watcher).__name__, type(error).__name__, error)
