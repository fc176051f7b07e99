"""Optimizer state beside the weights of versions: which versions have it, and when it is written.

Every version has its weights; the optimizer's state (moments, schedule, random states, critic) is twice as large, and written beside every
trainer.checkpoint.every-th. Invariant: of each version that is kept, the newest version on the way to it that has a state is kept as well,
so that the steps between the two can be replayed (`trainer.restoring`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spangrad.settings import TrainerSettings
from trainer.ledger.file_batches import has_trainers_state
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.publish import checkpoint


def steps_since_state(ledger: Ledger, version: LedgerVersion) -> tuple[LedgerVersion, list[LedgerVersion]]:
    """Return where the state of a version begins, and the steps that lead from there to it.

    Returns:
        The newest version on the way to `version` that has an optimizer state, or that no batch of rollouts made: its optimizer begins
        anew. The versions after it, up to `version`, oldest first; empty where it is `version` itself.
    """
    steps: list[LedgerVersion] = []
    while not checkpoint.has_state(Path(version.policy_version.path)) and has_trainers_state(ledger.database, version):
        steps.append(version)
        assert version.policy_version.parent is not None
        version = ledger.version(version.policy_version.parent)
    return version, steps[::-1]


class StateSchedule:
    """Schedule by which the optimizer's state is written."""

    def __init__(self, settings: TrainerSettings, ledger: Ledger, loaded: LedgerVersion, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with the version that is loaded, which the next step trains; `now` is a clock, in seconds."""
        self._settings = settings
        self._now = now
        self.steps = len(steps_since_state(ledger, loaded)[1])
        """Number of steps whose state is in memory alone."""
        self._written_at = now()

    def step(self) -> bool:
        """Count a step, and return whether its state is to be written."""
        settings, now = self._settings.checkpoint, self._now()
        late = settings.minutes is not None and now - self._written_at >= 60 * settings.minutes
        if self.steps + 1 >= settings.every or late or self._settings.lora.rank:
            self.steps, self._written_at = 0, now
            return True
        self.steps += 1
        return False
