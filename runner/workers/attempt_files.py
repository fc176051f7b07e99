"""Files of attempts on disk: what they printed, and how they ended.

In: attempts. Out: `attempts/ROLLOUT/ATTEMPT/` with `output.log` (what the agent printed) and `end.json`. Invariant: an attempt that printed
nothing and succeeded leaves nothing; the number of rollouts kept is bounded, and the oldest go first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

LOG = "output.log"
END = "end.json"
_DIRECTORY = "attempts"
_PRUNE_EVERY = 200
"""Endings between two removals of old files."""


@dataclass(frozen=True, slots=True)
class KeptAttempt:
    """Files of one attempt."""

    attempt: int
    end: dict[str, Any]
    """Content of `end.json`; empty if its worker had no time to write it."""
    log: Path | None
    """File with the output. None: it printed nothing."""


class AttemptFiles:
    """Directories of attempts below `runner.directory`."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Keep the files of `keep` rollouts; 0 disables the files."""
        self._root = directory.resolve() / _DIRECTORY
        self._keep = keep
        self._endings = 0

    def directory(self, rollout_id: str, attempt: int) -> str | None:
        """Return the directory of an attempt, which its first writer creates. None: no files are kept."""
        return str(self._root / _name(rollout_id) / str(attempt)) if self._keep else None

    def end(self, rollout_id: str, attempt: int, facts: Mapping[str, object]) -> None:
        """Write how an attempt ended; a success only where it printed something.

        Args:
            rollout_id: of the attempt.
            attempt: its number.
            facts: JSON; `reason` is None for a success.
        """
        where = self.directory(rollout_id, attempt)
        if where is None or not (facts.get("reason") or Path(where).exists()):
            return
        self._endings += 1
        try:
            Path(where).mkdir(parents=True, exist_ok=True)
            content = {**facts, "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds")}
            (Path(where) / END).write_text(json.dumps(content))
            if self._endings % _PRUNE_EVERY == 0:
                self.prune()
        except OSError:
            pass  # a full disk must not end the run; the span and the queue say how it ended

    def prune(self) -> None:
        """Remove the oldest rollouts beyond the number to keep."""
        if not self._root.exists():
            return
        rollouts = sorted(self._root.iterdir(), key=_begun)
        for rollout in rollouts[: max(0, len(rollouts) - self._keep)]:
            shutil.rmtree(rollout, ignore_errors=True)

    def kept(self, rollout_id: str) -> Iterator[KeptAttempt]:
        """Yield the files of a rollout's attempts, oldest first."""
        root = self._root / _name(rollout_id)
        numbers = sorted(int(path.name) for path in root.iterdir() if path.name.isdigit()) if root.is_dir() else []
        for number in numbers:
            log, end = root / str(number) / LOG, root / str(number) / END
            yield KeptAttempt(number, _read(end), log if log.exists() else None)


def _name(rollout_id: str) -> str:
    """Return the name of a rollout's directory, safe for any id."""
    return quote(rollout_id, safe="").replace(".", "%2E")[:200]


def _begun(rollout: Path) -> tuple[float, str]:
    """Return a sort key of a rollout's directory: the time when its newest attempt began to write, since ids may be in any order."""
    try:
        return rollout.stat().st_mtime, rollout.name
    except OSError:
        return 0.0, rollout.name  # another worker has removed it


def _read(end: Path) -> dict[str, Any]:
    try:
        return json.loads(end.read_text())
    except (OSError, ValueError):
        return {}
