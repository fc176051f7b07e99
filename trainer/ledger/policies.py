"""The whole ledger for those who look at it: every branch of every policy.

In: an opened ledger. Out: an `Overview`, and who has skipped a group. Invariant: what is told in one answer is of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from spangrad.leases import shown
from trainer.data.source import Group
from trainer.ledger.tables import HEADS, LEASES, PINS, SKIPPED, VERSIONS, Database, LedgerVersion, version_of


@dataclass(frozen=True, slots=True)
class Overview:
    """What the ledger holds."""

    versions: list[LedgerVersion]
    """By policy, branch and number."""
    heads: dict[tuple[str, str], int]
    """What each branch's next step trains."""
    pinned: set[tuple[str, int]]
    """Policy and number."""
    holders: dict[tuple[str, str], str]
    """For people: whose step is under way, by policy and branch."""


def overview(database: Database) -> Overview:
    """Read all of it."""
    with database.transaction() as transaction:
        versions = transaction.execute(sa.select(VERSIONS).order_by(VERSIONS.c.policy, VERSIONS.c.branch, VERSIONS.c.version)).mappings()
        return Overview(
            [version_of(row) for row in versions],
            {(row.policy, row.branch): row.version for row in transaction.execute(sa.select(HEADS))},
            {(row.policy, row.version) for row in transaction.execute(sa.select(PINS))},
            {(row.policy, row.branch): shown(row.holder) for row in transaction.execute(sa.select(LEASES))},
        )


def skipped_by(database: Database, group: Group) -> list[tuple[str, str, str, str]]:
    """Policy, branch, reason and detail of each trainer that has skipped a group."""
    key = {"run_id": group.run_id, "mode": group.mode, "build_spec": group.build_spec, "group_id": group.group_id}
    columns = (SKIPPED.c.policy, SKIPPED.c.branch, SKIPPED.c.reason, SKIPPED.c.detail)
    with database.transaction() as transaction:
        rows = transaction.execute(sa.select(*columns).where(*(SKIPPED.c[name] == value for name, value in key.items())).order_by(*columns))
        return [(policy, branch, reason, detail) for policy, branch, reason, detail in rows]


def origin(versions: Iterable[LedgerVersion], policy: str, number: int) -> LedgerVersion | None:
    """The version of that number: of the branch that made it, not of those that began with it. None: nobody has it."""
    found = [one for one in versions if (one.policy_version.policy, one.version) == (policy, number)]
    return min(found, key=lambda one: one.policy_version.parent == number, default=None)
