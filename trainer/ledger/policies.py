"""Read-only view of the whole ledger: every branch of every policy.

In: an opened ledger. Out: an `Overview`, whether a version is known, and the trainers that skipped a group.
Invariant: each answer is read in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from spangrad.leases import shown
from trainer.data.source import Group
from trainer.ledger.tables import HEADS, LEASES, PINS, SKIPPED, VERSIONS, LedgerDatabase, LedgerVersion, equal_to, version_of


@dataclass(frozen=True, slots=True)
class Overview:
    """Versions, heads, pins and lease holders of the ledger."""

    versions: list[LedgerVersion]
    """All versions, ordered by policy, branch and number."""
    heads: dict[tuple[str, str], int]
    """Version that the next step of each (policy, branch) trains."""
    pinned: set[tuple[str, int]]
    """Policy and number of each pinned version."""
    holders: dict[tuple[str, str], str]
    """Readable name of the process whose step is under way, by policy and branch."""


def overview(database: LedgerDatabase) -> Overview:
    """Read the whole ledger."""
    with database.reading() as transaction:
        versions = transaction.execute(sa.select(VERSIONS).order_by(VERSIONS.c.policy, VERSIONS.c.branch, VERSIONS.c.version)).mappings()
        return Overview(
            [version_of(row) for row in versions],
            {(row.policy, row.branch): row.version for row in transaction.execute(sa.select(HEADS))},
            {(row.policy, row.version) for row in transaction.execute(sa.select(PINS))},
            {(row.policy, row.branch): shown(row.holder) for row in transaction.execute(sa.select(LEASES))},
        )


def has_version(database: LedgerDatabase, policy: str, number: int) -> bool:
    """Return whether a branch of a policy has a version of that number, whatever its status."""
    known = sa.select(VERSIONS.c.version).where(VERSIONS.c.policy == policy, VERSIONS.c.version == number)

    def read() -> bool:
        with database.reading() as transaction:
            return transaction.execute(known).first() is not None

    return database.retries(read)


def skipped_by(database: LedgerDatabase, group: Group) -> list[tuple[str, str, str, str]]:
    """Return policy, branch, reason and detail of each trainer that has skipped a group."""
    key = {"run_id": group.run_id, "mode": group.mode, "build_spec": group.build_spec, "group_id": group.group_id}
    columns = (SKIPPED.c.policy, SKIPPED.c.branch, SKIPPED.c.reason, SKIPPED.c.detail)
    with database.reading() as transaction:
        rows = transaction.execute(sa.select(*columns).where(*equal_to(SKIPPED, key)).order_by(*columns))
        return [(policy, branch, reason, detail) for policy, branch, reason, detail in rows]


def origin(versions: Iterable[LedgerVersion], policy: str, number: int) -> LedgerVersion | None:
    """Return the version of that number: of the branch that made it, not of those that began with it. None: no branch has it."""
    matches = [version for version in versions if (version.policy_version.policy, version.version) == (policy, number)]
    return min(matches, key=lambda version: version.policy_version.parent == number, default=None)
