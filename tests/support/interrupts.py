"""Children that end by SIGINT whoever started the tests: a shell without job control has its background ignore it, for all descendants.

In: nothing. Out: what a child does before exec. Invariant: this process's own handling stays as it was.
"""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """Take SIGINT as a program in the foreground does; give it to Popen as `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
