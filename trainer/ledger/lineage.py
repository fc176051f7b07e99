"""Lineage: the versions of a branch, and those that led to one, over all branches of a policy.

Invariant: history is read once. After that, the versions that may have changed are read, and of a head those that continue the known line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from spangrad.types import VersionStatus
from trainer.ledger.batch_rollouts import oldest_open
from trainer.ledger.tables import HEADS, VERSIONS, LedgerDatabase, equal_to

_CONTINUED = 8
"""Largest number of versions by which a known line is continued; for more, the whole line is read."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Statuses of a branch's versions as they were read last."""

    statuses: Mapping[int, VersionStatus | None]
    until: int
    """Versions before this one are final."""
    freed: int
    """The ledger's newest transaction then that freed groups of committed versions, which orphans those."""


class VersionLine:
    """Versions of one branch of one policy."""

    def __init__(self, database: LedgerDatabase, branch: Mapping[str, str]) -> None:
        """Read nothing yet; `branch` names policy and branch."""
        self._database = database
        self._branch = branch
        self._read: _Read | None = None
        self._line: Sequence[int] = ()
        """Lineage of the head that was read last. Empty: none was."""

    def statuses(self) -> Mapping[int, VersionStatus | None]:
        """Return the status of each version by its number, oldest first; None: its step is under way."""
        return self._database.remembered("statuses", self._read_statuses)

    def _read_statuses(self, connection: sa.Connection) -> Mapping[int, VersionStatus | None]:
        freed, until = self._database.changes(connection)[1], oldest_open(connection, **self._branch)
        before = self._read if self._read and self._read.freed == freed else _Read({}, 0, freed)
        where = (*equal_to(VERSIONS, self._branch), VERSIONS.c.version >= before.until)
        query = sa.select(VERSIONS.c.version, VERSIONS.c.status).where(*where).order_by(VERSIONS.c.version)
        named = {status.value: status for status in VersionStatus}
        statuses = {**before.statuses, **{version: named.get(status) for version, status in connection.execute(query)}}
        # A branch that has not begun may begin with a version of any number.
        self._read = _Read(statuses, until, freed) if statuses else None
        return statuses

    def lineage(self, version: int | None = None) -> list[int]:
        """Return the numbers of the committed versions that led to one (None: the head), oldest first, on parent branches as well."""

        def read(connection: sa.Connection) -> Sequence[int]:
            if version is not None:
                return ancestry(parents(connection, self._branch["policy"]), self._branch["branch"], version)
            self._line = self._continued(connection, head_of(connection, self._branch))
            return self._line

        return list(self._database.remembered(("lineage", version), read))

    def _continued(self, connection: sa.Connection, head: int | None) -> Sequence[int]:
        """Return the lineage of the head, by the known line where the head is a few versions after its end."""
        line, new, number = self._line, list[int](), head
        while line and number is not None and number != line[-1] and len(new) < _CONTINUED:
            new.append(number)
            own = equal_to(VERSIONS, {**self._branch, "version": number, "parent_branch": self._branch["branch"]})
            number = connection.execute(sa.select(VERSIONS.c.parent).where(*own)).scalar()
        if line and number == line[-1]:
            return [*line, *reversed(new)]
        return ancestry(parents(connection, self._branch["policy"]), self._branch["branch"], head)


def head_of(connection: sa.Connection, branch: Mapping[str, str]) -> int | None:
    """Return the version that a branch's next step trains. None: the branch has not begun."""
    return connection.execute(sa.select(HEADS.c.version).where(*equal_to(HEADS, branch))).scalar()


def free_number(connection: sa.Connection, policy: str) -> int:
    """Return a policy's next version number, over all its branches."""
    newest = connection.execute(sa.select(sa.func.max(VERSIONS.c.version)).where(VERSIONS.c.policy == policy)).scalar()
    return 0 if newest is None else newest + 1


def has_other_children(connection: sa.Connection, branch: Mapping[str, str], versions: Collection[int]) -> bool:
    """Return whether a committed version that is not among some of a branch has one of them as its parent; another branch's first may."""
    columns = (VERSIONS.c.branch, VERSIONS.c.version, VERSIONS.c.parent)
    of_branch = (VERSIONS.c.policy == branch["policy"], VERSIONS.c.parent_branch == branch["branch"])
    where = (*of_branch, VERSIONS.c.status == VersionStatus.COMMITTED, VERSIONS.c.parent >= min(versions))
    children = connection.execute(sa.select(*columns).where(*where))
    return any(parent in versions and not (name == branch["branch"] and version in versions) for name, version, parent in children)


def parents(connection: sa.Connection, policy: str) -> dict[tuple[str, int], tuple[str, int | None]]:
    """Return (branch, version) of the parent of each (branch, version) of a policy."""
    columns = (VERSIONS.c.branch, VERSIONS.c.version, VERSIONS.c.parent_branch, VERSIONS.c.parent)
    rows = connection.execute(sa.select(*columns).where(VERSIONS.c.policy == policy))
    return {(branch, version): (parent_branch, parent) for branch, version, parent_branch, parent in rows}


def ancestry(parents: Mapping[tuple[str, int], tuple[str, int | None]], branch: str, head: int | None) -> list[int]:
    """Return the numbers of the versions from the first weights to a head, oldest first; none of a branch without a head."""
    versions = set[int]()
    while head is not None and (branch, head) in parents:
        versions.add(head)
        branch, head = parents[branch, head]
    return sorted(versions)
