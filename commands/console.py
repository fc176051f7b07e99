"""The console on which commands print tables and progress bars, with texts from users, agents and models.

In: texts of any length. Out: a console of rich. Invariant: a text is printed as it was written: nothing in it is read as markup or as the
name of an emoji, and only a terminal's width cuts it, so that a pipe or a file gets all of it, and no text makes a command fail.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_LOG_SECONDS = 10
_PIPE_WIDTH = 10_000
"""Width where the output is no terminal, in columns. A table pads its lines to the longest of them, so it is not without limit."""


class _PlainConsole(Console):
    """Console that raises where its output is closed, as `print` does; rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        """Raise; what is printed later is lost, since a command may have to stop services before it ends."""
        self.quiet = True
        raise BrokenPipeError


def plain_console(*, width: int | None = None, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console that interprets no markup and no emoji names.

    Args:
        width: width in columns. None: that of the terminal; where there is none, longer lines are wrapped at _PIPE_WIDTH.
        stderr: print to standard error instead of standard output.
        highlight: colour numbers, paths and the like on a terminal.
    """
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = width or (None if is_terminal else _PIPE_WIDTH)
    return _PlainConsole(width=width, stderr=stderr, highlight=highlight, markup=False, emoji=False)


def plain_table(*columns: str, right: Collection[int] = ()) -> Table:
    """Return a table without lines, with the columns of these indices aligned to the right.

    Cells that are too wide end in an ellipsis on a terminal, and are wrapped elsewhere.
    """
    table = Table(box=None, pad_edge=False)
    overflow = "ellipsis" if sys.stdout.isatty() else "fold"
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left", overflow=overflow)
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[int] = ()) -> None:
    """Print rows as a `plain_table`; cells are printed as `str` gives them."""
    table = plain_table(*columns, right=right)
    for row in rows:
        table.add_row(*map(str, row))
    plain_console().print(table)


@contextmanager
def rollout_progress(what: str) -> Generator[Callable[[int, int], None]]:
    """Show how many rollouts of all are done, of a work such as `exporting`: a bar on a terminal, else a line in the log now and then."""
    log, next_line = logging.getLogger("spangrad"), time.monotonic() + _LOG_SECONDS

    def line(done: int, total: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _LOG_SECONDS
            log.info("%s: %d of %d rollouts", what, done, total)

    if not sys.stderr.isatty():
        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("rollouts"))
    with Progress(*columns, TimeRemainingColumn(), console=plain_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
