"""The console on which commands print tables and progress bars, with texts from users, agents and models.

In: the width of a table that is not printed on a terminal, in columns. Out: a console of rich. Invariant: a text is printed as it was
written: nothing in it is read as markup or as the name of an emoji, so that no text is lost, and no text makes a command fail.
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


def plain_console(pipe_width: int | None = None, *, width: int | None = None, stderr: bool = False, highlight: bool = True) -> Console:
    """Return a console that interprets no markup and no emoji names.

    Args:
        pipe_width: width in columns where standard output is not a terminal. None: rich's own default.
        width: width in columns in any case. None: that of the terminal, or pipe_width.
        stderr: print to standard error instead of standard output.
        highlight: colour numbers, paths and the like on a terminal.
    """
    width = width or (None if sys.stdout.isatty() else pipe_width)
    return Console(width=width, stderr=stderr, highlight=highlight, markup=False, emoji=False)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], pipe_width: int | None = None, *, right: Collection[int] = ()
) -> None:
    """Print rows as a table without lines.

    Args:
        columns: heads of the columns.
        rows: cells, printed as `str` gives them.
        pipe_width: as for `plain_console`.
        right: indices of the columns that are aligned to the right.
    """
    table = Table(*columns, box=None, pad_edge=False)
    for place in right:
        table.columns[place].justify = "right"
    for row in rows:
        table.add_row(*map(str, row))
    plain_console(pipe_width).print(table)


@contextmanager
def rollout_progress(what: str) -> Generator[Callable[[int, int], None]]:
    """Show how many rollouts of all are done: a bar on a terminal, a line in the log every _LOG_SECONDS elsewhere.

    Args:
        what: the work, such as `exporting`.
    """
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
