"""`spangrad tune`: train on files, supervised or on preferences."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trainer.ledger.tables import LedgerVersion
    from trainer.sft.training import Plan, Tuned

_PIPE_WIDTH = 200
_LOG_SECONDS = 10
_SHOWN = ("loss", "preference_accuracy", "preference_margin")
_HEADS = {"loss": "loss", "preference_accuracy": "accuracy", "preference_margin": "margin"}


def tune(
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

    The files are those of `spangrad export` (sft, sft-tokens, verl-sft, parquet, huggingface; preferences) or others of the same columns.
    Token ids are used where a row holds them; else the policy's own tokenizer and chat template make them, and the loss is on the
    assistant's replies only. Each epoch commits a version; the last one is published. The same command again goes on from where a run was
    stopped, and does nothing once it is whole.

    Args:
        method: sft or dpo.
        files: JSON lines or Parquet files, or directories of them.
        model: directory of the weights that training begins with, where the branch has none yet.
        epochs: tuning.epochs.
        batch_size: tuning.batch_size.
        learning_rate: tuning.learning_rate.
        beta: tuning.beta, of dpo.
        held_out: tuning.held_out.
        again: also train rows whose rollouts this branch has trained, and a run that is whole once more.
        publish: hand the last version to the gateway; trainer.publish by default.
    """
    from spangrad.errors import SettingsError

    if not files:
        raise SettingsError(f"give files to train on: `spangrad tune {method} FILE`. `spangrad export` writes some.")
    flags = {
        "trainer.model": model,
        "trainer.publish": publish,
        "tuning.epochs": epochs,
        "tuning.batch_size": batch_size,
        "tuning.learning_rate": learning_rate,
        "tuning.beta": beta,
        "tuning.held_out": held_out,
    }
    settings = resolve(config, set_, flags)
    log_to_stderr()
    from trainer.sft.training import tune as run

    observer = _Bar() if sys.stderr.isatty() else _Lines()
    try:
        done = run(settings, method, files, again=again, observer=observer)
    finally:
        observer.close()
    if done:
        _show(done)


class _Lines:
    """A line now and then, and one a version, in the log."""

    def __init__(self) -> None:
        self._log = logging.getLogger("spangrad.tune")
        self._said = time.monotonic()
        self._steps = 0

    def planned(self, plan: Plan) -> None:
        """Say what is about to be trained."""
        self._steps = len(plan.steps)
        self._log.info("%s", _planned(plan))

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Say how far it is, if nothing was said for a while."""
        if time.monotonic() - self._said >= _LOG_SECONDS:
            self._said = time.monotonic()
            self._log.info("step %d of %d: %s", step, self._steps, _told(metrics))

    def committed(self, version: LedgerVersion) -> None:
        """Say which version was made."""
        self._said = time.monotonic()
        self._log.info("%s", _committed(version))

    def close(self) -> None:
        """Nothing is open."""


class _Bar(_Lines):
    """A bar on a terminal, below the log."""

    def __init__(self) -> None:
        super().__init__()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def planned(self, plan: Plan) -> None:
        """Begin to draw."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from commands.console import plain_console

        super().planned(plan)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=plain_console(stderr=True), transient=True)
        handlers = [one for one in logging.getLogger().handlers if isinstance(one, logging.StreamHandler) and one.stream is sys.stderr]
        self._progress.start()
        # Started, it has put its own stream in the place of stderr: what is written there stands above the bar.
        self._streams = [(one, one.setStream(sys.stderr)) for one in handlers]
        self._task = self._progress.add_task("", total=len(plan.steps), completed=plan.at)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=_told(metrics))

    def close(self) -> None:
        """Take the bar away, and give the log its stream back."""
        if self._progress is not None:
            self._progress.stop()
            for handler, stream in self._streams:
                handler.setStream(stream)


def _planned(plan: Plan) -> str:
    found, what = plan.examples, "rows" if plan.method == "sft" else "pairs"
    where = f"from step {plan.at} " if plan.at else ""
    lengths = len(plan.steps)
    return (
        f"{plan.method} of {plan.base.policy_version.policy}@{plan.base.version} on {len(found.trained)} {what} "
        f"({len(found.held_out)} held out): {where}to step {lengths}; {_how(plan)}"
    )


def _how(plan: Plan) -> str:
    """Where the token ids come from, and what the loss is on."""
    found = plan.examples
    parts = [f"{found.with_ids} with the token ids that the engine sampled"] if found.with_ids else []
    if found.rendered:
        parts.append(
            f"{found.rendered} tokenised by the policy's own tokenizer and chat template, the loss on the assistant's replies only"
        )
    return ", ".join(parts)


def _told(metrics: dict[str, float]) -> str:
    return ", ".join(f"{_HEADS[name]} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)


def _committed(version: LedgerVersion) -> str:
    held = {name: version.metrics[f"held_out_{name}"] for name in _SHOWN if f"held_out_{name}" in version.metrics}
    return f"version {version.version}: {_told(version.metrics)}" + (f"; held out: {_told(held)}" if held else "")


def _show(done: Tuned) -> None:
    """Print what became of the rows, and what was made of them."""
    from rich.table import Table

    from commands.console import plain_console

    plan, found = done.plan, done.plan.examples
    if not done.versions:
        print(f"nothing to do: these files were trained with these settings, up to step {plan.at}. --again trains them once more.")
        return
    table = Table("", "count", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    what = "rows" if plan.method == "sft" else "pairs"
    table.add_row(f"{what} trained", str(len(found.trained)))
    table.add_row(f"{what} held out", str(len(found.held_out)))
    for reason, count in sorted(found.left_out.items()):
        table.add_row(f"rows left out, {reason}", str(count))
    table.add_row("rows in all", str(found.rows))
    console = plain_console(_PIPE_WIDTH)
    console.print(table)
    console.print(_how(plan), highlight=False)
    if found.unread:
        console.print(f"columns that were not read: {', '.join(sorted(found.unread))}", highlight=False)
    policy = plan.base.policy_version.policy
    for version in done.versions:
        console.print(_committed(version), highlight=False)
    newest = done.versions[-1].version
    print(f"{policy}@{plan.base.version} -> {policy}@{newest}. `spangrad lineage {policy}@{newest}` names what it was trained on.")
    best = min((one for one in done.versions if "held_out_loss" in one.metrics), key=lambda one: one.metrics["held_out_loss"], default=None)
    if best and best.version != newest:
        print(f"the held-out loss was lowest at version {best.version}: `spangrad policy rollback {policy}@{best.version}` goes back.")
