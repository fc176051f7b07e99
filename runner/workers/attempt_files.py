"""Logs of attempts on disk: what they printed.

In: attempts. Out: `attempts/ROLLOUT/ATTEMPT/output.log`, written by the attempt's process; and its end, for the span store. Invariant: an
attempt that printed nothing leaves nothing; the number of rollouts kept is bounded, and the oldest go first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from spangrad.text_sanitizer import storable

LOG = "output.log"
LOG_TAIL_BYTES = 8192
"""Size of the end of a log that the span store gets, in bytes."""
_DIRECTORY = "attempts"
_PRUNE_EVERY = 200
"""Attempts between two removals of old files."""


class AttemptFiles:
    """Directories of attempts below `runner.directory`."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Keep the files of `keep` rollouts; 0 disables the files."""
        self._root = directory.resolve() / _DIRECTORY
        self._keep = keep
        self._ended = 0

    def directory(self, rollout_id: str, attempt: int) -> str | None:
        """Return the directory of an attempt, which its first writer creates. None: no files are kept."""
        return str(self._root / _name(rollout_id) / str(attempt)) if self._keep else None

    def tail(self, rollout_id: str, attempt: int) -> str:
        """Return the end of what an attempt printed; empty if it printed nothing, or no files are kept."""
        where = self.directory(rollout_id, attempt)
        try:
            with (Path(where or os.devnull) / LOG).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - LOG_TAIL_BYTES))
                return storable(log.read().decode(errors="replace"))
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
        if not self._root.exists():
            return
        rollouts = sorted(self._root.iterdir(), key=_begun)
        for rollout in rollouts[: max(0, len(rollouts) - self._keep)]:
            shutil.rmtree(rollout, ignore_errors=True)

    def logs(self, rollout_id: str) -> Mapping[int, Path]:
        """Return the logs of a rollout's attempts on this machine, by attempt."""
        root = self._root / _name(rollout_id)
        numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit()) if root.is_dir() else []
        return {number: log for number in numbers if (log := root / str(number) / LOG).exists()}


def _name(rollout_id: str) -> str:
    """Return the name of a rollout's directory, safe for any id."""
    return quote(rollout_id, safe="").replace(".", "%2E")[:200]


def _begun(rollout: Path) -> tuple[float, str]:
    """Return a sort key of a rollout's directory: the time when its newest attempt began to write, since ids may be in any order."""
    try:
        return rollout.stat().st_mtime, rollout.name
    except OSError:
        return 0.0, rollout.name  # another worker has removed it
