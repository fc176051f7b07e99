"""`spangrad finetune`: training on files, supervised (SFT) or on preferences (DPO)."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from spangrad.store.rollout.record import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trainer.ledger.tables import LedgerVersion
    from trainer.sft.training import FileRun, FileTrainPlan

_LOG_SECONDS = 10
_SHOWN = {"loss": "loss", "preference_accuracy": "accuracy", "preference_margin": "margin"}
"""Metric -> its name in the output."""


def finetune(
    method: Annotated[Literal["sft", "dpo"], Parameter(name="METHOD")],
    /,
    *files: Path,
    model: Path | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    beta: float | None = None,
    held_out: float | None = None,
    again: Annotated[bool, Parameter(negative=())] = False,
    publish: bool | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Train the policy on files: on the replies in them (sft), or to prefer one reply to another (dpo).

    The files are those of `spangrad export` (sft, sft-tokens, verl-sft, parquet, huggingface; preferences for dpo) or others with the same
    columns. If a row holds token ids, they are used; otherwise the policy's own tokenizer and chat template tokenise its text, and the loss
    is computed on the assistant's replies only. Each epoch commits a version; the last one is published. The same command continues a run
    that was interrupted, and does nothing if the run is complete.

    Args:
        method: training method: sft (supervised fine-tuning) or dpo (direct preference optimisation).
        files: JSON Lines or Parquet files, or directories of them.
        model: directory of the weights that training begins with if the branch has no version yet; default: trainer.model.
        epochs: number of passes over the rows; default: finetune.epochs.
        batch_size: number of rows, or pairs for dpo, per optimizer step; default: finetune.batch_size.
        learning_rate: highest learning rate of the schedule; default: finetune.learning_rate.
        beta: strength with which dpo keeps the policy close to the reference; default: finetune.beta.
        held_out: share of the rows, from 0 to below 1, that are measured and not trained; default: finetune.held_out.
        again: train also rows whose rollouts this branch has trained, and repeat a run that is complete.
        publish: make the gateway serve the last version; default: trainer.weight_sync.publish.
    """
    from spangrad.errors import SettingsError

    if not files:
        raise SettingsError(f"give files to train on: `spangrad finetune {method} FILE`. `spangrad export` writes some.")
    flags = {
        "trainer.model": model,
        "trainer.weight_sync.publish": publish,
        "finetune.epochs": epochs,
        "finetune.batch_size": batch_size,
        "finetune.learning_rate": learning_rate,
        "finetune.beta": beta,
        "finetune.held_out": held_out,
    }
    settings = resolve(config, set_, flags)
    log_to_stderr()
    from trainer.sft.training import finetune as run

    observer = _Bar() if sys.stderr.isatty() else _Lines()
    try:
        done = run(settings, method, files, again=again, observer=observer)
    finally:
        observer.close()
    if done:
        _show(done)


class _Lines:
    """Progress in the log: a line every _LOG_SECONDS, and one for each version."""

    def __init__(self) -> None:
        self._log = logging.getLogger("spangrad.finetune")
        self._last_logged = time.monotonic()
        self._steps = 0

    def planned(self, plan: FileTrainPlan) -> None:
        """Log the plan of the training."""
        self._steps = len(plan.steps)
        self._log.info("%s", _planned(plan))

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Log the progress, if the last line is at least _LOG_SECONDS old."""
        if time.monotonic() - self._last_logged >= _LOG_SECONDS:
            self._last_logged = time.monotonic()
            self._log.info("step %d of %d: %s", step, self._steps, _metrics_text(metrics))

    def committed(self, version: LedgerVersion) -> None:
        """Log the committed version."""
        self._last_logged = time.monotonic()
        self._log.info("%s", _committed(version))

    def close(self) -> None:
        """Do nothing: a log needs no closing."""


class _Bar(_Lines):
    """Progress as a bar on a terminal, below the log."""

    def __init__(self) -> None:
        super().__init__()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def planned(self, plan: FileTrainPlan) -> None:
        """Log the plan of the training, and begin to draw the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from commands.console import plain_console

        super().planned(plan)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=plain_console(stderr=True), transient=True)
        streams = (handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler))
        handlers = [handler for handler in streams if handler.stream is sys.stderr]
        self._progress.start()
        # Once started, rich replaces sys.stderr by a stream of its own, which prints log lines above the bar.
        self._streams = [(handler, handler.setStream(sys.stderr)) for handler in handlers]
        self._task = self._progress.add_task("", total=len(plan.steps), completed=plan.at)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Advance the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=_metrics_text(metrics))

    def close(self) -> None:
        """Remove the bar, and restore the log's stream."""
        if self._progress is not None:
            self._progress.stop()
            for handler, stream in self._streams:
                handler.setStream(stream)


def _planned(plan: FileTrainPlan) -> str:
    examples, unit = plan.examples, "row" if plan.method == "sft" else "pair"
    where = f"from step {plan.at} " if plan.at else ""
    return (
        f"{plan.method} of {plan.base.policy_version.policy}@{plan.base.version} on {counted(len(examples.trained), unit)} "
        f"({len(examples.held_out)} held out): {where}to step {len(plan.steps)}; {_training_text(plan)}"
    )


def _training_text(plan: FileTrainPlan) -> str:
    """Return a text on the source of the token ids, and on the tokens with a loss."""
    examples = plan.examples
    parts = [f"{examples.with_ids} with the token ids that the engine sampled"] if examples.with_ids else []
    if examples.rendered:
        parts.append(
            f"{examples.rendered} tokenised by the policy's own tokenizer and chat template, the loss on the assistant's replies only"
        )
    return ", ".join(parts)


def _metrics_text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{shown} {metrics[name]:.4g}" for name, shown in _SHOWN.items() if name in metrics)


def _committed(version: LedgerVersion) -> str:
    held = {name: version.metrics[f"held_out_{name}"] for name in _SHOWN if f"held_out_{name}" in version.metrics}
    return f"version {version.version}: {_metrics_text(version.metrics)}" + (f"; held out: {_metrics_text(held)}" if held else "")


def _show(done: FileRun) -> None:
    """Print the numbers of rows trained, held out and left out, and the versions that were committed."""
    from commands.console import print_table

    plan, examples = done.plan, done.plan.examples
    if not done.versions:
        print(f"nothing to do: these files were trained with these settings, up to step {plan.at}. --again trains them once more.")
        return
    unit = "rows" if plan.method == "sft" else "pairs"
    rows = [
        (f"{unit} trained", len(examples.trained)),
        (f"{unit} held out", len(examples.held_out)),
        *((f"rows left out, {reason}", count) for reason, count in sorted(examples.left_out.items())),
        ("rows in all", examples.rows),
    ]
    print_table(("", "count"), rows, right=[1])
    print(_training_text(plan))
    if examples.unread:
        print(f"columns that were not read: {', '.join(sorted(examples.unread))}")
    policy = plan.base.policy_version.policy
    for version in done.versions:
        print(_committed(version))
    newest = done.versions[-1].version
    print(f"{policy}@{plan.base.version} -> {policy}@{newest}. `spangrad lineage {policy}@{newest}` names what it was trained on.")
    if (best := done.best) and best.version != newest:
        print(f"the held-out loss was lowest at version {best.version}: `spangrad policy rollback {policy}@{best.version}` goes back.")
