"""Branch as the trainer's next step sees it: a pending version, which is trained and not committed yet, counts as committed.

In: the ledger, and the version whose checkpoint is being written. Out: head, lineage, steps. Invariant: every answer is what the ledger
answers once the pending version is committed, and nothing has happened beside.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from spangrad.settings import Settings
from trainer.data.source import BatchRollout, Group
from trainer.ledger.ledger import BatchLease, Ledger
from trainer.ledger.recovery import newest_version, undo_leases
from trainer.ledger.tables import LedgerVersion

logger = logging.getLogger(__name__)


class WorkingBranch:
    """Branch of one trainer's ledger, with the version that the trainer is about to commit."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin without a pending version."""
        self.ledger = ledger
        self.pending: LedgerVersion | None = None
        """Version that is trained, leased, and not committed yet; until it is committed, its lease is the branch's only one."""
        self._awaited: str | None = None
        """Holder of the step that was awaited last."""

    @property
    def pending_batch(self) -> str | None:
        """Return the id of the pending version's batch."""
        pending = self.pending
        return pending.policy_version.batch_id if pending else None

    def leased(self, lease: BatchLease, parent: LedgerVersion, metrics: dict[str, float]) -> LedgerVersion:
        """Return the version that a lease makes, with what is known before its checkpoint is written; its tokenizer is the parent's."""
        return replace(self.ledger.version(lease.version), tokenizer_hash=parent.tokenizer_hash, metrics=metrics)

    def head(self) -> LedgerVersion:
        """Return the version that the next step trains.

        Raises:
            LedgerError: there is none.
        """
        return self.pending or newest_version(self.ledger)

    def lineage(self) -> list[int]:
        """Return the numbers of the versions that led to the head, oldest first (`Ledger.lineage`)."""
        pending, committed = self.pending, self.ledger.lineage()
        return [*(number for number in committed if number < pending.version), pending.version] if pending else committed

    def newest(self, count: int) -> list[LedgerVersion]:
        """Return the newest versions that the branch has committed, so many at most, oldest first; a pending one is the last."""
        pending = self.pending
        numbers = [number for number in self.ledger.committed_versions() if not pending or number != pending.version]
        left = max(count - (pending is not None), 0)
        known = self.ledger.versions(numbers[-left:]) if left else []
        return [*known, pending] if pending and count > 0 else known

    def steps(self) -> int:
        """Return the number of steps that the branch has made."""
        pending = self.pending
        return len({*self.ledger.committed_versions(), *([pending.version] if pending else [])}) - 1

    def claimed(self, rollouts: Sequence[BatchRollout]) -> dict[Group, str]:
        """Return the groups of which a rollout is in a batch of the branch, with a sentence about each."""
        return self.ledger.claimed(rollouts, self.pending_batch)

    def is_busy(self) -> bool:
        """Return whether another process makes a step of the branch; log each such process once."""
        holder = None if self.pending else self.ledger.holder()
        if holder and holder != self._awaited:
            logger.info("%s makes a step of branch %s: waiting for its end", holder, self.head().branch)
        self._awaited = holder
        return holder is not None

    def undo_leases(self, settings: Settings) -> list[int]:
        """Undo the lease of a step that failed, and those of the dead (`undo_leases`); nothing while a version is pending.

        Returns:
            The versions that this call orphaned.
        """
        return [] if self.pending else undo_leases(self.ledger, settings)
