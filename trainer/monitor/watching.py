"""What those who watch a training run are told, and the clock that times its stages.

In: what the loop does, stage by stage. Out: a `Step` for every version, to each watcher: a line in the log, a table in a terminal,
trackers, spans. Invariant: a watcher that fails is named in the log and changes nothing: by the time that it is told, the step is
committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from trainer.data.source import BatchRollout
from trainer.ledger.tables import LedgerVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a step."""

    name: str
    """load, credit, train, checkpoint, publish."""
    began: int
    """Nanoseconds since 1970, as are all times of spans."""
    ended: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended - self.began) / 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was committed, and published where versions are."""

    number: int
    """1 for the first of the branch."""
    version: LedgerVersion
    rollouts: Sequence[BatchRollout]
    """What it consumed."""
    stages: Sequence[Stage]

    @property
    def idle_share(self) -> float:
        """Share of the wall clock, from the end of the step before to the end of this one, in which the trainer waited for rollouts."""
        idle = self.version.metrics.get("seconds_idle", 0.0)
        whole = idle + (self.stages[-1].ended - self.stages[0].began) / 1e9 if self.stages else idle
        return idle / whole if whole > 0 else 0.0


class Clock:
    """Times the stages of the step under way, and the wait before it."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._idle = 0.0
        self._free_since = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds of the wait so far."""
        return time.monotonic() - self._free_since

    def begin(self) -> None:
        """The wait is over: rollouts for a batch are there."""
        self.stages = []
        self._idle = time.monotonic() - self._free_since

    def end(self) -> None:
        """The step is over, and the next wait begins."""
        self._free_since = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time a stage; one that fails is no stage of a step."""
        began = time.time_ns()
        yield
        self.stages.append(Stage(name, began, max(time.time_ns(), began)))

    def seconds(self) -> dict[str, float]:
        """Metrics: seconds of the wait, of each stage so far, and of these together."""
        stages = {f"seconds_{stage.name}": stage.seconds for stage in self.stages}
        return {"seconds_idle": self._idle, **stages, **({"seconds_step": sum(stages.values())} if stages else {})}


class Watcher(Protocol):
    """Somebody who is told of a training run."""

    def stepped(self, step: Step) -> None:
        """A version was committed, and published where versions are."""
        ...

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """A version's held-out rollouts were measured, while version `newest` was the newest."""
        ...

    def close(self) -> None:
        """The run ends, well or not."""
        ...


class Watchers:
    """All of them, as one that never fails."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def stepped(self, step: Step) -> None:
        """Tell each."""
        for one in self._watchers:
            with _spared(one):
                one.stepped(step)

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Tell each."""
        for one in self._watchers:
            with _spared(one):
                one.evaluated(version, newest)

    def close(self) -> None:
        """Tell each."""
        for one in self._watchers:
            with _spared(one):
                one.close()


@contextmanager
def _spared(watcher: Watcher) -> Generator[None]:
    try:
        yield
    except Exception as error:  # trackers are other people's code, over other people's networks
        logger.warning("%s failed, and training goes on: %s: %s", type(watcher).__name__, type(error).__name__, error)
