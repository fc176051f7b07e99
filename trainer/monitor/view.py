"""Display of a training run: a live table in a terminal, or one log line per step.

In: steps. Out: text. Invariant: in a terminal nothing else writes over the table: log records go above it.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spangrad.settings import TrainerSettings
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.evaluate import describe_validation
from trainer.monitor.watching import CommittedStep, Watcher, stage_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

logger = logging.getLogger(__name__)

_STEPS_SHOWN = 12
_STAGES = ("load", "credit", "train", "checkpoint", "publish")
_LINE_STAGES = ("idle", "build", "load", "credit", "lease", "train", "forward", "backward", "settle", "collect", "checkpoint", "publish")
"""Stages that the log line names, where their seconds are known; forward and backward are parts of train."""


class LogLines(Watcher):
    """Watcher that logs one line per step."""

    def stepped(self, step: CommittedStep) -> None:
        """Log the step."""
        logger.info("%s", describe(step))

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Log the metrics of the held-out rollouts."""
        logger.info("%s", describe_validation(version))


class LiveView(Watcher):
    """Watcher that shows the last steps as a table, updated in place."""

    def __init__(self, settings: TrainerSettings, console: Console) -> None:
        """Start the table in a terminal, and write the log above it."""
        from rich.live import Live

        self._settings = settings
        self._steps: deque[CommittedStep] = deque(maxlen=_STEPS_SHOWN)
        self._validation: dict[int, Mapping[str, float]] = {}
        """Metrics of versions on held-out rollouts, from the oldest one in the table on."""
        self._seconds = {"idle": 0.0, "all": 0.0}
        self._count = 0
        streaming = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
        self._handlers = [handler for handler in streaming if handler.stream is sys.stderr]
        self._stderr = sys.stderr
        self._live = Live(self.table(), console=console, refresh_per_second=2, redirect_stdout=True, redirect_stderr=True)
        self._live.start()
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def stepped(self, step: CommittedStep) -> None:
        """Add a row."""
        self._steps.append(step)
        oldest = self._steps[0].version.version
        self._validation = {number: metrics for number, metrics in self._validation.items() if number >= oldest}
        self._count += 1
        self._seconds["idle"] += step.seconds_idle
        self._seconds["all"] += step.seconds_whole
        self._live.update(self.table(), refresh=True)

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Fill in the metrics of the held-out rollouts."""
        self._validation[version.version] = version.metrics
        self._live.update(self.table(), refresh=True)

    def close(self) -> None:
        """Stop updating the table, and restore the log's stream."""
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(self._stderr)

    def table(self) -> Table:
        """Return the table of the last steps: one row per step, the newest last."""
        from rich.table import Table
        from rich.text import Text

        whole = self._seconds["all"]
        idle = f", waited for rollouts {self._seconds['idle'] / whole:.0%} of {whole:.0f} s" if whole else ""
        title = f"{self._settings.policy}/{self._settings.branch}: {self._count} {'step' if self._count == 1 else 'steps'}{idle}"
        stages = (f"{name} s" for name in ("build", *_STAGES))
        columns = ("step", "version", "return", "success", "held out", "gap", "behind", *stages, "idle", "engines idle")
        table = Table(title=Text(title, "table.title"), title_justify="left", box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for step in self._steps:
            table.add_row(*row(step, self._validation.get(step.version.version, {})))
        return table


def row(step: CommittedStep, validation: Mapping[str, float]) -> list[str]:
    """Return the cells of a step, whose version may have metrics on held-out rollouts."""
    metrics = step.version.metrics
    held_out = {**metrics, **validation}.get("validate_return")
    seconds = stage_seconds(step.stages)
    return [
        str(step.number),
        str(step.version.version),
        _number(metrics.get("mean_return"), "+.2f"),
        _number(metrics.get("success"), ".2f"),
        _number(held_out, "+.2f"),
        _number(metrics.get("logprob_gap_max"), ".0e"),
        _number(metrics.get("staleness_mean"), ".1f"),
        _number(metrics.get("seconds_build"), ".2f"),
        *(_number(seconds.get(f"seconds_{name}"), ".2f") for name in _STAGES),
        f"{step.idle_share:.0%}",
        _number(metrics.get("engine_idle"), ".0%"),
    ]


def describe(step: CommittedStep) -> str:
    """Return one line about a step."""
    version, m = step.version, step.version.metrics
    masked = sum(value for name, value in m.items() if name.startswith("masked_"))
    parts = [
        f"{m['groups']:.0f} groups",
        f"{m['rollouts']:.0f} rollouts",
        f"{m['transitions']:.0f} transitions",
        *([f"{m['merge_ratio']:.1f}x fewer tokens in {m['sequences']:.0f} sequences"] if m["merge_ratio"] > 1 else []),
        *([f"{masked:.0f} calls masked"] if masked else []),
        f"return {m['mean_return']:+.2f}",
        f"success {m['success']:.2f}",
        *([f"response {m['response_tokens_mean']:.0f} tokens"] if "response_tokens_mean" in m else []),
        *([f"{m['truncated_share']:.0%} truncated"] if m.get("truncated_share") else []),
        *([f"entropy {m['entropy']:.2f}"] if "entropy" in m else []),
        f"gap {_number(m.get('logprob_gap_max'), '.0e', 'unknown')}",
        *(f"{name} {m[f'seconds_{name}']:.2f} s" for name in _LINE_STAGES if f"seconds_{name}" in m),
        f"idle {step.idle_share:.0%}",
        *([f"engines idle {m['engine_idle']:.0%}"] if "engine_idle" in m else []),
        *([] if m.get("updated", 1) else ["all advantages 0: weights as before"]),
    ]
    return f"step {step.number} -> version {version.version}: {', '.join(parts)}"


def _number(value: float | None, form: str, unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)
