"""The lineage dashboard: from a policy version to the batch, rollouts and spans that it was trained on, and back from a rollout.

In: policy_versions, batches, trained_calls, and the spans of one rollout. Out: a dashboard of tables; a click
in one selects what the next one shows.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards import links, variables
from dashboards.panels import Panel, rows, trace
from dashboards.queries import OF_BRANCH, OF_VERSION, metric

_OF_ROLLOUT = variables.is_("RolloutId", "rollout")
_SPANS = f"""spangrad.rollout_spans
        WHERE {_OF_ROLLOUT} AND RowKind = 'span' AND TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE {_OF_ROLLOUT})"""
"""The rollout's spans, read by their traces."""


def build() -> dashboard.Dashboard:
    """Return the lineage dashboard."""
    return links.layout(
        "lineage",
        "from a policy version to the batch, the rollouts and the spans that made it, and back",
        (variables.policy(), variables.branch(), _version(), _rollout()),
        {
            "Versions of $policy on $branch": [_versions()],
            "Version $version: its batch": [_batch(), _rollouts()],
            "Rollout $rollout": [_transitions(), _trained(), _conclusions(), _trace(), _spans()],
        },
    )


def _version() -> dashboard.QueryVariable:
    sql = f"""
        SELECT toString(Version) AS version FROM spangrad.policy_versions
        WHERE {OF_BRANCH}
        ORDER BY BatchId != '' AND Status = 'committed' DESC, Version DESC
        LIMIT 1000"""
    return variables.one_of("version", "version", "A version of the branch; the newest that was trained comes first.", sql)


def _rollout() -> dashboard.QueryVariable:
    sql = f"SELECT RolloutId FROM spangrad.batches WHERE {OF_VERSION} ORDER BY GroupId, RolloutId LIMIT 1000"
    return variables.one_of("rollout", "rollout", "A rollout of the version's batch, or any other: type its id.", sql)


def _versions() -> Panel:
    sql = f"""
        SELECT Version AS version, Parent AS parent, ParentBranch AS "parent's branch", Status AS status, IngestedAt AS written,
            Mode AS mode, {metric("groups")} AS groups, {metric("rollouts")} AS rollouts, {metric("mean_return")} AS return,
            {metric("logprob_gap_max")} AS gap, BatchId AS batch, Checksum AS checksum, Path AS path
        FROM spangrad.policy_versions
        WHERE {OF_BRANCH}
        ORDER BY version DESC
        LIMIT 500"""
    return rows(
        "Versions",
        sql,
        "Newest first, whatever the chosen time. No batch: training began with these weights. Orphaned: a crash came before the commit.",
        units={
            "version": "none", "parent": "none", "written": "dateTimeAsIso", "groups": "short", "rollouts": "short", "return": "short",
            "gap": "sci",
        },
        links={"version": ("What made it", links.LINEAGE_OF_VERSION), "parent": ("What made its parent", links.LINEAGE_OF_PARENT)},
    )  # fmt: skip


def _batch() -> Panel:
    sql = f"""
        SELECT GroupId AS group, any(TaskId) AS task, uniqExact(RolloutId) AS rollouts, count() AS transitions,
            sum(Return / Calls) / rollouts AS return, sum(OutputTokens) AS tokens, min(SampledVersions[1]) AS oldest,
            max(SampledVersions[1]) AS newest, any(RunId) AS run, any(Mode) AS mode, any(BatchId) AS batch, any(BuildSpec) AS specification
        FROM (SELECT *, count() OVER (PARTITION BY RolloutId) AS Calls FROM spangrad.trained_calls WHERE {OF_VERSION})
        GROUP BY group
        ORDER BY group
        LIMIT 500"""
    return rows(
        "Groups of its batch",
        sql,
        "A row a group of rollouts that share a baseline. return: mean of the rollouts' returns. oldest, newest: versions that sampled its"
        " calls. specification: of the build that was trained.",
        units={
            "rollouts": "short", "transitions": "short", "return": "short", "tokens": "short", "oldest": "none", "newest": "none",
        },
        height=8,
    )  # fmt: skip


def _rollouts() -> Panel:
    sql = f"""
        SELECT c.RolloutId AS rollout, c.GroupId AS group, c.Attempt AS attempt, c.Revision AS revision, any(a.Timestamp) AS began,
            count() AS transitions, any(c.Return) AS return, avg(c.Advantage) AS advantage, sum(c.OutputTokens) AS tokens,
            min(c.SampledVersions[1]) AS oldest, max(c.SampledVersions[1]) AS newest, any(c.TraceId) AS trace
        FROM (SELECT * FROM spangrad.trained_calls WHERE {OF_VERSION}) AS c
        LEFT ANY JOIN (
            SELECT RunId, RolloutId, Attempt, toNullable(Timestamp) AS Timestamp FROM spangrad.attempts
            WHERE RolloutId IN (SELECT RolloutId FROM spangrad.batches WHERE {OF_VERSION})
        ) AS a ON a.RunId = c.RunId AND a.RolloutId = c.RolloutId AND a.Attempt = c.Attempt
        GROUP BY rollout, group, attempt, revision
        ORDER BY group, rollout
        LIMIT 1000"""
    return rows(
        "Rollouts of its batch",
        sql,
        "A row a rollout, in the attempt and revision that was trained. advantage: mean over its calls. A rollout leads to its spans.",
        units={
            "attempt": "none", "revision": "none", "began": "dateTimeAsIso", "transitions": "short", "return": "short",
            "advantage": "short", "tokens": "short", "oldest": "none", "newest": "none",
        },
        links={"rollout": ("Its spans and versions", links.LINEAGE_OF_ROLLOUT_HERE)},
    )  # fmt: skip


def _transitions() -> Panel:
    sql = f"""
        SELECT Turn AS turn, AgentName AS agent, SampledVersions[1] AS "sampled by", InputTokens AS prompt, OutputTokens AS response,
            FinishReason AS finish, Reward AS reward, Advantage AS advantage, arrayStringConcat(Tools, ', ') AS tools,
            TraceId AS trace, SpanId AS span, TransitionId AS transition
        FROM spangrad.trained_calls
        WHERE {OF_VERSION} AND {_OF_ROLLOUT}
        ORDER BY turn, span
        LIMIT 1000"""
    return rows(
        "Spans of rollout $rollout that trained version $version",
        sql,
        "A row a policy call: its turn, tokens in and out, raw rewards, the advantage that was used, and the span that it was.",
        units={
            "turn": "none", "sampled by": "none", "prompt": "short", "response": "short", "reward": "short", "advantage": "short",
        },
    )  # fmt: skip


def _trained() -> Panel:
    sql = f"""
        SELECT b.Policy AS policy, b.Branch AS branch, b.Version AS version, v.Status AS status, v.IngestedAt AS written,
            b.RunId AS run, b.GroupId AS group, b.Attempt AS attempt, b.Revision AS revision, b.BatchId AS batch
        FROM (SELECT * FROM spangrad.batches WHERE {_OF_ROLLOUT}) AS b
        LEFT JOIN spangrad.policy_versions AS v ON v.Policy = b.Policy AND v.Branch = b.Branch
            AND v.Version = b.Version
        ORDER BY written DESC, policy, branch
        LIMIT 500"""
    return rows(
        "Versions that rollout $rollout trained",
        sql,
        "The way back: every version, of any policy and branch, whose batch held the rollout.",
        units={"version": "none", "written": "dateTimeAsIso", "attempt": "none", "revision": "none"},
        links={"version": ("What made it", links.LINEAGE_OF_ITS_BRANCH)},
        height=7,
    )


def _conclusions() -> Panel:
    sql = f"""
        SELECT * FROM (
            SELECT Attempt AS attempt, Timestamp AS began, AgentName AS agent, 'transition' AS became,
                concat('turn ', toString(Turn)) AS detail, BuildSpec AS specification, TraceId AS trace, SpanId AS span
            FROM spangrad.transitions
            WHERE {_OF_ROLLOUT}
            UNION ALL
            SELECT Attempt, Timestamp, AgentName, Reason, Detail, BuildSpec, TraceId, SpanId
            FROM spangrad.drops
            WHERE {_OF_ROLLOUT})
        ORDER BY specification, attempt, began, span
        LIMIT 1000"""
    return rows(
        "What became of each call of rollout $rollout",
        sql,
        "Each policy call of the rollout, of all attempts and for each build specification: a transition, or dropped for a reason.",
        units={"attempt": "none", "began": "dateTimeAsIso"},
        height=8,
    )


def _trace() -> Panel:
    sql = f"""
        SELECT TraceId AS traceID, SpanId AS spanID, ParentSpanId AS parentSpanID, SpanName AS operationName, ServiceName AS serviceName,
            Timestamp AS startTime, Duration / 1e6 AS duration,
            arrayMap(key -> map('key', key, 'value', Attributes[key]), mapKeys(Attributes)) AS tags,
            [map('key', 'service.name', 'value', toString(ServiceName))] AS serviceTags,
            toUInt8(multiIf(StatusCode = 'Error', 2, StatusCode = 'Ok', 1, 0)) AS statusCode, StatusMessage AS statusMessage
        FROM {_SPANS}
            AND TraceId = (SELECT argMax(TraceId, (Attempt, Timestamp)) FROM spangrad.attempts WHERE {_OF_ROLLOUT})
        ORDER BY startTime, spanID
        LIMIT 5000"""
    return trace("Rollout $rollout", sql, "The spans of its last attempt, gateway's and agent's, under each other.")


def _spans() -> Panel:
    sql = f"""
        SELECT Attempt AS attempt, Timestamp AS began, SpanName AS name, ServiceName AS service, ScopeName AS scope, Duration AS duration,
            StatusCode AS status, StatusMessage AS message, TraceId AS trace, SpanId AS span, ParentSpanId AS parent
        FROM {_SPANS}
        ORDER BY attempt, began, span
        LIMIT 5000"""
    return rows(
        "Spans of rollout $rollout",
        sql,
        "Every span of the rollout, of all attempts. `spangrad rollout show` prints the same as a tree.",
        units={"attempt": "none", "began": "dateTimeAsIso", "duration": "ns"},
    )
