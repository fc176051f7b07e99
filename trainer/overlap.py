"""Threads that work beside the step under way: one prepares the next batch, one commits the last version and does what follows.

Invariant: a look may be done later, and its errors delay nothing. Commits and what follows them are done in order, so that what follows a
commit is done before the next one; a version is committed even if what followed an earlier commit failed. What is left undone is undone,
or done, at the next start.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from spangrad.errors import LedgerError, StoreError
from trainer.retries import Outage, without_retries
from trainer.shutdown import Stopped

_LOOK_SECONDS = 2.0
"""Longest time between two looks, in seconds."""
_PAUSE_SECONDS = 0.5
"""Time between a look that failed and the next, in seconds."""
_SLICE_SECONDS = 0.1
"""Longest wait for a condition, in seconds: no signal is handled in it."""


class Lookahead:
    """Thread that loads and checks ready groups while a step is under way."""

    def __init__(self, look: Callable[[], None], arrived: Callable[[], bool]) -> None:
        """Start no thread yet; `arrived` waits a little for something new, and returns whether there may be something."""
        self._look = look
        self._arrived = arrived
        self._outage = Outage("the span store, for the next batch,")
        self._failed: BaseException | None = None

    @contextmanager
    def beside(self) -> Generator[None]:
        """Look again and again until the block ends, and wait then for the look that is under way, unless the process is to end."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="lookahead", daemon=True)
        thread.start()
        waits = True
        try:
            yield
        except Stopped:
            waits = False
            raise
        finally:
            over.set()
            if waits:
                thread.join()

    def check(self) -> None:
        """Raise the error that ended the looks beside the last step, if one did.

        Raises:
            TrainerError: too many groups of the run have failed.
        """
        failed, self._failed = self._failed, None
        if failed:
            raise failed

    def _run(self, over: threading.Event) -> None:
        with without_retries():
            while not over.is_set():
                try:
                    self._look()
                    self._outage.over()
                    self._await_arrival(over)
                except (StoreError, LedgerError) as error:  # the step's end looks again, and waits for an answer
                    self._outage.failed(error, is_retry=False)
                    over.wait(_PAUSE_SECONDS)
                except BaseException as error:
                    self._failed = error
                    return

    def _await_arrival(self, over: threading.Event) -> None:
        """Wait until something arrives, the step ends, or a look is due anyway: groups with missing rows are loaded again."""
        end = time.monotonic() + _LOOK_SECONDS
        while not over.is_set() and time.monotonic() < end:
            if self._arrived():
                return


class FollowUps:
    """Thread that commits versions and does what follows, in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], bool]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0
        """Number of pieces of work that are not done."""
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def are_done(self) -> bool:
        """Return whether nothing is under way."""
        return self._left == 0

    def submit(self, work: Callable[[], object], *, always: bool = False) -> None:
        """Do some work after what was submitted before, unless that failed; with `always` even then."""
        with self._changed:
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="follow-ups", daemon=True)
                self._thread.start()
        self._work.put((work, always))

    def settle(self, until: Callable[[], bool] = lambda: False, *, seconds: float = math.inf) -> None:
        """Wait until everything is done or has failed, in slices in which a signal is handled.

        Args:
            until: ends the wait early, once it is true after a piece of work.
            seconds: longest wait.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while self._left and not until() and time.monotonic() < end:
                self._changed.wait(_SLICE_SECONDS)

    def wait(self) -> None:
        """Wait until everything is done.

        Raises:
            SpangradError: some of the work failed; what came after it was not done.
        """
        self.settle()
        self.check()

    def check(self) -> None:
        """Raise the error of work that failed, if some did."""
        if self._failed:
            raise self._failed

    def _run(self) -> None:
        while True:
            work, always = self._work.get()
            try:
                if always or self._failed is None:
                    work()
            except BaseException as error:
                self._failed = self._failed or error
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
