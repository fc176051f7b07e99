"""Ledger: the durable record of which batch made which version; it hands out version numbers and leases rollouts to batches.

Invariant: a rollout's attempt belongs to one batch of a policy's branch at most (the primary key of `batch_rollouts`), each change is one
transaction, and a version's number is never handed out twice, in no branch of the policy: a call that names a version names its weights.

A branch has one lease at a time, since each step trains what the one before it made; trainers of one branch take turns, those of several
work side by side. A lease ends by its commit, or it is undone: by its own process when a step fails, by any other once its process is
known to be dead or it has expired unrenewed. Then its rollouts are free again, its number is marked orphaned, and it cannot be committed.

A branch's head is the version that its next step trains: the newest commit, or an older one after `rollback`. Versions that were rolled
back stay, with their batches: their rollouts are not trained again.

A branch that begins with weights which another branch of the policy committed begins as that version: it has its number, and names it as
its parent. What came before it counts as the new branch's past (`lineage`), so that rollouts which the old branch sampled are no staler
here than there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from spangrad.database import insert_new, repeated
from spangrad.errors import LedgerError
from spangrad.leases import LeaseClock, is_dead, shown, this_process
from spangrad.settings import TrainerSettings
from spangrad.types import VersionStatus
from trainer.data.built_groups import Key
from trainer.data.source import BatchRollout, Group
from trainer.ledger import batch_rollouts, file_batches
from trainer.ledger.file_batches import FileBatch
from trainer.ledger.lineage import VersionLine, ancestry, free_number, has_other_children, head_of, parents
from trainer.ledger.skipped_groups import SkippedGroups
from trainer.ledger.tables import BATCH_ROLLOUTS, HEADS, LEASES, PINS, VERSIONS, LedgerDatabase, LedgerVersion, equal_to, version_of


@dataclass(frozen=True, slots=True)
class BatchLease:
    """Right to make one version of one batch."""

    batch_id: str
    version: int
    parent: int


class Ledger:
    """Ledger of one branch of one policy, for one trainer."""

    def __init__(
        self,
        location: Path | str,
        policy: str,
        branch: str,
        *,
        lease_seconds: float = 60.0,
        holder: str | None = None,
        settings: TrainerSettings | None = None,
    ) -> None:
        """Open the ledger in trainer.directory or at a database's URL (trainer.ledger_url), making it when there is none.

        A lease holds `lease_seconds` unrenewed, of this process unless another `holder` is named; skips depend on `settings` (None: the
        defaults).

        Raises:
            LedgerError: there is no such database.
        """
        self._branch = {"policy": policy, "branch": branch}
        self.lease_seconds = lease_seconds
        self._holder = holder or this_process()
        self._watch = LeaseClock[str]()
        self.database = LedgerDatabase(location)
        self._line = VersionLine(self.database, self._branch)
        self.skips = SkippedGroups(self.database, self._branch, settings or TrainerSettings())

    def close(self) -> None:
        """Close the database's connections."""
        self.database.close()

    def register_initial(self, *, checksum: str, path: str, tokenizer_hash: str, run_id: str) -> None:
        """Record the weights that this branch begins with.

        Weights (and a tokenizer) that another branch of the policy has committed keep that version's number, which becomes their parent; of
        several, the version whose path it is, else the newest. Others get 0, or the policy's next free number.

        Raises:
            LedgerError: there is a version already.
        """
        with self.database.transaction() as transaction:
            if head_of(transaction, self._branch) is not None:
                raise LedgerError(f"the ledger of {self._branch['policy']} already has versions; weights to begin with come first.")
            version, branch = self._beginning(transaction, checksum, path, tokenizer_hash)
            transaction.execute(
                VERSIONS.insert().values(
                    **self._branch,
                    version=version,
                    parent=None if branch is None else version,
                    parent_branch=branch or "",
                    run_id=run_id,
                    modes="",
                    status=VersionStatus.COMMITTED,
                    checksum=checksum,
                    path=path,
                    tokenizer_hash=tokenizer_hash,
                )
            )
            transaction.execute(HEADS.insert().values(**self._branch, version=version))

    def beginning(self, *, checksum: str, path: str, tokenizer_hash: str) -> list[int]:
        """Return the lineage that this branch would have if it had begun with these weights (`register_initial`)."""
        with self.database.reading() as transaction:
            version, branch = self._beginning(transaction, checksum, path, tokenizer_hash)
            return [version] if branch is None else ancestry(parents(transaction, self._branch["policy"]), branch, version)

    def begin(self, rollouts: Sequence[BatchRollout], parent: int | None = None, *, files: FileBatch | None = None) -> BatchLease | None:
        """Lease rollouts to a new batch, and assign the number of the version that it will make.

        Args:
            rollouts: what the batch is made of.
            parent: the version that will be trained. None: the head.
            files: of a batch made of files, which names the rollouts and claims none. None: of a batch of rollouts.

        Returns:
            None: another trainer's step is under way, or the head is no longer `parent`; try again later.

        Raises:
            AlreadyTrainedError: a rollout is in another batch; nothing was leased.
            LedgerError: there are no weights to train.
        """
        with self.database.transaction() as transaction:
            head = head_of(transaction, self._branch)
            if head is None:
                raise LedgerError("the ledger has no weights to train. Start `spangrad train` with --model.")
            row = self._lease(transaction)
            if row and not self._is_over(row):
                return None
            if row:
                self._undo(transaction, row["batch_id"])
            if parent not in {None, head}:
                return None
            lease = BatchLease(uuid.uuid4().hex, free_number(transaction, self._branch["policy"]), head)
            runs, modes = {rollout.group.run_id for rollout in rollouts}, {rollout.group.mode for rollout in rollouts}
            values = {**self._branch, "batch_id": lease.batch_id, "version": lease.version}
            of_version = {**values, "parent": head, "parent_branch": self._branch["branch"]}
            transaction.execute(VERSIONS.insert().values(**of_version, run_id=",".join(sorted(runs)), modes=",".join(sorted(modes))))
            transaction.execute(LEASES.insert().values(**values, holder=self._holder, seconds=self.lease_seconds))
            if files:
                file_batches.enter(transaction, self._branch, lease.batch_id, files, rollouts)
            else:
                batch_rollouts.claim(transaction, self._branch, lease.batch_id, rollouts)
        return lease

    def renew(self, lease: BatchLease) -> bool:
        """Renew a lease for another trainer.lease_seconds. Return False if it was undone."""
        with self.database.transaction() as transaction:
            beats = {"seconds": self.lease_seconds, "beats": LEASES.c.beats + 1}
            return transaction.execute(LEASES.update().where(LEASES.c.batch_id == lease.batch_id).values(beats)).rowcount == 1

    def commit(self, lease: BatchLease, *, checksum: str, path: str, tokenizer_hash: str, metrics: dict[str, float]) -> None:
        """Make a leased batch and its version final, and the branch's head, in one transaction.

        Raises:
            LedgerError: the lease has ended.
        """
        with self.database.transaction() as transaction:
            if transaction.execute(LEASES.delete().where(LEASES.c.batch_id == lease.batch_id)).rowcount != 1:
                raise LedgerError(
                    f"the lease of batch {lease.batch_id} (version {lease.version}) is gone: it expired and another trainer took over, or "
                    "the branch was rolled back. Nothing was committed. Start `spangrad train` again; raise trainer.lease_seconds if this "
                    "process was held up for longer."
                )
            transaction.execute(
                VERSIONS.update()
                .where(VERSIONS.c.batch_id == lease.batch_id)
                .values(
                    status=VersionStatus.COMMITTED,
                    checksum=checksum,
                    path=path,
                    tokenizer_hash=tokenizer_hash,
                    metrics=json.dumps(metrics),
                )
            )
            transaction.execute(HEADS.update().where(*self._of_branch(HEADS)).values(version=lease.version))

    def recover(self) -> list[int]:
        """Undo the branch's lease if its holder is this process or dead, or it has expired: free its rollouts, orphan its version's number.

        Returns:
            The versions that this call orphaned.
        """
        if self.database.remembered("lease", self._lease) is None:
            return []
        with self.database.transaction() as transaction:
            row = self._lease(transaction)
            if row is None or not (row["holder"] == self._holder or self._is_over(row)):
                return []
            self._undo(transaction, row["batch_id"])
            return [int(row["version"])]

    def rollback(self, version: int) -> LedgerVersion:
        """Make an older (or, taking that back, a newer) version of this branch its head; a step that is under way is cancelled.

        Raises:
            LedgerError: the branch has not committed it.
        """
        with self.database.transaction() as transaction:
            where = (*self._of_branch(VERSIONS), VERSIONS.c.version == version, VERSIONS.c.status == VersionStatus.COMMITTED)
            row_of_version = transaction.execute(sa.select(VERSIONS).where(*where)).mappings().first()
            if row_of_version is None:
                policy, branch = self._branch.values()
                raise LedgerError(f"branch {branch} of {policy} has committed no version {version}. `spangrad policy list` shows them.")
            if row := self._lease(transaction):
                self._undo(transaction, row["batch_id"])
            transaction.execute(HEADS.update().where(*self._of_branch(HEADS)).values(version=version))
            return version_of(row_of_version)

    def orphan(self, versions: Sequence[LedgerVersion], head: int) -> bool:
        """Orphan the branch's newest versions, given oldest first, free their rollouts, and make `head`, the one before them, its head.

        Returns:
            False: a step is under way, the head has moved meanwhile, one of them is pinned, or another version came of one, as after a
            rollback or on another branch; nothing has changed.
        """
        numbers = {version.version for version in versions}
        with self.database.transaction() as transaction:
            is_head = head_of(transaction, self._branch) == versions[-1].version and not self._lease(transaction)
            if not is_head or numbers & self._pinned(transaction) or has_other_children(transaction, self._branch, numbers):
                return False
            for version in versions:
                self._undo(transaction, version.policy_version.batch_id or "")
            self.database.note_freed(transaction)
            transaction.execute(HEADS.update().where(*self._of_branch(HEADS)).values(version=head))
        return True

    @repeated
    def claimed(self, rollouts: Sequence[BatchRollout], pending: str | None = None) -> dict[Group, str]:
        """Return the groups of which a rollout is in a batch of the branch, committed or `pending`, with a sentence about each."""
        with self.database.reading() as connection:
            return dict(batch_rollouts.claimed(connection, self._branch, rollouts, pending))

    @repeated
    def add_metrics(self, version: int, metrics: dict[str, float]) -> None:
        """Add metrics that were not known when the version was committed."""
        with self.database.transaction() as transaction:
            where = [*self._of_branch(VERSIONS), VERSIONS.c.version == version]
            old = transaction.execute(sa.select(VERSIONS.c.metrics).where(*where)).scalar_one()
            transaction.execute(VERSIONS.update().where(*where).values(metrics=json.dumps({**json.loads(old), **metrics})))

    def finished_groups(self, run_id: str, build_spec: str, *, finetuned: bool = True) -> tuple[set[Key], set[Key]]:
        """Return the groups that must not be taken (`batch_rollouts.finished`)."""
        with self.database.reading() as connection:
            return batch_rollouts.finished(connection, self._branch, run_id, build_spec, finetuned=finetuned)

    @repeated
    def versions(self, numbers: Collection[int] | None = None) -> list[LedgerVersion]:
        """Return the versions of some numbers, oldest first. None: all of them, which takes time where steps are many."""
        where = self._of_branch(VERSIONS) if numbers is None else [*self._of_branch(VERSIONS), VERSIONS.c.version.in_(numbers)]
        with self.database.reading() as transaction:
            rows = transaction.execute(sa.select(VERSIONS).where(*where).order_by(VERSIONS.c.version)).mappings()
            return [version_of(row) for row in rows]

    def version(self, number: int) -> LedgerVersion:
        """Return one version of this branch, which must exist."""
        (version,) = self.versions([number])
        return version

    def committed_versions(self) -> list[int]:
        """Return the numbers of the committed versions, oldest first; those that were rolled back included."""
        return [version for version, status in self.statuses().items() if status is VersionStatus.COMMITTED]

    def statuses(self) -> Mapping[int, VersionStatus | None]:
        """Return the status of each version by its number, oldest first; None: its step is under way."""
        return self._line.statuses()

    def frontier(self) -> LedgerVersion | None:
        """Return the branch's head: the version that the next step trains. None: training has not begun."""

        def read(connection: sa.Connection) -> LedgerVersion | None:
            where = (*self._of_branch(VERSIONS), VERSIONS.c.version == head_of(connection, self._branch))
            row = connection.execute(sa.select(VERSIONS).where(*where)).mappings().first()
            return version_of(row) if row else None

        return self.database.remembered("frontier", read)

    def lineage(self, version: int | None = None) -> list[int]:
        """Return the numbers of the committed versions that led to one (None: the head), oldest first, on parent branches as well."""
        return self._line.lineage(version)

    def parents_of_other_branches(self) -> set[int]:
        """Return the versions of this branch that other branches began with, and whose steps may be replayed from there.

        The parent branch of a first version does not matter: several branches may begin with one version, whose files its maker holds.
        """
        with self.database.reading() as transaction:
            of_others = sa.select(VERSIONS.c.version).where(self._policy(), VERSIONS.c.branch != self._branch["branch"])
            where = (*self._of_branch(VERSIONS), VERSIONS.c.version.in_(of_others.where(VERSIONS.c.batch_id.is_(None))))
            return set(transaction.execute(sa.select(VERSIONS.c.version).where(*where)).scalars())

    def pin(self, version: int, holder: str = "") -> None:
        """Keep a version's files regardless of trainer.checkpoint.keep while a holder (empty: a user) needs them; idempotent.

        Raises:
            LedgerError: no branch of the policy has committed it.
        """
        with self.database.transaction() as transaction:
            where = (self._policy(), VERSIONS.c.version == version, VERSIONS.c.status == VersionStatus.COMMITTED)
            if transaction.execute(sa.select(VERSIONS.c.version).where(*where)).first() is None:
                raise LedgerError(f"{self._branch['policy']} has no committed version {version}. `spangrad policy list` shows them.")
            insert_new(transaction, PINS, [{"policy": self._branch["policy"], "version": version, "holder": holder}])

    def unpin(self, version: int, holder: str | None = None) -> None:
        """End a holder's pin of a version; idempotent. None: all pins, so that trainer.checkpoint.keep applies again."""
        pins = PINS.delete().where(PINS.c.policy == self._branch["policy"], PINS.c.version == version)
        with self.database.transaction() as transaction:
            transaction.execute(pins if holder is None else pins.where(PINS.c.holder == holder))

    def pinned(self) -> set[int]:
        """Return the versions of the policy whose files are kept."""
        with self.database.reading() as transaction:
            return self._pinned(transaction)

    def holder(self) -> str | None:
        """Return a readable name of the process whose step is under way. None: no step is."""
        row = self.database.remembered("lease", self._lease)
        return shown(row["holder"]) if row else None

    @repeated
    def batch(self, batch_id: str) -> list[BatchRollout]:
        """Return the rollouts of a batch, leased or committed, in order."""
        with self.database.reading() as transaction:
            return batch_rollouts.read(transaction, batch_id)

    @repeated
    def batch_sizes(self, since: int) -> dict[str, int]:
        """Return the number of rollouts of each batch that made a version from a number on, by the batch's id."""
        with self.database.reading() as transaction:
            return batch_rollouts.sizes(transaction, self._branch, since)

    def _of_branch(self, table: sa.Table) -> list[sa.ColumnElement[bool]]:
        return equal_to(table, self._branch)

    def _policy(self) -> sa.ColumnElement[bool]:
        return VERSIONS.c.policy == self._branch["policy"]

    def _pinned(self, transaction: sa.Connection) -> set[int]:
        return set(transaction.execute(sa.select(PINS.c.version).where(PINS.c.policy == self._branch["policy"])).scalars())

    def _lease(self, transaction: sa.Connection) -> sa.RowMapping | None:
        return transaction.execute(sa.select(LEASES).where(*self._of_branch(LEASES))).mappings().first()

    def _is_over(self, lease: sa.RowMapping) -> bool:
        """Return whether any process may undo a lease: it was not renewed for its time while this one watched, or its holder is dead."""
        return is_dead(lease["holder"]) or self._watch.observe(lease["batch_id"], lease["beats"], lease["seconds"])

    def _undo(self, transaction: sa.Connection, batch: str) -> None:
        self._watch.forget(batch)
        transaction.execute(VERSIONS.update().where(VERSIONS.c.batch_id == batch).values(status=VersionStatus.ORPHANED))
        for table in (BATCH_ROLLOUTS, LEASES):
            transaction.execute(table.delete().where(table.c.batch_id == batch))
        file_batches.undo(transaction, batch)

    def _beginning(self, transaction: sa.Connection, checksum: str, path: str, tokenizer_hash: str) -> tuple[int, str | None]:
        """Return the version number of initial weights, and the branch that committed them (None: they are new)."""
        same = sa.select(VERSIONS.c.version, VERSIONS.c.branch).where(
            self._policy(),
            VERSIONS.c.status == VersionStatus.COMMITTED,
            VERSIONS.c.checksum == checksum,
            VERSIONS.c.tokenizer_hash == tokenizer_hash,
        )
        order = ((VERSIONS.c.path == path).desc(), VERSIONS.c.version.desc(), VERSIONS.c.branch)
        known = transaction.execute(same.order_by(*order)).first()
        return (known.version, known.branch) if known else (free_number(transaction, self._branch["policy"]), None)
