"""Transaction of a training step, whatever it trains on: begin, write the checkpoint, commit; an error before the commit undoes it.

In: what a batch uses, and what the step trained. Out: a committed version. Invariant: at every instruction the ledger knows enough to
resume; a signal is held back while the ledger is written, and a lease that is not committed is undone, here or at the next start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import LedgerError, SpangradError
from spangrad.leases import BEATS
from spangrad.settings import Settings
from spangrad.weights.shards import TensorSums
from trainer.data.source import BatchRollout
from trainer.ledger.ledger import BatchLease, Ledger
from trainer.ledger.recovery import undo_leases
from trainer.ledger.tables import LedgerVersion
from trainer.ledger.working_branch import WorkingBranch
from trainer.publish import checkpoint
from trainer.publish.lora import adapter_of
from trainer.retries import without_retries
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    import polars as pl

    from trainer.ledger.file_batches import FileBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepTransaction:
    """Transactions of one trainer's steps, one at a time."""

    settings: Settings
    branch: WorkingBranch
    shutdown: Shutdown

    @contextmanager
    def undone_on_error(self, *, but: tuple[type[BaseException], ...] = ()) -> Generator[None]:
        """Undo the leases of this process when the block fails, except by errors that the caller handles (`but`).

        The process ends then: no signal interrupts what is left to do.
        """
        try:
            yield
        except but:
            raise
        except BaseException:
            self.shutdown.end()
            self.undo()
            raise

    def undo(self, *, pending: bool = False) -> None:
        """Undo the leases of this process after an error, with `pending` the pending version's, too; if this fails, the next start does."""
        try:
            if pending:
                undo_leases(self.branch.ledger, self.settings)
            else:
                self.branch.undo_leases(self.settings)
        except (SpangradError, OSError) as error:
            logger.warning("%s", error)

    def begin(self, rollouts: Sequence[BatchRollout], parent: LedgerVersion, files: FileBatch | None = None) -> BatchLease | None:
        """Lease rollouts, or files, for a step from a version. None: another step is under way, or the branch has another head by now."""
        with self.shutdown.shielded():
            return self.branch.ledger.begin(rollouts, parent.version, files=files)

    def write(
        self, lease: BatchLease, parent: LedgerVersion, write: checkpoint.Save, *, calls: pl.DataFrame | None = None
    ) -> checkpoint.Checkpoint:
        """Write the checkpoint of the version that the lease makes.

        `write` writes the weights, and the optimizer's state where the run is resumed from it. `calls` are those that the step trained,
        with their advantages; None: it trained files.

        Raises:
            CheckpointError: it cannot be written.
        """
        settings, base = self.settings.trainer, Path(parent.policy_version.path)

        def save(directory: Path) -> Mapping[str, TensorSums] | None:
            sums = write(directory)
            if calls is not None:
                calls.write_parquet(directory / checkpoint.TRAINED_CALLS)
            return sums

        return checkpoint.write(settings, lease, base, save, adapter_of(base, settings))

    def commit(self, lease: BatchLease, written: checkpoint.Checkpoint, metrics: dict[str, float]) -> LedgerVersion:
        """Commit the version, and return it.

        Raises:
            LedgerError: the lease was lost.
        """
        ledger = self.branch.ledger
        with self.shutdown.shielded():
            ledger.commit(lease, checksum=written.checksum, path=str(written.path), tokenizer_hash=written.tokenizer_hash, metrics=metrics)
        return ledger.version(lease.version)


@contextmanager
def beating(ledger: Ledger, lease: BatchLease) -> Generator[None]:
    """Renew a lease until the block ends, or the lease is lost, which is logged: the commit alone decides whether a step counts."""
    done = threading.Event()

    def beat() -> None:
        with without_retries():  # a beat that comes late is worth less than the next one
            while not done.wait(ledger.lease_seconds / BEATS):
                try:
                    if not ledger.renew(lease):
                        logger.warning("the lease of version %d is lost: its step will not be committed", lease.version)
                        return
                except LedgerError as error:
                    logger.warning("the lease of version %d could not be renewed: %s", lease.version, error)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
