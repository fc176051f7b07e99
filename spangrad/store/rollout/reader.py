"""Reading everything that the span store and the ledger hold of one rollout.

In: a client of the store, the rollout's id. Out: a `Record`. Invariant: only this rollout's rows are read, by their keys; of each build
specification only the newest revision is read.

A statement takes longer to be planned than to read a rollout's rows: those that need nothing of each other run at once, and those that
know their traces or builds are given them as values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spangrad import semconv
from spangrad.store.clickhouse import moment
from spangrad.store.datasets import builds_sql, built_sql, roles_sql, rows_of_builds_sql
from spangrad.store.rollout.record import Build, Call, Conclusion, Record, Reward, Span, TrainedBatch

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NEAREST = 5
_AT_ONCE = 4
"""Statements that run at once."""
_TRACES = "SELECT groupArray(TraceId), toUnixTimestamp64Micro(now64(6)) FROM spangrad.rollout_traces WHERE RolloutId = {id:String}"
_ROWS = """
SELECT *, RolloutKeySource = 'rollout' AS Named, toUnixTimestamp64Nano(Timestamp) AS Started, toUnixTimestamp64Micro(IngestedAt) AS Arrived
FROM spangrad.rollout_spans
WHERE RolloutId = {id:String} AND TraceId IN {traces:Array(String)}
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
_OF_BUILD = ("Mode", "GroupId", "GroupSize", "Revision", "Attempt", "Calls", "BuildId")
_BUILDS = f"""
SELECT BuildSpec, RunId, {", ".join(_OF_BUILD)}, toUnixTimestamp64Micro(IngestedAt)
FROM {builds_sql(where=_OF_ROLLOUT, facts=_OF_BUILD)} AS b
ORDER BY BuildSpec, RunId
"""
_TRANSITIONS = f"""
SELECT RunId, BuildSpec, Attempt, TraceId, SpanId, ChoiceIndex, AgentName, Policy, Version, Turn,
    `Rewards.Name`, `Rewards.Value`, `Rewards.Source`, `Rewards.Role`
FROM {rows_of_builds_sql("transitions", _OF_ROLLOUT)} AS t
ORDER BY Attempt, Turn, ChoiceIndex, CallId
"""
_DROPS = f"""
SELECT RunId, BuildSpec, Attempt, TraceId, if(CallId = '', '', SpanId), ChoiceIndex, AgentName, if(Policy = '', Model, Policy),
    Reason, Detail, Convention
FROM {rows_of_builds_sql("drops", _OF_ROLLOUT)} AS d
ORDER BY Attempt, Timestamp, ChoiceIndex, CallId
"""
_OF_GROUP = "RunId = {run:String} AND Mode = {mode:String} AND BuildSpec = {spec:String} AND GroupId = {group:String}"
_ONCE_OF_GROUP = f"RolloutId IN {built_sql(_OF_GROUP)}"
_GROUP = f"SELECT uniqExact(RolloutId) FROM {builds_sql(where=_ONCE_OF_GROUP)} AS b WHERE {_OF_GROUP}"
"""The newest builds of rollouts of which a build, if an older one, is of the group: read by key, where spangrad.builds reads all."""
_GIVEN = f"""
SELECT DISTINCT TraceId, SpanId, Name, toString(Value), Source, Role
FROM {rows_of_builds_sql("rewards", _OF_ROLLOUT)} AS r
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
_COMMITTED = """
SELECT Policy, Branch, arraySort(groupArray(Version)) FROM spangrad.policy_versions WHERE Status = 'committed' GROUP BY Policy, Branch
"""
_SIMILAR_TRACES = """
SELECT DISTINCT TraceId FROM (
    SELECT TraceId FROM spangrad.rollout_traces WHERE startsWith(RolloutId, {start:String})
    UNION ALL SELECT TraceId FROM spangrad.rollout_traces WHERE TraceId = {id:String}
    UNION ALL SELECT TraceId FROM otel.otel_traces WHERE SpanId = {id:String} AND length({id:String}) = 16)
LIMIT 1000
"""
"""Traces that an id may be meant for, each read by key, but for the id of a span: that column is read whole."""
_IN_TRACES = """
SELECT RolloutId FROM spangrad.rollout_spans WHERE RolloutId != '' AND TraceId IN {traces:Array(String)} AND ({where})
GROUP BY RolloutId ORDER BY max(IngestedAt) DESC LIMIT {most:UInt8}
"""
_NEWEST = "SELECT RolloutId FROM spangrad.attempts GROUP BY RolloutId ORDER BY max(IngestedAt) DESC LIMIT {most:UInt8}"
_NEWEST_TRACES = "SELECT TraceId FROM otel.otel_traces ORDER BY Timestamp DESC LIMIT 1000"

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

    def spans_of(traces: Sequence[str]) -> list[dict[str, Any]]:
        return list(client.query(_ROWS, parameters={"id": id_, "traces": traces}).named_results())

    ((traces, now),) = rows(_TRACES)
    if not traces:
        return Record(id_, [], [], [], [])
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reading = pool.submit(spans_of, traces)
        built, called = pool.submit(rows, _BUILDS), pool.submit(rows, _CALLS, keys=[id_, *traces])
        trained, committed, datasets = (pool.submit(rows, sql) for sql in (_TRAINED, _COMMITTED, _DATASETS))
        builds = [Build(*row, built_at=moment(at)) for *row, at in built.result()]
        concluded = [pool.submit(rows, sql, builds=[build.id for build in builds]) for sql in (_TRANSITIONS, _DROPS, _GIVEN)]
        # Without a group: all rollouts of the run that have none would count as one.
        groups = [
            pool.submit(rows, _GROUP, run=build.run, spec=build.spec, group=build.group, mode=build.mode) if build.group else None
            for build in builds
        ]
        all_rows = reading.result()
        roles = pool.submit(rows, _ROLES, runs=sorted({row["RunId"] for row in all_rows} - {""}))
    span_rows = [row for row in all_rows if attempt in {None, row["Attempt"]}]
    sent = [row for row in span_rows if row["RowKind"] == "span"]
    fields: Iterable[list[Any]] = ([*(row[name] for name in _OF_SPAN), *known] for row, known in zip(sent, describe(sent), strict=True))
    spans = [Span(*values) for values in fields]
    if not spans:
        return Record(id_, [], [], [], [])
    kept = {span.key for span in spans}
    transitions, drops, given = (read.result() for read in concluded)
    rewards = [_evaluation(row) for row in span_rows if row["RowKind"] != "span" and semconv.EVALUATION_SCORE in row["Attributes"]]
    rewards += [reward for reward in (Reward(*row) for row in given) if attempt is None or (reward.trace, reward.span) in kept]
    conclusions = _conclusions(transitions, drops, attempt)
    of_groups = [future.result()[0][0] if future else 0 for future in groups]
    return Record(
        id_,
        spans,
        [call for call in (Call(*row) for row in called.result()) if (call.trace, call.span) in kept],
        rewards,
        _concluded(builds, of_groups, conclusions, datasets.result(), skipped),
        [TrainedBatch(*row) for row in trained.result()],
        {(policy, branch): versions for policy, branch, versions in committed.result()},
        moment(max(row["Arrived"] for row in all_rows)),
        moment(now),
        roles_by_run=dict(roles.result()),
    )


def similar_ids(client: Client, id_: str, attempt: int | None) -> str:
    """Return a sentence that suggests ids to use instead of one that the store does not know."""

    def values(sql: str, **parameters: Any) -> list[str]:
        parameters |= {"id": id_, "start": id_[:6], "most": _NEAREST}
        return [str(row[0]) for row in client.query(sql, parameters=parameters).result_rows]

    def ids(traces: str, where: str = "true") -> list[str]:
        """Return rollouts of the traces of a query: the view's own join would read every trace of the store."""
        known = values(traces)
        return values(_IN_TRACES.replace("{where}", where), traces=known) if known else []

    if attempt is not None and ids(f"SELECT TraceId FROM spangrad.rollout_traces WHERE {_OF_ROLLOUT} LIMIT 1000", _OF_ROLLOUT):
        return "Leave --attempt out to see those that it had."
    if similar := ids(_SIMILAR_TRACES, "startsWith(RolloutId, {start:String}) OR TraceId = {id:String} OR SpanId = {id:String}"):
        return f"Did you mean {' or '.join(similar)}?"
    newest = values(_NEWEST) or ids(_NEWEST_TRACES)
    return f"The newest rollouts are {', '.join(newest)}." if newest else "It holds no rollouts at all: is store.url the right one?"


def _evaluation(row: Mapping[str, Any]) -> Reward:
    """Return the reward in an evaluation event or log record."""
    attributes = row["Attributes"]
    name = attributes.get(semconv.EVALUATION_NAME) or semconv.REWARD_NAME
    source = "event" if row["RowKind"] == "evaluation_event" else "log"
    role = attributes.get(semconv.REWARD_ROLE, "")
    return Reward(row["TraceId"], row["SpanId"], name, attributes[semconv.EVALUATION_SCORE], source, role)


def _conclusions(
    transitions: Iterable[Sequence[Any]], drops: Iterable[Sequence[Any]], attempt: int | None
) -> Mapping[tuple[str, str], list[Conclusion]]:
    """Return what became of each call, by run and build specification."""
    conclusions = defaultdict[tuple[str, str], list[Conclusion]](list)
    for run, spec, number, trace, span, choice, agent, policy, version, turn, *rewards in transitions:
        given = tuple(zip(*rewards, strict=True))
        conclusions[run, spec].append(Conclusion(number, trace, span, choice, agent, policy, version, turn, given))
    for run, spec, *call, reason, detail, convention in drops:
        conclusions[run, spec].append(Conclusion(*call, reason=reason, detail=detail, convention=convention))
    return {key: [row for row in rows if attempt is None or row.attempt == attempt] for key, rows in conclusions.items()}


def _concluded(
    builds: Sequence[Build],
    of_groups: Sequence[int],
    conclusions: Mapping[tuple[str, str], list[Conclusion]],
    datasets: Iterable[tuple[str, str]],
    skipped: SkipLookup | None,
) -> list[Build]:
    names = defaultdict[str, list[str]](list)
    for spec, name in datasets:
        names[spec].append(name)
    return [
        replace(
            build,
            conclusions=conclusions.get((build.run, build.spec), []),
            dataset=", ".join(names[build.spec]),
            group_built=of_group,
            skipped=skipped(build.run, build.mode, build.spec, build.group) if skipped else (),
        )
        for build, of_group in zip(builds, of_groups, strict=True)
    ]
