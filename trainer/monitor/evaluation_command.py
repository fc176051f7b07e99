"""The command that evaluates a version, beside training: trainer.evaluation.command, once every trainer.evaluation.every steps.

Invariant: one runs at a time, and of the versions that wait for it the newest alone is evaluated next; however it ends, training goes on,
and the version's metrics say how it ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time

from spangrad.processes import dying_with_parent
from spangrad.settings.trainer_service import EvaluationSettings
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.1
"""Longest wait for a condition, in seconds: no signal is handled in it."""
_KILL_SECONDS = 5.0
"""Time that a command has to end once it is asked to, in seconds."""


class EvaluationCommand:
    """Runs of the command, by a thread."""

    def __init__(self, settings: EvaluationSettings) -> None:
        """Start nothing yet."""
        self._settings = settings
        self._changed = threading.Condition()
        self._next: int | None = None
        """Version that is evaluated next. None: none waits."""
        self._thread: threading.Thread | None = None
        """Thread of the run under way. None: nothing runs."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._ended: dict[int, dict[str, float]] = {}
        """Metrics of runs that ended, by version, until they are recorded."""

    def is_due(self, step: int) -> bool:
        """Return whether the command runs after a step of the branch."""
        return bool(self._settings.command and self._settings.every and step % self._settings.every == 0)

    def start(self, version: int) -> None:
        """Run the command for a version once no other run is under way, in place of any version that waits."""
        with self._changed:
            if self._is_closed:
                return
            if self._next is not None:
                logger.info("version %d is not evaluated: version %d is newer, and the command still runs", self._next, version)
            self._next = version
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
                self._thread.start()

    def record(self, ledger: Ledger) -> list[LedgerVersion]:
        """Add the metrics of the runs that have ended to their versions; return these.

        The metrics: evaluation_seconds, evaluation_failed (1: it did not start, failed, or took too long).
        """
        with self._changed:
            ended, self._ended = self._ended, {}
        for version, metrics in ended.items():
            ledger.add_metrics(version, metrics)
        return [ledger.version(version) for version in ended]

    def wait(self) -> bool:
        """Wait until no run is under way and no version waits, in slices in which a signal is handled; return whether there was a run."""
        with self._changed:
            waits = self._thread is not None
            while self._thread is not None:
                self._changed.wait(_SLICE_SECONDS)
        return waits

    def close(self) -> None:
        """End the run under way, and start no other; one that may not be signalled is left alone."""
        with self._changed:
            self._is_closed, self._next = True, None
            thread, process = self._thread, self._process
        ended = not process or _end(process)
        if thread and ended:
            thread.join()

    def _run(self) -> None:
        while (version := self._take()) is not None:
            began = time.monotonic()
            failed = self._evaluate(version)
            with self._changed:
                self._ended[version] = {"evaluation_seconds": time.monotonic() - began, "evaluation_failed": float(failed)}

    def _take(self) -> int | None:
        with self._changed:
            version, self._next = self._next, None
            if version is None:
                self._thread = None
                self._changed.notify_all()
            return version

    def _evaluate(self, version: int) -> bool:
        """Run the command; return whether it failed, which is logged."""
        limit = self._settings.timeout_seconds
        try:
            # The thread lives as long as the process: its death would end it.
            process = subprocess.Popen(dying_with_parent(self._settings.command), start_new_session=True)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.warning("trainer.evaluation.command cannot be started (%s): version %d is not evaluated", error, version)
            return True
        with self._changed:
            self._process = process
            ends = self._is_closed
        if ends and not _end(process):
            return True  # `close` waits for this thread
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            outcome = ", and was ended" if _end(process) else ""
            logger.warning("trainer.evaluation.command took more than %g s for version %d%s", limit, version, outcome)
            return True
        finally:
            with self._changed:
                self._process = None
        if code and not self._is_closed:
            logger.warning("trainer.evaluation.command ended with exit code %d for version %d", code, version)
        return bool(code)


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Terminate a command with its group, such as the program of a shell; kill what does not end in time.

    Returns:
        False: it runs as another user, such as under sudo, and may not be signalled.
    """
    end = time.monotonic() + _KILL_SECONDS
    try:
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            process.poll()  # a leader that has ended stays in its group until then
            os.killpg(process.pid, 0)
            time.sleep(_SLICE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    except PermissionError:
        logger.warning("trainer.evaluation.command runs as another user, and cannot be ended. End it yourself.")
        return False
    except ProcessLookupError:  # nothing is left of the group
        pass
    process.wait()
    return True
