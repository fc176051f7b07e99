"""What batches made of files leave in the ledger.

In: a lease and what its batch is made of. Out: the runs of `spangrad tune` that led to a branch's head, and which rollouts the branch has
trained in either way. Invariant: a batch of files names its rollouts and claims none: a run goes through its rows once an epoch, each of
which may be a version. That no rollout is trained by a run of files and again by a batch of its own, or by another run, is kept by leaving
its rows and groups out, unless that is asked for (docs/decisions/0010-a-run-of-files-names-its-rollouts.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from spangrad.types import VersionStatus
from trainer.data.source import BatchRollout, Group
from trainer.ledger.tables import BATCH_ROLLOUTS, TUNED_ROLLOUTS, TUNINGS, VERSIONS, Database, LedgerVersion

Attempt = tuple[str, str, int]
"""Run, rollout and attempt."""


@dataclass(frozen=True, slots=True)
class TunedFile:
    """A file of a batch."""

    name: str
    """Without its directory."""
    checksum: str
    """SHA-256 of its contents, in hex."""
    size: int
    rows: int
    """Of it that the batch trained, each once."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """One batch of a run over files."""

    method: str
    run: str
    """Of the rows' files, the settings that decide what is learnt, and whether rows were trained again: the same again is the same run."""
    step: int
    """Optimiser steps of the run, this batch's among them."""
    steps: int
    """Of the whole run."""
    examples: str
    """Names exactly what the run trains (`trainer.sft.examples.digest_of`): a run goes on with nothing else."""
    files: tuple[TunedFile, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the run ends here."""
        return self.step == self.steps


def enter(transaction: sa.Connection, branch: Mapping[str, str], batch_id: str, tuning: Tuning, rollouts: Iterable[BatchRollout]) -> None:
    """Write what a leased batch is made of."""
    facts = {**branch, "batch_id": batch_id, "method": tuning.method, "run": tuning.run, "step": tuning.step}
    whole = {"steps": tuning.steps, "examples": tuning.examples}
    transaction.execute(TUNINGS.insert().values(**facts, **whole, files=json.dumps([asdict(one) for one in tuning.files])))
    rows = [
        {
            **branch,
            "batch_id": batch_id,
            "run_id": one.group.run_id,
            "mode": one.group.mode,
            "group_id": one.group.group_id,
            "build_spec": one.group.build_spec,
            "rollout_id": one.rollout_id,
            "attempt": one.attempt,
            "revision": one.revision,
        }
        for one in rollouts
    ]
    if rows:
        transaction.execute(TUNED_ROLLOUTS.insert(), rows)


def undo(transaction: sa.Connection, batch_id: str) -> None:
    """Forget a batch that was never committed."""
    for table in (TUNINGS, TUNED_ROLLOUTS):
        transaction.execute(table.delete().where(table.c.batch_id == batch_id))


def rollouts_of(transaction: sa.Connection, batch_id: str) -> list[BatchRollout]:
    """The rollouts that a batch of files names, in order."""
    order = (TUNED_ROLLOUTS.c.group_id, TUNED_ROLLOUTS.c.rollout_id, TUNED_ROLLOUTS.c.attempt)
    rows = transaction.execute(sa.select(TUNED_ROLLOUTS).where(TUNED_ROLLOUTS.c.batch_id == batch_id).order_by(*order))
    return [
        BatchRollout(Group(row.run_id, row.mode, row.build_spec, row.group_id), row.rollout_id, row.attempt, row.revision) for row in rows
    ]


def tuning_of(database: Database, batch_id: str | None) -> Tuning | None:
    """What a batch is made of. None: of rollouts of its own, or there is none."""
    if batch_id is None:
        return None
    with database.transaction() as transaction:
        row = transaction.execute(sa.select(TUNINGS).where(TUNINGS.c.batch_id == batch_id)).first()
        return _tuning(row) if row else None


def has_trainers_state(database: Database, version: LedgerVersion) -> bool:
    """Whether a batch of rollouts made a version, so that the optimiser's state beside its weights is one that the trainer goes on from.

    What training began with has none, and a run over files has an optimiser and a schedule of its own.
    """
    batch_id = version.policy_version.batch_id
    return batch_id is not None and tuning_of(database, batch_id) is None


def last_of(database: Database, policy: str, branch: str, run: str, lineage: Sequence[int]) -> tuple[int, Tuning] | None:
    """The newest version that a run has committed on the way to the head, and its batch. None: the run has not begun there."""
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


def trained_attempts(database: Database, policy: str, branch: str, begun: Tuning | None) -> set[Attempt]:
    """Every rollout's attempt that a branch has trained, or is training, in batches of their own or out of files.

    Args:
        database: the ledger's.
        policy: whose.
        branch: whose.
        begun: a batch of a run that goes on, whose own rollouts do not count: all batches that trained these examples. One that began
            anew after a rollback found other examples: what it had trained before counts. None: all count.
    """
    found: set[Attempt] = set()
    with database.transaction() as transaction:
        for table in (BATCH_ROLLOUTS, TUNED_ROLLOUTS):
            chosen = sa.select(table.c.run_id, table.c.rollout_id, table.c.attempt).where(
                table.c.policy == policy, table.c.branch == branch
            )
            if table is TUNED_ROLLOUTS and begun:
                own = sa.select(TUNINGS.c.batch_id).where(TUNINGS.c.run == begun.run, TUNINGS.c.examples == begun.examples)
                chosen = chosen.where(table.c.batch_id.not_in(own))
            found |= {(row.run_id, row.rollout_id, row.attempt) for row in transaction.execute(chosen)}
    return found


def _tuning(row: sa.Row[tuple[object, ...]]) -> Tuning:
    files = tuple(TunedFile(**one) for one in json.loads(row.files))
    return Tuning(row.method, row.run, row.step, row.steps, row.examples, files)
