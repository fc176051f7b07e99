"""What was trained on what, durably: the one place that hands out version numbers and leases rollouts to batches.

In: groups of rollouts that are about to be trained. Out: a lease with a new version's number, and the committed frontier. Invariant:
a rollout's attempt belongs to one batch of a policy's branch at most (the primary key of `batch_rollouts`), each change is one
SQLite transaction, and a version's number is never handed out twice, in no branch of the policy: a call that names a version
names its weights. A crash leaves either nothing, or a lease that `recover` undoes: its rollouts are free again, its number is marked
orphaned.

A branch that begins with weights which another branch of the policy committed begins as that version: it has its number, and names it as
its parent. What came before it counts as the new branch's past (`lineage`), so that rollouts which the old branch sampled are no staler
here than there.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from spangrad.errors import LedgerError
from spangrad.types import PolicyVersion, VersionStatus
from trainer.checkpoint import branch_directory
from trainer.eligibility import ExpiryReason
from trainer.source import BatchRollout, Group

FILE = "ledger.db"

_METADATA = sa.MetaData()
_BRANCH = ("policy", "branch")


def _branch_key() -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String, primary_key=True) for name in _BRANCH]


_VERSIONS = sa.Table(
    "versions",
    _METADATA,
    *_branch_key(),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.Integer, comment="NULL: training began with these weights"),
    sa.Column("parent_branch", sa.String, nullable=False, server_default="", comment="the parent's; empty where there is none"),
    sa.Column("batch_id", sa.String, unique=True, comment="NULL: training began with these weights"),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("modes", sa.String, nullable=False, comment="of the rollouts that trained it, comma-separated"),
    sa.Column("status", sa.String, comment="NULL: the step is under way"),
    sa.Column("checksum", sa.String, nullable=False, server_default=""),
    sa.Column("path", sa.String, nullable=False, server_default=""),
    sa.Column("tokenizer_hash", sa.String, nullable=False, server_default=""),
    sa.Column("metrics", sa.String, nullable=False, server_default="{}"),
)
_BATCHES = sa.Table(
    "batches",
    _METADATA,
    sa.Column("batch_id", sa.String, primary_key=True),
    *[sa.Column(name, sa.String, nullable=False) for name in _BRANCH],
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("committed", sa.Boolean, nullable=False),
)
_BATCH_ROLLOUTS = sa.Table(
    "batch_rollouts",
    _METADATA,
    *_branch_key(),
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("rollout_id", sa.String, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("batch_id", sa.String, nullable=False, index=True),
    sa.Column("mode", sa.String, nullable=False),
    sa.Column("group_id", sa.String, nullable=False),
    sa.Column("build_spec", sa.String, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
)
_EXPIRED = sa.Table(
    "expired_groups",
    _METADATA,
    *_branch_key(),
    *[sa.Column(name, sa.String, primary_key=True) for name in ("run_id", "mode", "build_spec", "group_id")],
    sa.Column("reason", sa.String, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to make one version of one batch."""

    batch_id: str
    version: int
    parent: int


@dataclass(frozen=True, slots=True)
class LedgerVersion:
    """A version as the ledger knows it."""

    policy_version: PolicyVersion
    branch: str
    parent_branch: str
    """Its own, or the one that this branch comes from; empty for the weights that training began with."""
    run_id: str
    modes: str
    """Comma-separated; empty for the weights that training began with."""
    tokenizer_hash: str
    status: VersionStatus | None
    """None: its step is under way."""
    metrics: dict[str, float]

    @property
    def version(self) -> int:
        """Its number."""
        return self.policy_version.version


class Ledger:
    """The ledger of one branch of one policy; one process at a time."""

    def __init__(self, directory: Path, policy: str, branch: str) -> None:
        """Open the ledger in trainer.directory, making it when there is none.

        Raises:
            LedgerError: another process trains this branch.
        """
        own = branch_directory(directory, policy, branch)
        own.mkdir(parents=True, exist_ok=True)
        self._branch = {"policy": policy, "branch": branch}
        self._lock: int | None = _lock(own / "lock", policy, branch)
        self._engine = sa.create_engine(f"sqlite:///{directory / FILE}", poolclass=sa.StaticPool)
        event.listen(self._engine, "connect", _configure)
        event.listen(self._engine, "begin", _begin_immediate)
        _METADATA.create_all(self._engine)

    @classmethod
    def reading(cls, directory: Path, policy: str, branch: str) -> Ledger | None:
        """Open it to read, beside whoever trains; whatever would write fails. None: there is no ledger yet."""
        if not (directory / FILE).exists():
            return None
        ledger = cls.__new__(cls)
        ledger._branch = {"policy": policy, "branch": branch}
        ledger._lock = None
        ledger._engine = sa.create_engine(f"sqlite:///file:{directory.absolute() / FILE}?mode=ro&uri=true", poolclass=sa.StaticPool)
        return ledger

    def close(self) -> None:
        """Close the file and let another process train the branch."""
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    def register_initial(self, *, checksum: str, path: str, tokenizer_hash: str, run_id: str) -> None:
        """Enter the weights that this branch begins with.

        Weights (and a tokenizer) that another branch of the policy has committed keep that version's number, which becomes their parent; of
        several, the version whose path it is, else the newest. Others get 0, or the policy's next free number.

        Raises:
            LedgerError: there is a version already.
        """
        with self._engine.begin() as transaction:
            if self._newest_number(transaction) is not None:
                raise LedgerError(f"the ledger of {self._branch['policy']} already has versions; weights to begin with come first.")
            same = sa.select(_VERSIONS.c.version, _VERSIONS.c.branch).where(
                self._policy(),
                _VERSIONS.c.status == VersionStatus.COMMITTED,
                _VERSIONS.c.checksum == checksum,
                _VERSIONS.c.tokenizer_hash == tokenizer_hash,
            )
            order = ((_VERSIONS.c.path == path).desc(), _VERSIONS.c.version.desc(), _VERSIONS.c.branch)
            known = transaction.execute(same.order_by(*order)).first()
            transaction.execute(
                _VERSIONS.insert().values(
                    **self._branch,
                    version=known.version if known else self._free_number(transaction),
                    parent=known.version if known else None,
                    parent_branch=known.branch if known else "",
                    run_id=run_id,
                    modes="",
                    status=VersionStatus.COMMITTED,
                    checksum=checksum,
                    path=path,
                    tokenizer_hash=tokenizer_hash,
                )
            )

    def begin(self, rollouts: Sequence[BatchRollout]) -> Lease:
        """Lease rollouts to a new batch, and hand out the number of the version that it will make.

        Raises:
            LedgerError: a rollout is in another batch, or there are no weights to train.
        """
        with self._engine.begin() as transaction:
            parent = self._newest_number(transaction, VersionStatus.COMMITTED)
            if parent is None:
                raise LedgerError("the ledger has no weights to train. Start `spangrad train` with --model.")
            lease = Lease(uuid.uuid4().hex, self._free_number(transaction), parent)
            values = {**self._branch, "batch_id": lease.batch_id, "version": lease.version}
            runs, modes = {one.group.run_id for one in rollouts}, {one.group.mode for one in rollouts}
            row = {**values, "parent": parent, "parent_branch": self._branch["branch"]}
            transaction.execute(_VERSIONS.insert().values(**row, run_id=",".join(sorted(runs)), modes=",".join(sorted(modes))))
            transaction.execute(_BATCHES.insert().values(**values, committed=False))
            try:
                transaction.execute(_BATCH_ROLLOUTS.insert(), [self._row(one, lease.batch_id) for one in rollouts])
            except IntegrityError as error:
                raise LedgerError(
                    f"a rollout of this batch is already in another batch of {self._branch['policy']}/{self._branch['branch']} "
                    f"({error.orig}): no rollout is trained twice. Give rollouts ids of their own in each run."
                ) from error
        return lease

    def commit(self, lease: Lease, *, checksum: str, path: str, tokenizer_hash: str, metrics: dict[str, float]) -> None:
        """Make a leased batch and its version final, in one transaction.

        Raises:
            LedgerError: the lease is gone.
        """
        with self._engine.begin() as transaction:
            leased = _BATCHES.update().where(_BATCHES.c.batch_id == lease.batch_id, sa.not_(_BATCHES.c.committed)).values(committed=True)
            if transaction.execute(leased).rowcount != 1:
                raise LedgerError(f"the lease of batch {lease.batch_id} (version {lease.version}) is gone. Start `spangrad train` again.")
            transaction.execute(
                _VERSIONS.update()
                .where(_VERSIONS.c.batch_id == lease.batch_id)
                .values(
                    status=VersionStatus.COMMITTED,
                    checksum=checksum,
                    path=path,
                    tokenizer_hash=tokenizer_hash,
                    metrics=json.dumps(metrics),
                )
            )

    def recover(self) -> list[int]:
        """Undo every lease that was never committed: free its rollouts and orphan its version's number.

        Returns:
            The versions that this call orphaned.
        """
        with self._engine.begin() as transaction:
            columns = sa.select(_BATCHES.c.batch_id, _BATCHES.c.version)
            left = transaction.execute(columns.where(*self._mine(_BATCHES), sa.not_(_BATCHES.c.committed)))
            leases = [(str(batch), int(version)) for batch, version in left]
            batches = [batch for batch, _ in leases]
            transaction.execute(_VERSIONS.update().where(_VERSIONS.c.batch_id.in_(batches)).values(status=VersionStatus.ORPHANED))
            for table in (_BATCH_ROLLOUTS, _BATCHES):
                transaction.execute(table.delete().where(table.c.batch_id.in_(batches)))
        return sorted(version for _, version in leases)

    def expire(self, groups: Iterable[Group], reason: ExpiryReason) -> None:
        """Put groups aside for good; idempotent."""
        rows = [{**self._branch, **_group_key(group), "reason": reason.value} for group in groups]
        if rows:
            with self._engine.begin() as transaction:
                transaction.execute(_EXPIRED.insert().prefix_with("OR IGNORE"), rows)

    def add_metrics(self, version: int, metrics: dict[str, float]) -> None:
        """Add what was not known when the version was committed."""
        with self._engine.begin() as transaction:
            where = [*self._mine(_VERSIONS), _VERSIONS.c.version == version]
            old = transaction.execute(sa.select(_VERSIONS.c.metrics).where(*where)).scalar_one()
            transaction.execute(_VERSIONS.update().where(*where).values(metrics=json.dumps({**json.loads(old), **metrics})))

    def finished_groups(self, run_id: str, build_spec: str) -> set[tuple[str, str]]:
        """Mode and id of the groups that must not be taken: leased or trained under any specification, or expired under this one."""
        with self._engine.begin() as transaction:
            taken = sa.select(_BATCH_ROLLOUTS.c.mode, _BATCH_ROLLOUTS.c.group_id).where(
                *self._mine(_BATCH_ROLLOUTS), _BATCH_ROLLOUTS.c.run_id == run_id
            )
            expired = sa.select(_EXPIRED.c.mode, _EXPIRED.c.group_id).where(
                *self._mine(_EXPIRED), _EXPIRED.c.run_id == run_id, _EXPIRED.c.build_spec == build_spec
            )
            return {(str(mode), str(group)) for mode, group in transaction.execute(sa.union(taken, expired))}

    def expired(self) -> dict[Group, ExpiryReason]:
        """Every group put aside, and why."""
        with self._engine.begin() as transaction:
            rows = transaction.execute(sa.select(_EXPIRED).where(*self._mine(_EXPIRED))).mappings()
            return {_group(row): ExpiryReason(row["reason"]) for row in rows}

    def versions(self) -> list[LedgerVersion]:
        """All versions, oldest first."""
        with self._engine.begin() as transaction:
            rows = transaction.execute(sa.select(_VERSIONS).where(*self._mine(_VERSIONS)).order_by(_VERSIONS.c.version)).mappings()
            return [_version(row) for row in rows]

    def committed_versions(self) -> list[int]:
        """Numbers of the committed versions, oldest first."""
        return [one.version for one in self.versions() if one.status is VersionStatus.COMMITTED]

    def lineage(self) -> list[int]:
        """Numbers of the committed versions that led to the newest one, oldest first: the branch's, and those it comes from."""
        branches = self._branches()
        found: set[int] = set()
        branch, until = self._branch["branch"], None
        while branch:
            own = [(version, before) for version, before in branches.get(branch, []) if until is None or version <= until]
            found |= {version for version, _ in own}
            branch, until = (own[0][1], own[0][0]) if own else ("", None)
        return sorted(found)

    def lent(self) -> set[int]:
        """Versions of this branch that other branches have begun with and not trained further: their files are still needed."""
        others = [rows for branch, rows in self._branches().items() if branch != self._branch["branch"]]
        return {rows[0][0] for rows in others if len(rows) == 1 and rows[0][1] == self._branch["branch"]}

    def _branches(self) -> dict[str, list[tuple[int, str]]]:
        """The policy's committed versions by branch, oldest first, each with its parent's branch."""
        with self._engine.begin() as transaction:
            query = sa.select(_VERSIONS.c.branch, _VERSIONS.c.version, _VERSIONS.c.parent_branch)
            committed = query.where(self._policy(), _VERSIONS.c.status == VersionStatus.COMMITTED).order_by(_VERSIONS.c.version)
            found: dict[str, list[tuple[int, str]]] = {}
            for branch, version, parent_branch in transaction.execute(committed):
                found.setdefault(branch, []).append((version, parent_branch))
        return found

    def frontier(self) -> LedgerVersion | None:
        """The newest committed version. None: training has not begun."""
        committed = [one for one in self.versions() if one.status is VersionStatus.COMMITTED]
        return committed[-1] if committed else None

    def batch(self, batch_id: str) -> list[BatchRollout]:
        """The rollouts of a batch, leased or committed, in order."""
        with self._engine.begin() as transaction:
            where = _BATCH_ROLLOUTS.c.batch_id == batch_id
            order = (_BATCH_ROLLOUTS.c.group_id, _BATCH_ROLLOUTS.c.rollout_id, _BATCH_ROLLOUTS.c.attempt)
            rows = transaction.execute(sa.select(_BATCH_ROLLOUTS).where(where).order_by(*order)).mappings()
            return [BatchRollout(_group(row), row["rollout_id"], row["attempt"], row["revision"]) for row in rows]

    def _mine(self, table: sa.Table) -> list[sa.ColumnElement[bool]]:
        return [table.c[name] == value for name, value in self._branch.items()]

    def _newest_number(self, transaction: sa.Connection, status: VersionStatus | None = None) -> int | None:
        query = sa.select(sa.func.max(_VERSIONS.c.version)).where(*self._mine(_VERSIONS))
        return transaction.execute(query if status is None else query.where(_VERSIONS.c.status == status)).scalar()

    def _policy(self) -> sa.ColumnElement[bool]:
        return _VERSIONS.c.policy == self._branch["policy"]

    def _free_number(self, transaction: sa.Connection) -> int:
        """The policy's next, over all its branches."""
        newest = transaction.execute(sa.select(sa.func.max(_VERSIONS.c.version)).where(self._policy())).scalar()
        return 0 if newest is None else newest + 1

    def _row(self, one: BatchRollout, batch_id: str) -> dict[str, object]:
        return {
            **self._branch,
            **_group_key(one.group),
            "rollout_id": one.rollout_id,
            "attempt": one.attempt,
            "revision": one.revision,
            "batch_id": batch_id,
        }


def _group_key(group: Group) -> dict[str, object]:
    return {"run_id": group.run_id, "mode": group.mode, "build_spec": group.build_spec, "group_id": group.group_id}


def _group(row: sa.RowMapping) -> Group:
    return Group(row["run_id"], row["mode"], row["build_spec"], row["group_id"])


def _version(row: sa.RowMapping) -> LedgerVersion:
    facts = PolicyVersion(row["policy"], row["version"], row["parent"], row["batch_id"], row["checksum"], row["path"])
    status = VersionStatus(row["status"]) if row["status"] else None
    return LedgerVersion(
        facts,
        row["branch"],
        row["parent_branch"],
        row["run_id"],
        row["modes"],
        row["tokenizer_hash"],
        status,
        json.loads(row["metrics"]),
    )


def _configure(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions are ours: pysqlite would begin them late, and without a write lock
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _lock(file: Path, policy: str, branch: str) -> int:
    """Hold an advisory lock, which the kernel drops when this process ends, however it ends."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise LedgerError(
            f"another process trains {policy}/{branch} ({file} is locked). Stop it, or set trainer.branch to another branch."
        ) from None
    return handle
