"""What made a version, and what a span made, out of the store's copy of the ledger.

In: a client of the store, a version or a span. Out: `VersionLineage`, `SpanLineage`. Invariant: parents lead where the ledger's do: across
branches, around versions that were rolled back; what is said of spans is what `otel.v_lineage` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spangrad.errors import StoreError

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NEWEST = 5
_VERSIONS = """
SELECT Branch, Version, Status, Parent, ParentBranch, BatchId, RunId, Mode, Checksum, Path
FROM otel.v_policy_versions WHERE Policy = {policy:String} ORDER BY Version, Branch
"""
_SIZES = """
SELECT BatchId, uniqExact(Mode, GroupId), uniqExact(RunId, RolloutId, Attempt)
FROM otel.v_batches WHERE Policy = {policy:String} GROUP BY BatchId
"""
_ROLLOUTS = """
SELECT RunId, Mode, GroupId, RolloutId, Attempt, Revision
FROM otel.v_batches WHERE Policy = {policy:String} AND BatchId = {batch:String} ORDER BY Mode, GroupId, RolloutId, Attempt
"""
_SPANS = """
SELECT GroupId, RolloutId, Attempt, TraceId, SpanId, CallId, TransitionId
FROM otel.v_lineage WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}
ORDER BY TraceId, SpanId, CallId
"""
_FILES = """
SELECT BatchId, Method, Step, Steps, Name, Sha256, Bytes, Trained
FROM otel.v_batch_files WHERE Policy = {policy:String} ORDER BY BatchId, Name, Sha256
"""
_BY_CALL = """
SELECT Policy, Branch, Version, BatchId, GroupId, RolloutId, Attempt, TransitionId
FROM otel.v_lineage WHERE TraceId = {trace:String} AND SpanId = {span:String} ORDER BY Policy, Branch, Version, TransitionId
"""
_BY_ROLLOUT = """
SELECT Policy, Branch, Version, BatchId, GroupId, RolloutId, Attempt, ''
FROM otel.v_batches WHERE RolloutId IN {rollouts:Array(String)} AND (RunId IN {runs:Array(String)} OR empty({runs:Array(String)}))
ORDER BY Policy, Branch, Version, RolloutId, Attempt
"""
_ROLLOUTS_OF = "SELECT DISTINCT RolloutId, RunId FROM otel.v_rollout_spans WHERE TraceId = {trace:String} AND SpanId = {span:String}"


@dataclass(frozen=True, slots=True)
class Trained:
    """A span that a version was trained on."""

    trace: str
    span: str
    call: str
    transition: str


@dataclass(frozen=True, slots=True)
class BatchRollout:
    """An attempt of a rollout in a batch."""

    run: str
    mode: str
    group: str
    rollout: str
    attempt: int
    revision: int
    spans: list[Trained]
    """Empty: every call of this policy in it was dropped."""


@dataclass(frozen=True, slots=True)
class TrainedFile:
    """A file that a version was trained on."""

    method: str
    """sft or dpo."""
    step: int
    """Optimiser steps of its run, this version's among them."""
    steps: int
    """Of the whole run."""
    name: str
    sha256: str
    size: int
    """Bytes."""
    trained: int
    """Examples of it that the version was trained on."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A version on the way."""

    branch: str
    version: int
    status: str
    parent: int | None
    """None: training began with these weights."""
    parent_branch: str
    batch: str
    """Empty: it was not trained, or never committed."""
    run: str
    mode: str
    checksum: str
    path: str
    groups: int = 0
    rollouts: int = 0
    files: list[TrainedFile] = field(default_factory=list[TrainedFile])
    """Empty: it was trained on groups of rollouts."""
    batch_rollouts: list[BatchRollout] | None = None
    """None: they were not asked for (--depth)."""


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """From a version to the weights that training began with."""

    policy: str
    ancestors: list[Ancestor]
    """The version itself first."""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """A version that a span, or its rollout, trained."""

    policy: str
    branch: str
    version: int
    batch: str
    group: str
    rollout: str
    attempt: int
    transition: str
    """Empty: the span is none of the calls that were trained, but part of their rollout."""
    descendants: list[int]
    """Versions that were made from it since."""


@dataclass(frozen=True, slots=True)
class SpanLineage:
    """What a span trained."""

    trace: str
    span: str
    rollouts: list[str]
    versions: list[TrainedVersion] = field(default_factory=list[TrainedVersion])

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def of_version(client: Client, policy: str, number: int, branch: str | None, depth: int) -> VersionLineage:
    """A version and what it was made from.

    Args:
        client: of the store.
        policy: the version's.
        number: the version's.
        branch: the version's. None: the branch that made it, not those that began with it.
        depth: how many versions come with their rollouts and spans.

    Raises:
        StoreError: the store knows no such version.
    """
    versions = _versions(client, policy)
    found = [one for one in versions.values() if one.version == number and branch in {None, one.branch}]
    if not found:
        known = ", ".join(f"{policy}@{one.version} on {one.branch}" for one in list(versions.values())[-_NEWEST:])
        where = "" if branch is None else f" on branch {branch}"
        others = f"The newest are {known}." if known else f"It knows none of {policy}."
        raise StoreError(f"the store knows no version {policy}@{number}{where}. {others}")
    first = min(found, key=lambda one: one.parent == one.version)
    sizes = {batch: (int(groups), int(rollouts)) for batch, groups, rollouts in _rows(client, _SIZES, policy=policy)}
    files: dict[str, list[TrainedFile]] = {}
    for batch, *facts in _rows(client, _FILES, policy=policy):
        files.setdefault(str(batch), []).append(TrainedFile(*facts))
    versions = {place: replace(one, files=files.get(one.batch, [])) for place, one in versions.items()}
    first = versions[first.branch, first.version]
    way = [_filled(client, policy, one, sizes, with_spans=i < depth) for i, one in enumerate(ancestors(versions, first))]
    return VersionLineage(policy, way)


def of_span(client: Client, trace: str, span: str) -> SpanLineage:
    """Every version that a span trained; where it is no trained call itself, every version that its rollout trained.

    Raises:
        StoreError: the store knows no such span.
    """
    of_rollouts = _rows(client, _ROLLOUTS_OF, trace=trace, span=span)
    rollouts = sorted({str(row[0]) for row in of_rollouts})
    rows = _rows(client, _BY_CALL, trace=trace, span=span)
    if not rollouts and not rows:
        raise StoreError(f"the store holds no span {trace}/{span} of a rollout. `spangrad rollout show ID` draws those of one.")
    # An agent's own spans may not name their run; then the rollout's name has to do.
    runs = sorted({str(row[1]) for row in of_rollouts} - {""})
    rows = rows or _rows(client, _BY_ROLLOUT, rollouts=rollouts, runs=runs)
    trees = {policy: _versions(client, policy) for policy in {str(row[0]) for row in rows}}
    return SpanLineage(
        trace,
        span,
        sorted({*rollouts, *(str(row[5]) for row in rows)}),
        [TrainedVersion(*row, descendants=descendants(trees[row[0]].values(), row[1], row[2])) for row in rows],
    )


def ancestors(versions: Mapping[tuple[str, int], Ancestor], first: Ancestor) -> list[Ancestor]:
    """A version, its parent and so on. A branch that begins as another's version has that version's number, so it is told once.

    Args:
        versions: by branch and number.
        first: where to begin.
    """
    way, at = list[Ancestor](), versions.get((first.branch, first.version))
    while at:
        if at.parent != at.version:
            way.append(at)
        at = versions.get((at.parent_branch, at.parent)) if at.parent is not None else None
    return way


def descendants(versions: Iterable[Ancestor], branch: str, number: int) -> list[int]:
    """Numbers of the committed versions that were made from one, on whichever branches."""
    committed = [one for one in versions if one.status == "committed"]
    reached, grown = {(branch, number)}, True
    while grown:
        more = {(one.branch, one.version) for one in committed if (one.parent_branch, one.parent) in reached} - reached
        reached |= more
        grown = bool(more)
    return sorted({version for _, version in reached} - {number})


def _versions(client: Client, policy: str) -> dict[tuple[str, int], Ancestor]:
    return {(row[0], int(row[1])): Ancestor(*row) for row in _rows(client, _VERSIONS, policy=policy)}


def _filled(client: Client, policy: str, one: Ancestor, sizes: Mapping[str, tuple[int, int]], *, with_spans: bool) -> Ancestor:
    groups, rollouts = sizes.get(one.batch, (0, 0))
    shown = (_batch(client, policy, one) if one.batch else []) if with_spans else None
    return replace(one, groups=groups, rollouts=rollouts, batch_rollouts=shown)


def _batch(client: Client, policy: str, one: Ancestor) -> list[BatchRollout]:
    spans: dict[tuple[str, str, int], list[Trained]] = {}
    for group, rollout, attempt, *span in _rows(client, _SPANS, policy=policy, branch=one.branch, version=one.version):
        spans.setdefault((group, rollout, attempt), []).append(Trained(*span))
    rows = _rows(client, _ROLLOUTS, policy=policy, batch=one.batch)
    return [BatchRollout(*row, spans=spans.get((row[2], row[3], row[4]), [])) for row in rows]


def _rows(client: Client, sql: str, **parameters: Any) -> list[Any]:
    return list(client.query(sql, parameters=parameters).result_rows)
