"""Batches made of files, as the ledger records them.

Invariant: a batch of files names its rollouts and claims none: a run goes through its rows once an epoch, each of which may be a version.
Rows and groups whose rollouts were trained in the other way, or by another run, are left out, unless the user asks for them
(docs/decisions/0010-a-run-of-files-names-its-rollouts.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from spangrad.types import VersionStatus
from trainer.data.source import AttemptKey, BatchRollout
from trainer.ledger import batch_rollouts
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, FILE_BATCHES, LEASES, VERSIONS, LedgerDatabase, LedgerVersion


@dataclass(frozen=True, slots=True)
class BatchFile:
    """File of a batch."""

    name: str
    """Name of the file, without its directory."""
    checksum: str
    """SHA-256 of its contents, in hexadecimal."""
    size: int
    """Size of the file, in bytes."""
    rows: int
    """Number of its rows that the batch trained, each counted once."""


@dataclass(frozen=True, slots=True)
class FileBatch:
    """Batch of a run over files."""

    method: str
    run: str
    """Digest of the files, the settings that decide what is learnt, and whether rows were trained again: equal digests are one run."""
    step: int
    """Number of optimizer steps of the run so far, this batch's included."""
    steps: int
    """Number of optimizer steps of the whole run."""
    examples: str
    """Digest of the examples that the run trains (`trainer.sft.examples.digest_of`): a run continues only with the same."""
    files: tuple[BatchFile, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether the run ends with this batch."""
        return self.step == self.steps


def enter(
    transaction: sa.Connection, branch: Mapping[str, str], batch_id: str, file_batch: FileBatch, rollouts: Sequence[BatchRollout]
) -> None:
    """Record the files and rollouts that a leased batch is made of."""
    facts = {**branch, "batch_id": batch_id, "method": file_batch.method, "run": file_batch.run, "step": file_batch.step}
    whole = {"steps": file_batch.steps, "examples": file_batch.examples}
    transaction.execute(FILE_BATCHES.insert().values(**facts, **whole, files=json.dumps([asdict(file) for file in file_batch.files])))
    batch_rollouts.enter(transaction, FILE_BATCH_ROLLOUTS, branch, batch_id, rollouts)


def undo(transaction: sa.Connection, batch_id: str) -> None:
    """Forget a batch that was never committed."""
    for table in (FILE_BATCHES, FILE_BATCH_ROLLOUTS):
        transaction.execute(table.delete().where(table.c.batch_id == batch_id))


def file_batch_of(database: LedgerDatabase, batch_id: str | None) -> FileBatch | None:
    """Return the files that a batch is made of. None: it is made of rollouts, or there is no such batch."""
    if batch_id is None:
        return None
    with database.reading() as connection:
        row = connection.execute(sa.select(FILE_BATCHES).where(FILE_BATCHES.c.batch_id == batch_id)).first()
        return _file_batch(row) if row else None


def has_trainers_state(database: LedgerDatabase, version: LedgerVersion) -> bool:
    """Return whether a batch of rollouts made a version, so that the trainer continues from the optimizer state beside its weights.

    Initial weights have no such state, and a run over files has an optimizer and a schedule of its own.
    """
    batch_id = version.policy_version.batch_id
    return batch_id is not None and file_batch_of(database, batch_id) is None


def last_of(database: LedgerDatabase, policy: str, branch: str, run: str, lineage: Sequence[int]) -> tuple[int, FileBatch] | None:
    """Return the newest version that a run has committed on the way to the head, and its batch. None: the run has not begun there."""
    with database.reading() as transaction:
        rows = transaction.execute(
            sa.select(VERSIONS.c.version, FILE_BATCHES)
            .join(FILE_BATCHES, VERSIONS.c.batch_id == FILE_BATCHES.c.batch_id)
            .where(
                VERSIONS.c.policy == policy,
                VERSIONS.c.branch == branch,
                VERSIONS.c.status == VersionStatus.COMMITTED,
                FILE_BATCHES.c.run == run,
            )
            .order_by(VERSIONS.c.version.desc())
        )
        known = set(lineage)
        return next(((row.version, _file_batch(row)) for row in rows if row.version in known), None)


def runs_of(database: LedgerDatabase, policy: str, branch: str, versions: Sequence[int]) -> dict[int, str]:
    """Return the run over files that made each of some versions of a branch; those that batches of rollouts made are left out."""
    query = (
        sa.select(VERSIONS.c.version, FILE_BATCHES.c.run)
        .join(FILE_BATCHES, VERSIONS.c.batch_id == FILE_BATCHES.c.batch_id)
        .where(VERSIONS.c.policy == policy, VERSIONS.c.branch == branch, VERSIONS.c.version.in_(versions))
    )
    with database.reading() as connection:
        return {int(version): str(run) for version, run in connection.execute(query)}


def trained_attempts(database: LedgerDatabase, policy: str, branch: str, begun: FileBatch | None) -> set[AttemptKey]:
    """Return every rollout's attempt that a branch has trained, in batches of rollouts or of files.

    What a step under way trains does not count: it may be undone. Once it is committed, the branch has another head, from which a run over
    files is planned anew. Nor do the rollouts of the batches that trained the examples of `begun`, a batch of a run that is resumed (None:
    no run is); a run that began again after a rollback has other examples, and what it had trained before counts.
    """
    attempts: set[AttemptKey] = set()
    leased = sa.select(LEASES.c.batch_id)
    with database.reading() as transaction:
        for table in (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS):
            chosen = sa.select(table.c.run_id, table.c.rollout_id, table.c.attempt).where(
                table.c.policy == policy, table.c.branch == branch, table.c.batch_id.not_in(leased)
            )
            if table is FILE_BATCH_ROLLOUTS and begun:
                own = sa.select(FILE_BATCHES.c.batch_id).where(FILE_BATCHES.c.run == begun.run, FILE_BATCHES.c.examples == begun.examples)
                chosen = chosen.where(table.c.batch_id.not_in(own))
            attempts |= {(row.run_id, row.rollout_id, row.attempt) for row in transaction.execute(chosen)}
    return attempts


def _file_batch(row: sa.Row[tuple[object, ...]]) -> FileBatch:
    files = tuple(BatchFile(**file) for file in json.loads(row.files))
    return FileBatch(row.method, row.run, row.step, row.steps, row.examples, files)
