"""Lineage: the versions that led to a version, over all branches of a policy."""

from __future__ import annotations

from collections.abc import Mapping


def ancestry(parents: Mapping[tuple[str, int], tuple[str, int | None]], branch: str, head: int | None) -> list[int]:
    """Return the numbers of the versions from the first weights to a head, oldest first.

    Args:
        parents: (branch, version) of the parent of each (branch, version).
        branch: the branch of the head.
        head: its version. None: the branch has not begun.
    """
    versions = set[int]()
    while head is not None and (branch, head) in parents:
        versions.add(head)
        branch, head = parents[branch, head]
    return sorted(versions)
