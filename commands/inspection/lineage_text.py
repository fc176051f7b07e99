"""Lineage as lines of text.

In: the lineage of a version or of a span, as `spangrad.store.lineage` reads it. Out: lines, one fact each. Invariant: what is not shown is
counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from spangrad.store.lineage import Ancestor, BatchRolloutRow, SpanLineage, VersionLineage


def of_version(lineage: VersionLineage) -> list[str]:
    """Return lines on a version, its rollouts and spans, then on its ancestors."""
    return [line for ancestor in lineage.ancestors for line in _version(lineage.policy, ancestor)]


def of_span(lineage: SpanLineage) -> list[str]:
    """Return lines on the versions that were trained on a span."""
    where = f"span {lineage.span} of trace {lineage.trace}, rollout {', '.join(lineage.rollouts)}"
    if not lineage.versions:
        return [f"{where}: trained no version"]
    direct = any(version.transition for version in lineage.versions)
    lines = [where if direct else f"{where}: no trained call itself; its rollout's calls trained"]
    for version in lineage.versions:
        since = f", and by descent {_numbers(version.descendants)}" if version.descendants else ""
        what = f"transition {version.transition}" if version.transition else f"rollout {version.rollout}"
        place = f"{what} in group {version.group}, batch {version.batch}"
        lines.append(f"  {version.policy}@{version.version} on branch {version.branch}: {place}{since}")
    return lines


def _version(policy: str, ancestor: Ancestor) -> Iterator[str]:
    parent = "training began with it" if ancestor.parent is None else f"from {policy}@{ancestor.parent}"
    if ancestor.parent is not None and ancestor.parent_branch != ancestor.branch:
        parent += f" on branch {ancestor.parent_branch}"
    origin = (
        f"{ancestor.groups} groups, {ancestor.rollouts} rollouts of run {ancestor.run} ({ancestor.mode})"
        if ancestor.rollouts or not ancestor.files
        else ""
    )
    if ancestor.files:
        run = ancestor.files[0]
        origin = f"{run.method} on files, step {run.step} of {run.steps}" + (f", from {origin}" if origin else "")
    batch = f", batch {ancestor.batch}: {origin}" if ancestor.batch else ""
    yield f"{policy}@{ancestor.version} on branch {ancestor.branch}, {ancestor.status}, {parent}{batch}"
    if ancestor.batch_rollouts is not None:
        yield f"  checksum {ancestor.checksum}, {ancestor.path}"
        for file in ancestor.files:
            yield f"  file {file.name}, sha256 {file.sha256}, {file.size} bytes: {file.trained} examples"
        for rollout in ancestor.batch_rollouts:
            yield from _rollout(rollout)


def _rollout(rollout: BatchRolloutRow) -> Iterator[str]:
    none = "" if rollout.spans else ": no call of this policy was built"
    yield f"  rollout {rollout.rollout}, attempt {rollout.attempt}, revision {rollout.revision}, group {rollout.group}{none}"
    for span in rollout.spans:
        yield f"    span {span.trace}/{span.span}, call {span.call}"


def _numbers(numbers: list[int]) -> str:
    """Return ascending numbers as text, with runs as ranges: `2-4, 7`."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
