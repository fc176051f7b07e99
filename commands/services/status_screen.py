"""Screen of `spangrad up`: a table on a terminal, lines elsewhere.

In: events and the status of the services. Out: text. Invariant: where standard output is no terminal, nothing that was written changes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.live import Live

from commands.console import plain_console
from spangrad.supervisor.service import ServiceState
from spangrad.supervisor.status_text import REASON_CHARACTERS, TrainingProgress, status_table

_REMINDER_SECONDS = 10.0
"""Interval of the lines on services that start, in seconds."""
_HINT = "Ctrl-C stops everything; `spangrad ps` shows this elsewhere"


@contextmanager
def _lost_where_output_is() -> Generator[None]:
    """Ignore that the disk of standard output is full, or its terminal closed."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
            raise


class StatusScreen:
    """The status on a terminal, updated in place; else a line for each event, each training step and each wait for a service."""

    def __init__(self, directory: Path) -> None:
        """Prepare the screen; `directory` is the supervisor's, which the hint names."""
        self._console = plain_console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._began = time.monotonic()
        self._reminder = self._began + _REMINDER_SECONDS
        self._step: int | None = None
        self._reasons = dict[str, str]()
        self._hint = f"{_HINT}; logs: {directory / 'logs'}"

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            with _lost_where_output_is():
                self._live.stop()

    def event(self, text: str) -> None:
        """Print a line, above the table; on a disk that is full or a terminal that is closed, it is lost, and services go on."""
        self._reminder = time.monotonic() + _REMINDER_SECONDS
        with _lost_where_output_is():
            self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", soft_wrap=True)

    def show(self, status: Sequence[Mapping[str, Any]], progress: TrainingProgress | None) -> None:
        """Update the table; without a terminal, print a line if a training step was made, or services start without an event for long."""
        if self._live:
            self._live.update(status_table(status, progress, self._hint))
        elif progress and progress.step is not None and progress.step != self._step:
            self._step = progress.step
            self.event(str(progress))
        elif time.monotonic() >= self._reminder:
            self._remind([service for service in status if service["state"] == ServiceState.STARTING])

    def _remind(self, starting: Sequence[Mapping[str, Any]]) -> None:
        """Print the services that start, with the reason of each that has another one than when it was printed last."""
        reasons = {service["name"]: service["obstacle"] or f"it does not answer yet; its log: {service['log']}" for service in starting}
        changed = {name: reason for name, reason in reasons.items() if self._reasons.get(name) != reason}
        self._reasons |= changed
        for name, reason in changed.items():
            self.event(f"waiting for {name}: {reason[:REASON_CHARACTERS]}")
        if reasons and not changed:
            self.event(f"waiting for {', '.join(reasons)}")
