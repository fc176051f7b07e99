"""Progress of a prompt search: a bar on a terminal, lines in a log.

In: `Progress`. Out: standard error. Invariant: a log gets a line when a stage of the search begins or ends, not one for each rollout.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

from prompts.search import Progress

_logger = logging.getLogger(__name__)


@contextmanager
def shown(run_id: str, rounds: int) -> Generator[Progress]:
    """Yield the progress of a search, which is shown while the block runs."""
    _logger.info("trials are rollouts of run %s; `spangrad worker --run-id %s` helps with them", run_id, run_id)
    if not sys.stderr.isatty():

        def log(progress: Progress) -> None:
            if progress.done in {0, progress.of}:
                _logger.info("%s: %d of %d", _words(progress, rounds), progress.done, progress.of)

        yield Progress(log)
        return
    from rich.progress import Progress as Bars

    from commands.console import plain_console

    with Bars(console=plain_console(stderr=True)) as bars:
        bar = bars.add_task("begins", total=None)

        def changed(progress: Progress) -> None:
            bars.update(bar, description=_words(progress, rounds), completed=progress.done, total=progress.of)

        yield Progress(changed)


def _words(progress: Progress, rounds: int) -> str:
    best = "" if progress.best is None else f", best {progress.best:.3f}"
    return f"round {progress.round} of {rounds}{best}, {progress.doing}"
