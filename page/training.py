"""Training: branches, their steps, the batch and the lineage of a version, and two versions on the same held-out tasks.

In: the store. Out: plain values for JSON. Invariant: a rollout counts by its newest build; held-out rollouts are those of mode `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from page.cursors import Value, cut_page, decode_cursor
from page.encoding import csv_line
from page.reading import PageStore
from spangrad.store.built_rollouts import newest_revisions_sql, revisions_sql

STEPS_MOST = 2000
"""Largest number of newest steps of a branch that curves show."""
SKIPPED_ROWS = 200
"""Number of skipped groups of a page of their table."""
SKIPPED_CURSOR = (int, int, str, str, str, str)
"""Types of the values of a skipped group's cursor."""
STEP_CURSOR = ((int, float), int)
"""Types of the values of a step's cursor."""
STEP_ROWS = 200
"""Number of steps of a page of their table."""
NEAR = 8
"""Number of versions before and after one that its picture shows."""
TASKS_MOST = 1000
"""Largest number of tasks of a comparison."""
_BRANCHES = """
SELECT Policy, Branch, max(Version) AS Newest, count() AS Versions, toUnixTimestamp64Milli(max(IngestedAt)) AS NewestMs
FROM spangrad.policy_versions WHERE Status = 'committed' GROUP BY Policy, Branch ORDER BY Policy, Branch
"""
_STEPS = """
SELECT Version, Parent, BatchId, Metrics, toUnixTimestamp64Milli(IngestedAt) AS CommittedMs
FROM spangrad.steps WHERE Policy = {policy:String} AND Branch = {branch:String} ORDER BY Version DESC LIMIT {most:UInt32}
"""
_STEP_ROWS = """
SELECT Version, toUnixTimestamp64Milli(IngestedAt) AS CommittedMs,
    mapFilter((name, value) -> has({{metrics:Array(String)}}, name), Metrics) AS Metrics,
    multiIf({{sort:String}} = '', toFloat64(Version),
        mapContains(s.Metrics, {{sort:String}}) AND isFinite(s.Metrics[{{sort:String}}]), s.Metrics[{{sort:String}}], -1e300) AS SortValue
FROM spangrad.steps AS s
WHERE Policy = {{policy:String}} AND Branch = {{branch:String}} AND {after}
ORDER BY SortValue {direction}, Version {direction} LIMIT {{limit:UInt32}}
"""
_OF_VERSION = "Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64}"
_REWARDS = f"""
SELECT reward.1 AS Name, reward.2 AS Role, count() AS Rollouts, avg(reward.3) AS Mean, min(reward.3) AS Least, max(reward.3) AS Largest
FROM {revisions_sql(once=True)}
ARRAY JOIN arrayZip(`RewardTotals.Name`, `RewardTotals.Role`, `RewardTotals.Value`) AS reward
WHERE RolloutId IN (SELECT RolloutId FROM spangrad.batches WHERE {_OF_VERSION}) AND (RunId, RolloutId, BuildSpec, Revision) IN (
    SELECT RunId, RolloutId, BuildSpec, Revision FROM spangrad.batches WHERE {_OF_VERSION})
GROUP BY Name, Role ORDER BY Name, Role
"""
"""Rewards of the revisions that a version's batch trained."""
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
SELECT * FROM (
    SELECT Branch, Version, Parent, ParentBranch, Status FROM spangrad.policy_versions
    WHERE Policy = {policy:String} AND Version + {reach:UInt64} >= {version:UInt64} AND Version <= {version:UInt64} + {reach:UInt64}
    ORDER BY abs(toInt64(Version) - toInt64({version:UInt64})), Branch != {branch:String}, Branch LIMIT 200
)
ORDER BY Version, Branch
"""
_SAMPLED_BY = """
SELECT s.Sampled AS Sampled, s.Calls AS Calls, v.Branch AS Branch
FROM (
    SELECT arrayJoin(SampledVersions) AS Sampled, count() AS Calls FROM spangrad.trained_calls
    WHERE Policy = {policy:String} AND Branch = {branch:String} AND Version = {version:UInt64} GROUP BY Sampled
) AS s
LEFT JOIN (
    SELECT Version, argMin(Branch, (ifNull(Parent = Version, false), Branch != {branch:String}, Branch)) AS Branch
    FROM spangrad.policy_versions WHERE Policy = {policy:String} GROUP BY Version
) AS v ON v.Version = s.Sampled
ORDER BY Sampled DESC
"""
"""Versions that sampled a version's batch, each with the branch that trained it, not those that began with it; empty: none is known."""
_SAMPLES = """
SELECT Branch, Version, count() AS Calls FROM spangrad.trained_calls
WHERE Policy = {policy:String} AND Version BETWEEN {version:UInt64} AND {version:UInt64} + 64
    AND has(SampledVersions, {version:UInt64}) AND Version != {version:UInt64}
GROUP BY Branch, Version ORDER BY Version, Branch
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
_ADVANTAGES = """
SELECT RolloutId, Policy, Branch, Version, avg(Advantage) AS Advantage FROM spangrad.trained_calls
WHERE RolloutId IN {rollouts:Array(String)} GROUP BY RolloutId, Policy, Branch, Version ORDER BY RolloutId, Policy, Branch, Version
"""
_NEWEST_HELD_OUT = f"""
{revisions_sql(once=True)}
WHERE Mode = 'validate' AND notEmpty(PolicyVersions)
    AND RunId IN (SELECT RunId FROM spangrad.policy_versions WHERE {{versions}} AND Status = 'committed')
    AND BuildId IN (SELECT BuildId FROM {newest_revisions_sql("Mode = 'validate'")})
"""
"""Newest builds of held-out rollouts of the runs in which versions were made."""
_OF_POLICY = "Policy = {policy:String}"
_HELD_OUT = f"""
SELECT TaskId, Role, Sampled, arraySort(groupArray(20)((RolloutId, Value, Outcome))) AS Rollouts, avg(Value) AS Mean
FROM (
    SELECT TaskId, RolloutId, arrayMax(PolicyVersions) AS Sampled, Outcome, returned.1 AS Role, returned.2 AS Value
    FROM (
        SELECT *, if(isNull(Return), arrayZip(mapKeys(ReturnsByRole), mapValues(ReturnsByRole)), [('', assumeNotNull(Return))]) AS Returned
        FROM {_NEWEST_HELD_OUT.format(versions=_OF_POLICY)}
    )
    ARRAY JOIN Returned AS returned
)
WHERE Sampled IN ({{left:UInt64}}, {{right:UInt64}})
GROUP BY TaskId, Role, Sampled
"""
_HELD_OUT_RETURNS = f"""
SELECT arrayMax(PolicyVersions) AS Version, avg(Held) AS Return, avgMapIf(Roles, length(Roles) > 1) AS ReturnsByRole, count() AS Rollouts
FROM (
    SELECT PolicyVersions, Return AS Held, ReturnsByRole AS Roles
    FROM {_NEWEST_HELD_OUT.format(versions=f"{_OF_POLICY} AND Branch = {{branch:String}}")}
)
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
    newest_version: int
    """Newest version of the policy at that time: the step that skipped it began then."""
    skipped_us: int
    """Time at which it was skipped, in microseconds since 1970."""

    @property
    def place(self) -> tuple[Value, ...]:
        """Return its place in the order of versions, then of time."""
        return (self.newest_version, self.skipped_us, self.run, self.mode, self.spec, self.group)


@dataclass(frozen=True, slots=True)
class SkippedQuery:
    """Question for skipped groups of a branch, the newest first."""

    policy: str
    branch: str
    limit: int
    """Largest number of groups."""
    after: Sequence[Value] = ()
    """Place of the last group that is shown. Empty: the list begins."""
    since: int | None = None
    """Version that was the newest of the policy when the first of them was skipped. None: any."""
    until: int | None = None
    """Version before which they were skipped. None: any."""


def branches_of(store: PageStore) -> list[dict[str, Any]]:
    """Return policies and branches with their newest versions."""
    return store.rows(_BRANCHES)


def steps_of(store: PageStore, policy: str, branch: str, most: int = STEPS_MOST) -> list[dict[str, Any]]:
    """Return the newest steps of a branch with their metrics, oldest first."""
    return store.rows(_STEPS, {"policy": policy, "branch": branch, "most": most})[::-1]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Order of a branch's steps, and the step after which the list goes on."""

    sort: str = ""
    """Metric that is compared. Empty: the version's number."""
    descending: bool = True
    after: Sequence[Value] | None = None
    """Value and version of the last step that is shown. None: the list begins."""


def step_rows(store: PageStore, policy: str, branch: str, metrics: Sequence[str], order: StepOrder) -> dict[str, Any]:
    """Return a page of a branch's steps with some of their metrics, and the cursor of what follows; None: nothing does.

    A step without the metric that is compared, or with one that is no number, counts as the least.
    """
    direction, compared = ("DESC", "<") if order.descending else ("ASC", ">")
    after = f"(SortValue, Version) {compared} ({{value:Float64}}, {{version:UInt64}})" if order.after else "true"
    value, version = order.after or (0.0, 0)
    parameters = {"policy": policy, "branch": branch, "metrics": list(metrics), "sort": order.sort, "value": value, "version": version}
    sql = _STEP_ROWS.format(after=after, direction=direction)
    rows = store.rows(sql, {**parameters, "limit": STEP_ROWS + 1})
    shown, following = cut_page(rows, STEP_ROWS, lambda row: (row["SortValue"], row["Version"]))
    return {"rows": shown, "after": following}


def steps_export(store: PageStore, policy: str, branch: str, metrics: Sequence[str], order: StepOrder) -> Iterator[bytes]:
    """Yield a branch's steps as CSV: version, time of the commit in UTC, and the metrics."""
    yield csv_line(["Version", "Committed", *metrics])
    while True:
        page = step_rows(store, policy, branch, metrics, order)
        for row in page["rows"]:
            committed = datetime.fromtimestamp(row["CommittedMs"] / 1000, UTC).isoformat(timespec="milliseconds")
            yield csv_line([row["Version"], committed, *(row["Metrics"].get(name, "") for name in metrics)])
        if page["after"] is None:
            return
        order = replace(order, after=decode_cursor(page["after"], *STEP_CURSOR))


def training_view(store: PageStore, policy: str | None, branch: str | None) -> dict[str, Any]:
    """Return branches, and of one the steps and the held-out returns by sampling version.

    It is the branch that learned last among those of the policy and the name that are given (None: any).
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
        "heldOut": store.rows(_HELD_OUT_RETURNS, {"policy": chosen["Policy"], "branch": chosen["Branch"]}),
    }


def skipped_view(rows: Sequence[SkippedRow], reasons: Mapping[str, int]) -> dict[str, Any]:
    """Return a page of a branch's skipped groups, the cursor of what follows, and on the first page the number of all by reason."""
    shown, cursor = cut_page(rows, SKIPPED_ROWS, lambda row: row.place)
    return {"rows": [asdict(row) for row in shown], "after": cursor, "reasons": dict(reasons)}


def advantages_of(store: PageStore, rollouts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the mean advantage of the calls of each rollout in each step that trained them."""
    return store.rows(_ADVANTAGES, {"rollouts": list(rollouts)})


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
        "rewards": store.rows(_REWARDS, place),
        "groups": [_group(*key, rollouts) for key, rollouts in groups.items()],
    }


def comparison(store: PageStore, policy: str, left: int, right: int) -> dict[str, Any]:
    """Return the held-out tasks that two versions of a policy played, with their rollouts; a row a role where rewards name several.

    The tasks are those with the largest differences, `TASKS_MOST` at most; the numbers are of all.
    """
    tasks: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in store.rows(_HELD_OUT, {"policy": policy, "left": left, "right": right}):
        tasks.setdefault((row["TaskId"], row["Role"]), {})[row["Sampled"]] = {"mean": row["Mean"], "rollouts": row["Rollouts"]}
    both = [(task, sides[left], sides[right]) for task, sides in tasks.items() if left in sides and right in sides]
    both.sort(key=lambda item: (-abs(item[2]["mean"] - item[1]["mean"]), item[0]))
    return {
        "left": left,
        "right": right,
        "both": len(both),
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
