"""Where commands print tables and bars, whoever wrote the texts in them.

In: how wide a table may be that nobody sees on a terminal. Out: a console of rich. Invariant: a text is printed as it was written:
nothing in it is markup or the name of an emoji, so that no text is lost, and none ends a command.
"""

from __future__ import annotations

import sys

from rich.console import Console


def plain_console(pipe_width: int | None = None, *, width: int | None = None, stderr: bool = False, highlight: bool = True) -> Console:
    """A console that knows no markup.

    Args:
        pipe_width: columns where standard output is no terminal. None: as rich guesses.
        width: columns in any case. None: what the terminal has, or the pipe.
        stderr: print to standard error.
        highlight: numbers, paths and such in colour on a terminal.
    """
    width = width or (None if sys.stdout.isatty() else pipe_width)
    return Console(width=width, stderr=stderr, highlight=highlight, markup=False, emoji=False)
