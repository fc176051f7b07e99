"""Results of a client's run, and display of its progress.

Invariant: a rollout is counted once; a missing reward is not counted as 0.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from spangrad.agent.reward_values import total

_LINE_SECONDS = 10.0
_REWARDED = ("succeeded", "failed")
"""States of rollouts whose last attempt may have rewards."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Counts and mean reward of rollouts that have ended."""

    outcomes: Mapping[str, int]
    """Number of rollouts by outcome: `succeeded`, or the reason of the last attempt."""
    mean_reward: float | None
    """Mean over the rollouts that reported rewards to the runner, each the sum of its rewards; failures that the policy caused are
    included (`runner.failure_rewards`). None: no rollout reported any."""

    @property
    def rollouts(self) -> int:
        """Return the number of rollouts."""
        return sum(self.outcomes.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items()) or "none"
        return f"{self.rollouts} rollouts ({counts}), mean reward {_number(self.mean_reward)}"


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of one run of the test data in mode `validate`."""

    after_groups: int
    """Number of groups of mode train that had ended when it was enqueued."""
    measure: RolloutSummary


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of `Client.train`."""

    run_id: str
    groups: int
    """Number of groups of mode train of which every rollout has ended."""
    train: RolloutSummary
    """Counts of the rollouts of mode train."""
    validations: tuple[Validation, ...]
    """Results of the test data, in order; empty where no test data was uploaded."""
    seconds: float

    def __str__(self) -> str:
        lines = [f"run {self.run_id}: {self.groups} groups in {self.seconds:.0f} s; {self.train}"]
        lines += [f"  test data after {validation.after_groups} groups: {validation.measure}" for validation in self.validations]
        return "\n".join(lines)


class RolloutTally:
    """Counter of rollouts as they end."""

    def __init__(self) -> None:
        self._outcomes = Counter[str]()
        self._rewarded = 0
        self._return = 0.0
        """Sum of the returns of those that were rewarded."""
        self._ended = Counter[str]()
        """Rollouts that have ended of groups that are not whole."""
        self.groups = 0
        """Number of groups of which every rollout has ended."""

    def add(self, rollout: Mapping[str, Any]) -> None:
        """Count a rollout that has ended."""
        last: Mapping[str, Any] = rollout["attempts"][-1] if rollout["attempts"] else {}
        succeeded = rollout["state"] == "succeeded"
        self._outcomes["succeeded" if succeeded else last.get("reason") or "cancelled"] += 1
        if rollout["state"] in _REWARDED and last.get("rewards"):
            self._rewarded += 1
            self._return += total(last["rewards"])
        group = rollout["group_id"]
        self._ended[group] += 1
        if self._ended[group] == rollout["group_size"]:
            self.groups += 1
            del self._ended[group]

    @property
    def measure(self) -> RolloutSummary:
        """Return the counts and the mean reward so far."""
        mean = self._return / self._rewarded if self._rewarded else None
        return RolloutSummary(dict(self._outcomes.most_common()), mean)


class ProgressLine:
    """Display of progress; a context manager."""

    def __init__(self, what: str, total: int | None, stream: TextIO | None = None) -> None:
        """Store the arguments; nothing is shown yet.

        Args:
            what: name of the activity.
            total: number of rollouts. None: it is unknown.
            stream: stream to write to. None: standard error.
        """
        self._what = what
        self._total = total
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._line_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[reward]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(file=self._stream, markup=False, emoji=False))
            self._bar.__enter__()
            self._task = self._bar.add_task(self._what, total=self._total, reward="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)

    def progress(self, measure: RolloutSummary, *, last: bool = False) -> None:
        """Show the counts: on the bar, or in a line now and then."""
        if self._bar is not None:
            self._bar.update(self._task, completed=measure.rollouts, reward=f"mean reward {_number(measure.mean_reward)}")
        elif last or time.monotonic() - self._line_at >= _LINE_SECONDS:
            self._line_at = time.monotonic()
            of = "" if self._total is None else f" of {self._total}"
            self.print_line(f"{self._what}: {measure.rollouts}{of}; {measure}")

    def print_line(self, line: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(f"spangrad: {line}", file=self._stream, flush=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"
