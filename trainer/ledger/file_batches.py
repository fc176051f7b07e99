"""Batches made of files, as the ledger records them.

In: a lease and what its batch is made of. Out: the runs of `spangrad tune` that led to a branch's head, and which rollouts the branch has
trained in either way. Invariant: a batch of files names its rollouts and claims none: a run goes through its rows once an epoch, each of
which may be a version. Rows and groups whose rollouts were trained in the other way, or by another run, are left out, unless the user asks
for them (docs/decisions/0010-a-run-of-files-names-its-rollouts.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from spangrad.types import VersionStatus
from trainer.data.source import BatchRollout, Group
from trainer.ledger.tables import BATCH_ROLLOUTS, TUNED_ROLLOUTS, TUNINGS, VERSIONS, LedgerDatabase, LedgerVersion

Attempt = tuple[str, str, int]
"""Run id, rollout id and attempt."""


@dataclass(frozen=True, slots=True)
class TunedFile:
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
class Tuning:
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
    files: tuple[TunedFile, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether the run ends with this batch."""
        return self.step == self.steps


def enter(transaction: sa.Connection, branch: Mapping[str, str], batch_id: str, tuning: Tuning, rollouts: Iterable[BatchRollout]) -> None:
    """Record the files and rollouts that a leased batch is made of."""
    facts = {**branch, "batch_id": batch_id, "method": tuning.method, "run": tuning.run, "step": tuning.step}
    whole = {"steps": tuning.steps, "examples": tuning.examples}
    transaction.execute(TUNINGS.insert().values(**facts, **whole, files=json.dumps([asdict(file) for file in tuning.files])))
    rows = [
        {
            **branch,
            "batch_id": batch_id,
            "run_id": rollout.group.run_id,
            "mode": rollout.group.mode,
            "group_id": rollout.group.group_id,
            "build_spec": rollout.group.build_spec,
            "rollout_id": rollout.rollout_id,
            "attempt": rollout.attempt,
            "revision": rollout.revision,
        }
        for rollout in rollouts
    ]
    if rows:
        transaction.execute(TUNED_ROLLOUTS.insert(), rows)


def undo(transaction: sa.Connection, batch_id: str) -> None:
    """Forget a batch that was never committed."""
    for table in (TUNINGS, TUNED_ROLLOUTS):
        transaction.execute(table.delete().where(table.c.batch_id == batch_id))


def rollouts_of(transaction: sa.Connection, batch_id: str) -> list[BatchRollout]:
    """Return the rollouts that a batch of files names, in order."""
    order = (TUNED_ROLLOUTS.c.group_id, TUNED_ROLLOUTS.c.rollout_id, TUNED_ROLLOUTS.c.attempt)
    rows = transaction.execute(sa.select(TUNED_ROLLOUTS).where(TUNED_ROLLOUTS.c.batch_id == batch_id).order_by(*order))
    return [
        BatchRollout(Group(row.run_id, row.mode, row.build_spec, row.group_id), row.rollout_id, row.attempt, row.revision) for row in rows
    ]


def tuning_of(database: LedgerDatabase, batch_id: str | None) -> Tuning | None:
    """Return the files that a batch is made of. None: it is made of rollouts, or there is no such batch."""
    if batch_id is None:
        return None
    with database.transaction() as transaction:
        row = transaction.execute(sa.select(TUNINGS).where(TUNINGS.c.batch_id == batch_id)).first()
        return _tuning(row) if row else None


def has_trainers_state(database: LedgerDatabase, version: LedgerVersion) -> bool:
    """Return whether a batch of rollouts made a version, so that the trainer continues from the optimizer state beside its weights.

    Initial weights have no such state, and a run over files has an optimizer and a schedule of its own.
    """
    batch_id = version.policy_version.batch_id
    return batch_id is not None and tuning_of(database, batch_id) is None


def last_of(database: LedgerDatabase, policy: str, branch: str, run: str, lineage: Sequence[int]) -> tuple[int, Tuning] | None:
    """Return the newest version that a run has committed on the way to the head, and its batch. None: the run has not begun there."""
    with database.transaction() as transaction:
        rows = transaction.execute(
            sa.select(VERSIONS.c.version, TUNINGS)
            .join(TUNINGS, VERSIONS.c.batch_id == TUNINGS.c.batch_id)
            .where(
                VERSIONS.c.policy == policy,
                VERSIONS.c.branch == branch,
                VERSIONS.c.status == VersionStatus.COMMITTED,
                TUNINGS.c.run == run,
            )
            .order_by(VERSIONS.c.version.desc())
        )
        known = set(lineage)
        return next(((row.version, _tuning(row)) for row in rows if row.version in known), None)


def trained_attempts(database: LedgerDatabase, policy: str, branch: str, begun: Tuning | None) -> set[Attempt]:
    """Return every rollout's attempt that a branch has trained, or is training, in batches of rollouts or of files.

    Args:
        database: the ledger's.
        policy: name of the policy.
        branch: name of the branch.
        begun: a batch of a run that is resumed, whose own rollouts do not count: those of all batches that trained these examples. A run
            that began again after a rollback has other examples: what it had trained before counts. None: all count.
    """
    attempts: set[Attempt] = set()
    with database.transaction() as transaction:
        for table in (BATCH_ROLLOUTS, TUNED_ROLLOUTS):
            chosen = sa.select(table.c.run_id, table.c.rollout_id, table.c.attempt).where(
                table.c.policy == policy, table.c.branch == branch
            )
            if table is TUNED_ROLLOUTS and begun:
                own = sa.select(TUNINGS.c.batch_id).where(TUNINGS.c.run == begun.run, TUNINGS.c.examples == begun.examples)
                chosen = chosen.where(table.c.batch_id.not_in(own))
            attempts |= {(row.run_id, row.rollout_id, row.attempt) for row in transaction.execute(chosen)}
    return attempts


def _tuning(row: sa.Row[tuple[object, ...]]) -> Tuning:
    files = tuple(TunedFile(**file) for file in json.loads(row.files))
    return Tuning(row.method, row.run, row.step, row.steps, row.examples, files)
