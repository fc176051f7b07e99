"""Lineage as lines of text.

In: what `lineage_read` found. Out: lines, a fact each. Invariant: nothing is left out silently: what is not shown is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from spangrad.store.lineage import Ancestor, BatchRollout, SpanLineage, VersionLineage


def of_version(found: VersionLineage) -> list[str]:
    """A version, its rollouts and spans, then its parents."""
    return [line for one in found.ancestors for line in _version(found.policy, one)]


def of_span(found: SpanLineage) -> list[str]:
    """The versions that a span trained."""
    where = f"span {found.span} of trace {found.trace}, rollout {', '.join(found.rollouts)}"
    if not found.versions:
        return [f"{where}: trained no version"]
    direct = any(one.transition for one in found.versions)
    lines = [where if direct else f"{where}: no trained call itself; its rollout's calls trained"]
    for one in found.versions:
        since = f", and by descent {_numbers(one.descendants)}" if one.descendants else ""
        what = f"transition {one.transition}" if one.transition else f"rollout {one.rollout}"
        place = f"{what} in group {one.group}, batch {one.batch}"
        lines.append(f"  {one.policy}@{one.version} on branch {one.branch}: {place}{since}")
    return lines


def _version(policy: str, one: Ancestor) -> Iterator[str]:
    parent = "training began with it" if one.parent is None else f"from {policy}@{one.parent}"
    if one.parent is not None and one.parent_branch != one.branch:
        parent += f" on branch {one.parent_branch}"
    made = f"{one.groups} groups, {one.rollouts} rollouts of run {one.run} ({one.mode})" if one.rollouts or not one.files else ""
    if one.files:
        run = one.files[0]
        made = f"{run.method} on files, step {run.step} of {run.steps}" + (f", from {made}" if made else "")
    batch = f", batch {one.batch}: {made}" if one.batch else ""
    yield f"{policy}@{one.version} on branch {one.branch}, {one.status}, {parent}{batch}"
    if one.batch_rollouts is not None:
        yield f"  checksum {one.checksum}, {one.path}"
        for file in one.files:
            yield f"  file {file.name}, sha256 {file.sha256}, {file.size} bytes: {file.trained} examples"
        for rollout in one.batch_rollouts:
            yield from _rollout(rollout)


def _rollout(one: BatchRollout) -> Iterator[str]:
    none = "" if one.spans else ": no call of this policy was built"
    yield f"  rollout {one.rollout}, attempt {one.attempt}, revision {one.revision}, group {one.group}{none}"
    for span in one.spans:
        yield f"    span {span.trace}/{span.span}, call {span.call}"


def _numbers(numbers: list[int]) -> str:
    """`2-4, 7`."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
