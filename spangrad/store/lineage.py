"""Lineage: the versions and spans that a version was trained on, and the versions that a span trained, from the store's copy of the ledger.

In: a client of the store, a version or a span. Out: `VersionLineage`, `SpanLineage`. Invariant: parents are the ledger's: across branches,
around versions that were rolled back; spans are those of `spangrad.lineage` that were in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spangrad.errors import StoreError

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NEWEST = 5
_VERSIONS = """
SELECT Branch, Version, Status, Parent, ParentBranch, BatchId, RunId, Mode, Checksum, Path
FROM spangrad.policy_versions WHERE Policy = {policy:String} ORDER BY Version, Branch
"""
_POLICIES = "SELECT DISTINCT Policy FROM spangrad.policy_versions ORDER BY Policy"
_SIZES = """
SELECT BatchId, uniqExact(Mode, GroupId), uniqExact(RunId, RolloutId, Attempt)
FROM spangrad.batches WHERE Policy = {policy:String} GROUP BY BatchId
"""
_ROLLOUTS = """
SELECT RunId, Mode, GroupId, RolloutId, Attempt, Revision FROM spangrad.batches
WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64} AND BatchId = {batch:String}
ORDER BY Mode, GroupId, RolloutId, Attempt
"""
_SPANS = """
SELECT GroupId, RolloutId, Attempt, TraceId, SpanId, CallId, TransitionId
FROM spangrad.lineage WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}
ORDER BY TraceId, SpanId, CallId
"""
_TRAINED_CALLS = """
SELECT BatchId, CallId FROM spangrad.trained_calls
WHERE Policy IN {policies:Array(String)} AND Branch IN {branches:Array(String)} AND Version IN {versions:Array(UInt64)}
"""
"""Query of the calls in the loss of some versions; none of a version of files, or of one whose calls were not copied to the store."""
_FILES = """
SELECT BatchId, Method, Step, Steps, Name, Sha256, Bytes, Trained
FROM spangrad.batch_files WHERE Policy = {policy:String} ORDER BY BatchId, Name, Sha256
"""
_BY_CALL = """
SELECT Policy, Branch, Version, BatchId, GroupId, RolloutId, Attempt, TransitionId, CallId
FROM spangrad.lineage WHERE TraceId = {trace:String} AND SpanId = {span:String} ORDER BY Policy, Branch, Version, TransitionId
"""
_BY_ROLLOUT = """
SELECT Policy, Branch, Version, BatchId, GroupId, RolloutId, Attempt, ''
FROM spangrad.batches WHERE RolloutId IN {rollouts:Array(String)} AND (RunId IN {runs:Array(String)} OR empty({runs:Array(String)}))
ORDER BY Policy, Branch, Version, RolloutId, Attempt
"""
_ROLLOUTS_OF = """
SELECT DISTINCT RolloutId, RunId FROM spangrad.rollout_spans
WHERE TraceId = {trace:String} AND SpanId = {span:String} AND RolloutId != ''
"""


@dataclass(frozen=True, slots=True)
class TrainedSpan:
    """A span that a version was trained on."""

    trace: str
    span: str
    call: str
    transition: str


@dataclass(frozen=True, slots=True)
class BatchRolloutRow:
    """An attempt of a rollout in a batch."""

    run: str
    mode: str
    group: str
    rollout: str
    attempt: int
    revision: int
    spans: list[TrainedSpan]
    """Trained spans. Empty: every call of this policy in it was dropped or masked."""


@dataclass(frozen=True, slots=True)
class TrainedFile:
    """A file that a version was trained on."""

    method: str
    """Training method: sft or dpo."""
    step: int
    """Number of optimizer steps of its run so far, this version's included."""
    steps: int
    """Number of optimizer steps of the whole run."""
    name: str
    sha256: str
    size: int
    """Size of the file in bytes."""
    trained: int
    """Number of its examples that the version was trained on."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of a version, or the version itself."""

    branch: str
    version: int
    status: str
    parent: int | None
    """Number of the parent version. None: training began with these weights."""
    parent_branch: str
    batch: str
    """Id of its batch. Empty: it was not trained, or never committed."""
    run: str
    mode: str
    checksum: str
    path: str
    groups: int = 0
    rollouts: int = 0
    files: list[TrainedFile] = field(default_factory=list[TrainedFile])
    """Files that it was trained on. Empty: it was trained on groups of rollouts."""
    batch_rollouts: list[BatchRolloutRow] | None = None
    """Rollouts of its batch. None: they were not requested (--depth)."""


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """Versions from one back to the weights that training began with."""

    policy: str
    ancestors: list[Ancestor]
    """The version itself, its parent and so on."""


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
    """Id of the transition. Empty: the span is none of the calls that were trained, but part of their rollout."""
    descendants: list[int]
    """Numbers of the versions that were trained from it since."""


@dataclass(frozen=True, slots=True)
class SpanLineage:
    """Versions that a span trained."""

    trace: str
    span: str
    rollouts: list[str]
    versions: list[TrainedVersion] = field(default_factory=list[TrainedVersion])


def of_version(client: Client, policy: str, number: int, branch: str | None, depth: int) -> VersionLineage:
    """Return a version with its ancestors; `depth` of them with their rollouts and spans.

    Its branch, where none is given, is the one that trained it, not those that began with it.

    Raises:
        StoreError: the store knows no such version.
    """
    versions = _versions(client, policy)
    matches = [version for version in versions.values() if version.version == number and branch in {None, version.branch}]
    if not matches:
        known = ", ".join(f"{policy}@{version.version} on {version.branch}" for version in list(versions.values())[-_NEWEST:])
        where = "" if branch is None else f" on branch {branch}"
        policies = ", ".join(repr(name) for (name,) in client.query(_POLICIES).result_rows)
        others = f"The newest are {known}." if known else f"It has versions of {policies}." if policies else "It has no versions at all."
        raise StoreError(
            f"the store knows no version {policy}@{number}{where}. {others} A version that `spangrad policy list` has and the store lacks "
            "arrives with the next `spangrad train` or `spangrad finetune` on its branch."
        )
    first = min(matches, key=lambda version: version.parent == version.version)
    sizes = {batch: (int(groups), int(rollouts)) for batch, groups, rollouts in _rows(client, _SIZES, policy=policy)}
    files: dict[str, list[TrainedFile]] = {}
    for batch, *facts in _rows(client, _FILES, policy=policy):
        files.setdefault(str(batch), []).append(TrainedFile(*facts))
    line = list[Ancestor]()
    for place, version in enumerate(ancestors(versions, first)):
        groups, rollouts = sizes.get(version.batch, (0, 0))
        shown = _batch(client, policy, version) if place < depth else None
        line.append(replace(version, groups=groups, rollouts=rollouts, files=files.get(version.batch, []), batch_rollouts=shown))
    return VersionLineage(policy, line)


def of_span(client: Client, trace: str, span: str) -> SpanLineage:
    """Return every version that a span trained; for a span that is no trained call, every version that its rollout trained.

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
    rows = _without_masked(client, rows) if rows else _rows(client, _BY_ROLLOUT, rollouts=rollouts, runs=runs)
    trees = {policy: _versions(client, policy) for policy in {str(row[0]) for row in rows}}
    return SpanLineage(
        trace,
        span,
        sorted({*rollouts, *(str(row[5]) for row in rows)}),
        [TrainedVersion(*row, descendants=descendants(trees[row[0]].values(), row[1], row[2])) for row in rows],
    )


def ancestors(versions: Mapping[tuple[str, int], Ancestor], first: Ancestor) -> list[Ancestor]:
    """Return the first version, its parent and so on, of all versions by branch and number.

    A branch that begins as another's version has its number; that is listed once.
    """
    path, at = list[Ancestor](), versions.get((first.branch, first.version))
    while at:
        if at.parent != at.version:
            path.append(at)
        at = versions.get((at.parent_branch, at.parent)) if at.parent is not None else None
    return path


def descendants(versions: Iterable[Ancestor], branch: str, number: int) -> list[int]:
    """Return the numbers of the committed versions that were trained from a version, on any branch."""
    children: dict[tuple[str, int | None], list[tuple[str, int]]] = {}
    for version in versions:
        if version.status == "committed":
            children.setdefault((version.parent_branch, version.parent), []).append((version.branch, version.version))
    known, waiting = {(branch, number)}, [(branch, number)]
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in known]
        known.update(new)
        waiting += new
    return sorted({version for _, version in known} - {number})


def _versions(client: Client, policy: str) -> dict[tuple[str, int], Ancestor]:
    return {(row[0], int(row[1])): Ancestor(*row) for row in _rows(client, _VERSIONS, policy=policy)}


def _batch(client: Client, policy: str, version: Ancestor) -> list[BatchRolloutRow]:
    if not version.batch:
        return []
    spans: dict[tuple[str, str, int], list[TrainedSpan]] = {}
    key = {"policy": policy, "branch": version.branch, "version": version.version}
    trained = _trained_calls(client, [(policy, version.branch, version.version)]).get(version.batch)
    for group, rollout, attempt, *names in _rows(client, _SPANS, **key):
        span = TrainedSpan(*names)
        if trained is None or span.call in trained:
            spans.setdefault((group, rollout, attempt), []).append(span)
    rows = _rows(client, _ROLLOUTS, **key, batch=version.batch)
    return [BatchRolloutRow(*row, spans=spans.get((row[2], row[3], row[4]), [])) for row in rows]


def _without_masked(client: Client, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return rows of _BY_CALL without CallId, each once; TransitionId is empty where the call was masked in the step."""
    trained = _trained_calls(client, [row[:3] for row in rows])
    known = [(*facts, transition if call in trained.get(facts[3], {call}) else "") for *facts, transition, call in rows]
    return list(dict.fromkeys(known))


def _trained_calls(client: Client, versions: Sequence[Sequence[Any]]) -> dict[str, set[str]]:
    """Return the calls in the loss of some versions (policy, branch, number), by batch; nothing of a batch of which none are known."""
    policies, branches, numbers = (sorted(set(names)) for names in zip(*versions, strict=True))
    calls: dict[str, set[str]] = {}
    for batch, call in _rows(client, _TRAINED_CALLS, policies=policies, branches=branches, versions=numbers):
        calls.setdefault(batch, set()).add(call)
    return calls


def _rows(client: Client, sql: str, **parameters: Any) -> list[Any]:
    return list(client.query(sql, parameters=parameters).result_rows)
