"""Reading everything that the span store and the ledger hold of one rollout.

In: a client of the store, the rollout's id. Out: a `Record`. Invariant: only this rollout's rows are read, by their keys; of each build
specification only the newest revision is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spangrad import semconv
from spangrad.store.clickhouse import moment
from spangrad.store.datasets import builds_sql, built_sql, roles_sql, rows_sql
from spangrad.store.rollout.record import Build, Call, Conclusion, Record, Reward, Span, TrainedBatch

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NEAREST = 5
_ROWS = """
SELECT *, RolloutKeySource = 'rollout' AS Named, toUnixTimestamp64Nano(Timestamp) AS Started, toUnixTimestamp64Micro(IngestedAt) AS Arrived
FROM spangrad.rollout_spans
WHERE RolloutId = {id:String} AND TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId = {id:String})
"""
_OF_SPAN = (
    "RunId", "Mode", "Attempt", "Named", "Started", "TraceId", "SpanId", "ParentSpanId", "ProcessId", "Seq", "SpanName", "ServiceName",
    "ScopeName", "Duration", "StatusCode", "StatusMessage", "Attributes",
)  # fmt: skip
"""Columns of _ROWS, in the order of the fields of `Span`."""
_CALLS = """
SELECT TraceId, SpanId, ChoiceIndex, Policy, `Versions.Version`, length(PromptIds), length(ResponseIds), FinishReason, ErrorType,
    HttpStatus, Aborted
FROM spangrad.calls
WHERE RolloutKey IN {keys:Array(String)}
"""
_OF_ROLLOUT = "RolloutId = {id:String}"
_BUILDS = f"""
SELECT RunId, BuildSpec, Mode, GroupId, GroupSize, Revision, Attempt, Calls, toUnixTimestamp64Micro(IngestedAt)
FROM {builds_sql(where=_OF_ROLLOUT)} AS b
ORDER BY BuildSpec, RunId
"""
_TRANSITIONS = f"""
SELECT RunId, BuildSpec, Attempt, TraceId, SpanId, ChoiceIndex, AgentName, Policy, Version, Turn,
    `Rewards.Name`, `Rewards.Value`, `Rewards.Source`, `Rewards.Role`
FROM {rows_sql("transitions", where=_OF_ROLLOUT)} AS t
ORDER BY Attempt, Turn, ChoiceIndex, CallId
"""
_DROPS = f"""
SELECT RunId, BuildSpec, Attempt, TraceId, if(CallId = '', '', SpanId), ChoiceIndex, AgentName, if(Policy = '', Model, Policy),
    Reason, Detail, Convention
FROM {rows_sql("drops", where=_OF_ROLLOUT)} AS d
ORDER BY Attempt, Timestamp, ChoiceIndex, CallId
"""
_OF_GROUP = "RunId = {run:String} AND Mode = {mode:String} AND BuildSpec = {spec:String} AND GroupId = {group:String}"
_ONCE_OF_GROUP = f"RolloutId IN {built_sql(_OF_GROUP)}"
_GROUP = f"SELECT uniqExact(RolloutId) FROM {builds_sql(where=_ONCE_OF_GROUP)} AS b WHERE {_OF_GROUP}"
"""The newest builds of rollouts of which a build, if an older one, is of the group: read by key, where spangrad.builds reads all."""
_GIVEN = f"""
SELECT DISTINCT TraceId, SpanId, Name, toString(Value), Source, Role
FROM {rows_sql("rewards", where=_OF_ROLLOUT)} AS r
WHERE Source IN ('sql', 'air')
ORDER BY Name, Role, Source, TraceId, SpanId, Value
"""
"""Rewards of SQL rules and of AIR, as the builder gave them; one that several build specifications give is returned once."""
_DATASETS = "SELECT BuildSpec, concat(Name, '@', toString(Revision)) FROM spangrad.datasets ORDER BY Name, Revision"
_ROLES = f"SELECT RunId, arraySort(groupUniqArray(Role)) FROM {roles_sql('RunId IN {runs:Array(String)}')} AS r GROUP BY RunId"
_TRAINED = f"""
SELECT b.RunId, b.BuildSpec, b.Policy, b.Branch, b.Version, b.BatchId, b.Revision, v.Status
FROM (SELECT * FROM spangrad.batches WHERE {_OF_ROLLOUT}) AS b
LEFT JOIN spangrad.policy_versions AS v ON b.Policy = v.Policy AND b.Branch = v.Branch AND b.Version = v.Version
ORDER BY b.Policy, b.Branch, b.Version
"""
_NEWEST = "SELECT Policy, Branch, max(Version) FROM spangrad.policy_versions WHERE Status = 'committed' GROUP BY Policy, Branch"
_NEAR = """
SELECT RolloutId FROM spangrad.rollout_spans WHERE RolloutId != '' AND ({where}) GROUP BY RolloutId ORDER BY max(IngestedAt) DESC
LIMIT {most:UInt8}
"""

Describe = Callable[[Sequence[Mapping[str, Any]]], Iterable[tuple[str, str, str]]]
"""Function from rows of spangrad.rollout_spans to the kind, agent and tool of each span, as the builder's dialects recognise them."""
SkipLookup = Callable[[str, str, str, str], Sequence[tuple[str, str, str, str]]]
"""Function from run, mode, build specification and id of a group to policy, branch, reason and detail of each trainer that skipped it."""


def read(client: Client, id_: str, describe: Describe, attempt: int | None = None, skipped: SkipLookup | None = None) -> Record:
    """Read a rollout, or one of its attempts. The record has no spans if the store knows no such rollout.

    Args:
        client: client of the store.
        id_: id of the rollout; for spans without a runner, id of the session, conversation or trace.
        describe: recognises what spans are.
        attempt: number of the only attempt to read. None: all attempts.
        skipped: looks up skipped groups in the trainers' ledger, which alone holds the reasons. None: no ledger is available.
    """

    def rows(sql: str, **parameters: Any) -> list[Any]:
        return list(client.query(sql, parameters={"id": id_, **parameters}).result_rows)

    all_rows = list(client.query(_ROWS, parameters={"id": id_}).named_results())
    span_rows = [row for row in all_rows if attempt in {None, row["Attempt"]}]
    sent = [row for row in span_rows if row["RowKind"] == "span"]
    fields: Iterable[list[Any]] = ([*(row[name] for name in _OF_SPAN), *known] for row, known in zip(sent, describe(sent), strict=True))
    spans = [Span(*values) for values in fields]
    if not spans:
        return Record(id_, [], [], [], [])
    kept = {span.key for span in spans}
    rewards = [_evaluation(row) for row in span_rows if row["RowKind"] != "span" and semconv.EVALUATION_SCORE in row["Attributes"]]
    rewards += [reward for reward in (Reward(*row) for row in rows(_GIVEN)) if attempt is None or (reward.trace, reward.span) in kept]
    calls = [Call(*row) for row in rows(_CALLS, keys=[id_, *sorted({span.trace for span in spans})])]
    ((now,),) = rows("SELECT toUnixTimestamp64Micro(now64(6))")
    return Record(
        id_,
        spans,
        [call for call in calls if (call.trace, call.span) in kept],
        rewards,
        _builds(rows, attempt, skipped),
        [TrainedBatch(*row) for row in rows(_TRAINED)],
        {(policy, branch): version for policy, branch, version in rows(_NEWEST)},
        moment(max(row["Arrived"] for row in all_rows)),
        moment(now),
        roles_by_run=dict(rows(_ROLES, runs=sorted({span.run for span in spans} - {""}))),
    )


def similar_ids(client: Client, id_: str, attempt: int | None) -> str:
    """Return a sentence that suggests ids to use instead of one that the store does not know."""

    def ids(where: str) -> list[str]:
        parameters = {"id": id_, "start": id_[:6], "most": _NEAREST}
        return [str(row[0]) for row in client.query(_NEAR.replace("{where}", where), parameters=parameters).result_rows]

    if attempt is not None and ids(_OF_ROLLOUT):
        return "Leave --attempt out to see those that it had."
    if similar := ids("startsWith(RolloutId, {start:String}) OR TraceId = {id:String} OR SpanId = {id:String}"):
        return f"Did you mean {' or '.join(similar)}?"
    newest = ids("RolloutKeySource = 'rollout' AND SpanName = 'rollout'") or ids("true")
    return f"The newest rollouts are {', '.join(newest)}." if newest else "It holds no rollouts at all: is store.url the right one?"


def _evaluation(row: Mapping[str, Any]) -> Reward:
    """Return the reward in an evaluation event or log record."""
    attributes = row["Attributes"]
    name = attributes.get(semconv.EVALUATION_NAME) or semconv.REWARD_NAME
    source = "event" if row["RowKind"] == "evaluation_event" else "log"
    role = attributes.get(semconv.REWARD_ROLE, "")
    return Reward(row["TraceId"], row["SpanId"], name, attributes[semconv.EVALUATION_SCORE], source, role)


def _builds(rows: Any, attempt: int | None, skipped: SkipLookup | None) -> list[Build]:
    datasets = defaultdict[str, list[str]](list)
    for spec, name in rows(_DATASETS):
        datasets[spec].append(name)
    conclusions = defaultdict[tuple[str, str], list[Conclusion]](list)
    for run, spec, number, trace, span, choice, agent, policy, version, turn, *rewards in rows(_TRANSITIONS):
        given = tuple(zip(*rewards, strict=True))
        conclusions[run, spec].append(Conclusion(number, trace, span, choice, agent, policy, version, turn, given))
    for run, spec, *call, reason, detail, convention in rows(_DROPS):
        conclusions[run, spec].append(Conclusion(*call, reason=reason, detail=detail, convention=convention))
    builds = list[Build]()
    for run, spec, mode, group, size, revision, final, calls, at in rows(_BUILDS):
        of_attempt = [conclusion for conclusion in conclusions[run, spec] if attempt is None or conclusion.attempt == attempt]
        ((built,),) = rows(_GROUP, run=run, spec=spec, group=group, mode=mode)
        by = skipped(run, mode, spec, group) if skipped else ()
        names = ", ".join(datasets[spec])
        builds.append(Build(spec, of_attempt, names, run, revision, final, calls, moment(at), group, size, built, by))
    return builds
