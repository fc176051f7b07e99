"""Training: branches, their steps, the batch and the lineage of a version, and two versions on the same held-out tasks.

In: the store. Out: plain values for JSON. Invariant: a rollout counts by its newest build; held-out rollouts are those of mode `validate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from page.reading import PageStore
from spangrad.store.built_rollouts import newest_revisions_sql, revisions_sql

STEPS_MOST = 2000
"""Largest number of newest steps of a branch that are shown."""
SKIPPED_MOST = 1000
"""Largest number of newest skipped groups that are shown."""
NEAR = 8
"""Number of versions before and after one that its picture shows."""
TASKS_MOST = 1000
"""Largest number of tasks of a comparison."""
_BRANCHES = """
SELECT Policy, Branch, max(Version) AS Newest, count() AS Versions, toUnixTimestamp64Milli(max(IngestedAt)) AS NewestMs,
    groupUniqArray(20)(RunId) AS Runs
FROM spangrad.policy_versions WHERE Status = 'committed' GROUP BY Policy, Branch ORDER BY Policy, Branch
"""
_STEPS = """
SELECT Version, Parent, BatchId, Metrics, toUnixTimestamp64Milli(IngestedAt) AS CommittedMs
FROM spangrad.steps WHERE Policy = {policy:String} AND Branch = {branch:String} ORDER BY Version DESC LIMIT {most:UInt32}
"""
_VERSION = """
SELECT Policy, Branch, Version, RunId, Mode, Parent, ParentBranch, BatchId, Checksum, Path, TokenizerHash, Status, Metrics,
    toUnixTimestamp64Milli(IngestedAt) AS CommittedMs
FROM spangrad.policy_versions WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}
"""
_CHILDREN = """
SELECT Branch, Version, Status FROM spangrad.policy_versions
WHERE Policy = {policy:String} AND ParentBranch = {branch:String} AND Parent = {version:UInt64} AND Version != {version:UInt64}
ORDER BY Branch, Version
"""
_NEAR = """
SELECT Branch, Version, Parent, ParentBranch, Status FROM spangrad.policy_versions
WHERE Policy = {policy:String} AND Version + {reach:UInt64} >= {version:UInt64} AND Version <= {version:UInt64} + {reach:UInt64}
ORDER BY Version, Branch LIMIT 200
"""
_SAMPLED_BY = """
SELECT arrayJoin(SampledVersions) AS Sampled, count() AS Calls FROM spangrad.trained_calls
WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64} GROUP BY Sampled ORDER BY Sampled DESC
"""
_SAMPLES = """
SELECT Version, count() AS Calls, uniqExact(RolloutId) AS Rollouts FROM spangrad.trained_calls
WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version BETWEEN {version:UInt64} AND {version:UInt64} + 64
    AND has(SampledVersions, {version:UInt64}) AND Version != {version:UInt64}
GROUP BY Version ORDER BY Version
"""
_ROLLOUTS = """
SELECT b.RunId AS RunId, b.Mode AS Mode, b.GroupId AS GroupId, b.RolloutId AS RolloutId, b.BuildSpec AS BuildSpec, c.TaskId AS TaskId,
    c.Calls AS Calls, c.Return AS Return, c.Advantage AS Advantage, c.Tokens AS Tokens, c.Staleness AS Staleness
FROM (
    SELECT DISTINCT RunId, Mode, GroupId, RolloutId, BuildSpec FROM spangrad.batches
    WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}
) AS b
LEFT JOIN (
    SELECT RolloutId, any(TaskId) AS TaskId, count() AS Calls, any(Return) AS Return, avg(Advantage) AS Advantage,
        sum(OutputTokens) AS Tokens, max(Staleness) AS Staleness
    FROM spangrad.trained_calls WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}
    GROUP BY RolloutId
) AS c ON c.RolloutId = b.RolloutId
ORDER BY GroupId, RolloutId
"""
_NEWEST_HELD_OUT = f"""
{revisions_sql(once=True)}
WHERE Mode = 'validate' AND notEmpty(PolicyVersions) AND RunId IN {{runs:Array(String)}}
    AND BuildId IN (SELECT BuildId FROM {newest_revisions_sql("Mode = 'validate'")})
"""
"""Newest builds of held-out rollouts."""
_HELD_OUT = f"""
SELECT TaskId, Role, Sampled, arraySort(groupArray(20)((RolloutId, Value, Outcome))) AS Rollouts, avg(Value) AS Mean
FROM (
    SELECT TaskId, RolloutId, arrayMax(PolicyVersions) AS Sampled, Outcome, returned.1 AS Role, returned.2 AS Value
    FROM (
        SELECT *, if(isNull(Return), arrayZip(mapKeys(ReturnsByRole), mapValues(ReturnsByRole)), [('', assumeNotNull(Return))]) AS Returned
        FROM {_NEWEST_HELD_OUT}
    )
    ARRAY JOIN Returned AS returned
)
WHERE Sampled IN ({{left:UInt64}}, {{right:UInt64}})
GROUP BY TaskId, Role, Sampled
"""
_HELD_OUT_RETURNS = f"""
SELECT arrayMax(PolicyVersions) AS Version, avg(Held) AS Return, avgMapIf(Roles, length(Roles) > 1) AS ReturnsByRole, count() AS Rollouts
FROM (SELECT PolicyVersions, Return AS Held, ReturnsByRole AS Roles FROM {_NEWEST_HELD_OUT})
GROUP BY Version ORDER BY Version
"""


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A group that a branch skipped."""

    run: str
    mode: str
    spec: str
    """Build specification of its rollouts."""
    group: str
    reason: str
    detail: str
    """Sentence about this group; empty: the reason is enough."""
    remedy: str
    """Remedy for the reason; empty: there is none to give."""
    skipped_ms: int
    """Time at which it was skipped, in milliseconds since 1970."""


def branches_of(store: PageStore) -> list[dict[str, Any]]:
    """Return policies and branches with their newest versions."""
    return store.rows(_BRANCHES)


def steps_of(store: PageStore, policy: str, branch: str, most: int = STEPS_MOST) -> list[dict[str, Any]]:
    """Return the newest steps of a branch with their metrics, oldest first."""
    return store.rows(_STEPS, {"policy": policy, "branch": branch, "most": most})[::-1]


def training_view(store: PageStore, policy: str | None, branch: str | None) -> dict[str, Any]:
    """Return branches, and of one of them the steps and the held-out returns by sampling version.

    Args:
        store: store of the branch.
        policy: policy of the branch. None: that of the branch that learned last.
        branch: name of the branch. None: likewise.
    """
    known = branches_of(store)
    named = [item for item in known if policy in {None, item["Policy"]} and branch in {None, item["Branch"]}]
    chosen = max(named, key=lambda item: item["NewestMs"], default=None)
    if chosen is None:
        return {"branches": known, "chosen": None, "steps": [], "heldOut": []}
    return {
        "branches": known,
        "chosen": chosen,
        "steps": steps_of(store, chosen["Policy"], chosen["Branch"]),
        "heldOut": store.rows(_HELD_OUT_RETURNS, {"runs": chosen["Runs"]}),
    }


def skipped_view(skipped: Sequence[SkippedRow]) -> dict[str, Any]:
    """Return the newest skipped groups of a branch, and the number of all of them by reason."""
    newest = sorted(skipped, key=lambda row: -row.skipped_ms)[:SKIPPED_MOST]
    return {"groups": [asdict(row) for row in newest], "reasons": dict(Counter(row.reason for row in skipped).most_common())}


def version_view(store: PageStore, policy: str, branch: str, version: int) -> dict[str, Any] | None:
    """Return a version: what made it, what came of it, and the rollouts of its batch by group. None: there is no such version."""
    place = {"policy": policy, "branch": branch, "version": version}
    rows = store.rows(_VERSION, place)
    if not rows:
        return None
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in store.rows(_ROLLOUTS, place):
        groups.setdefault((row["RunId"], row["Mode"], row["GroupId"]), []).append(row)
    return {
        **rows[0],
        "children": store.rows(_CHILDREN, place),
        "near": store.rows(_NEAR, {**place, "reach": NEAR}),
        "sampledBy": store.rows(_SAMPLED_BY, place),
        "samples": store.rows(_SAMPLES, place),
        "groups": [_group(*key, rollouts) for key, rollouts in groups.items()],
    }


def comparison(store: PageStore, policy: str, left: int, right: int) -> dict[str, Any]:
    """Return the held-out tasks that two versions of a policy played, with their rollouts; a row a role where rewards name several."""
    runs = sorted({run for item in branches_of(store) if item["Policy"] == policy for run in item["Runs"]})
    tasks: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in store.rows(_HELD_OUT, {"runs": runs, "left": left, "right": right}):
        tasks.setdefault((row["TaskId"], row["Role"]), {})[row["Sampled"]] = {"mean": row["Mean"], "rollouts": row["Rollouts"]}
    both = [(task, sides[left], sides[right]) for task, sides in tasks.items() if left in sides and right in sides]
    both.sort(key=lambda item: (-abs(item[2]["mean"] - item[1]["mean"]), item[0]))
    return {
        "left": left,
        "right": right,
        "tasks": [{"task": task, "role": role, "left": earlier, "right": later} for (task, role), earlier, later in both[:TASKS_MOST]],
        "leftOnly": sum(right not in sides for sides in tasks.values()),
        "rightOnly": sum(left not in sides for sides in tasks.values()),
        "better": sum(item[2]["mean"] > item[1]["mean"] for item in both),
        "worse": sum(item[2]["mean"] < item[1]["mean"] for item in both),
    }


def _group(run: str, mode: str, group: str, rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    returns = [row["Return"] for row in rollouts if row["Calls"]]
    return {
        "run": run,
        "mode": mode,
        "group": group,
        "task": next((row["TaskId"] for row in rollouts if row["TaskId"]), ""),
        "baseline": sum(returns) / len(returns) if returns else None,
        "rollouts": rollouts,
    }
