"""Logs of attempts and of agent hosts on disk: what they printed.

In: attempts. Out: `attempts/ROLLOUT/ATTEMPT/output.log`, written by the attempt's process; and its end, for the span store. Invariant: an
attempt that printed nothing leaves nothing; the number of rollouts kept is bounded, and the oldest go first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from runner.ids import file_name
from spangrad.agent.attempt_log import FILE, free_beginning
from spangrad.agent.command import FREE_SECONDS
from spangrad.text_sanitizer import storable

_logger = logging.getLogger(__name__)

LOG_TAIL_BYTES = 8192
"""Size of the end of a log that the span store gets, in bytes."""
_HOST_TAIL_BYTES = 2000
"""Size of the end of a dead host's log that its attempts get as their detail, in bytes."""
_DIRECTORY = "attempts"
_PRUNE_EVERY = 200
"""Attempts between two removals of old files."""


class HostLog:
    """Part of a log file that one process has written."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self._start = file.stat().st_size if file.exists() else 0

    def open(self) -> BinaryIO:
        """Open the file to write to its end."""
        return self.file.open("ab")

    async def free_space(self) -> None:
        """Free the disk space of all but the end of the file now and then, until cancelled."""
        while True:
            await asyncio.sleep(FREE_SECONDS)
            with suppress(OSError):  # it was moved, or there are no descriptors
                file = os.open(self.file, os.O_WRONLY)
                try:
                    free_beginning(file)
                finally:
                    os.close(file)

    def tail(self) -> str:
        """Return the end of what was written, or the reason for which it cannot be read."""
        try:
            return _end_of(self.file, _HOST_TAIL_BYTES, self._start).strip()
        except OSError as error:
            return f"It cannot be read: {error.strerror}."


class AttemptFiles:
    """Directories of attempts below `runner.directory`."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Keep the files of `keep` rollouts; 0 disables the files."""
        self._root = directory.resolve() / _DIRECTORY
        self._keep = keep
        self._ended = 0

    def directory(self, rollout_id: str, attempt: int) -> str | None:
        """Return the directory of an attempt, which its first writer creates. None: no files are kept."""
        return str(self._root / file_name(rollout_id) / str(attempt)) if self._keep else None

    def tail(self, rollout_id: str, attempt: int) -> str:
        """Return the end of what an attempt printed; empty if it printed nothing, or no files are kept."""
        where = self.directory(rollout_id, attempt)
        try:
            return storable(_end_of(Path(where or os.devnull) / FILE, LOG_TAIL_BYTES))
        except OSError:
            return ""

    def ended(self, attempts: int) -> None:
        """Note that so many attempts have ended, and remove old files now and then."""
        self._ended += attempts
        if self._keep and self._ended >= _PRUNE_EVERY:
            self._ended = 0
            self.prune()

    def prune(self) -> None:
        """Remove the oldest rollouts beyond the number to keep."""
        try:
            rollouts = sorted(self._root.iterdir(), key=_begun)
        except FileNotFoundError:
            return  # nothing was printed
        except OSError as error:
            _logger.warning("old logs of attempts in %s are kept, since it cannot be listed: %s", self._root, error.strerror)
            return
        for rollout in rollouts[: max(0, len(rollouts) - self._keep)]:
            shutil.rmtree(rollout, ignore_errors=True)

    def logs(self, rollout_id: str) -> Mapping[int, Path]:
        """Return the logs of a rollout's attempts on this machine, by attempt."""
        root = self._root / file_name(rollout_id)
        numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit()) if root.is_dir() else []
        return {number: log for number in numbers if (log := root / str(number) / FILE).exists()}


def _end_of(file: Path, most_bytes: int, start: int = 0) -> str:
    """Return the end of a text file, from byte `start` on.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - most_bytes))
        return log.read().decode(errors="replace")


def _begun(rollout: Path) -> tuple[float, str]:
    """Return a sort key of a rollout's directory: the time when its newest attempt began to write, since ids may be in any order."""
    try:
        return rollout.stat().st_mtime, rollout.name
    except OSError:
        return 0.0, rollout.name  # another worker has removed it
