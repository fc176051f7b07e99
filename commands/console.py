"""The console on which commands print tables and progress bars, with texts from users, agents and models.

In: the width of a table that is not printed on a terminal, in columns. Out: a console of rich. Invariant: a text is printed as it was
written: nothing in it is read as markup or as the name of an emoji, so that no text is lost, and no text makes a command fail.
"""

from __future__ import annotations

import sys

from rich.console import Console


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
