-- What people and dashboards read: each counts a span, a call, a conclusion once, however often it was delivered.

-- Whose the spans of a trace are that name no rollout themselves (docs/concepts/spans.md). Attempts: how many of them the trace names,
-- 2 standing for more. One: theirs. Several: nobody's; the first is here, to which their calls are dropped. None: the session's, the
-- conversation's, or, where RolloutId is empty, the trace's. transition_builder/completeness/resolve.py says the same of spans as of a time.
CREATE VIEW IF NOT EXISTS spangrad_internal.trace_owners AS
SELECT TraceId, RunId, Mode,
    multiIf(first.1 IS NOT NULL, assumeNotNull(first.1), SessionId != '', SessionId, ConversationId) AS RolloutId,
    ifNull(first.2, 0) AS Attempt,
    multiIf(first.1 IS NULL, 0, first = last, 1, 2) AS Attempts
FROM (
    SELECT TraceId, max(RunId) AS RunId, max(Mode) AS Mode, max(SessionId) AS SessionId, max(ConversationId) AS ConversationId,
        (min(FirstRolloutId), min(FirstAttempt)) AS first, (max(LastRolloutId), max(LastAttempt)) AS last
    FROM spangrad_internal.trace_rollouts
    GROUP BY TraceId);

CREATE VIEW IF NOT EXISTS spangrad.rollout_spans AS
SELECT RolloutKey AS RolloutId, RunId, Mode, Attempt, RolloutKey, RolloutKeySource, Timestamp, TraceId, SpanId, EventIndex, RowKind, ParentSpanId,
    ProcessId, Seq, SpanName, SpanKind, ServiceName, ScopeName, Duration, StatusCode, StatusMessage, Attributes, IngestedAt
FROM spangrad_internal.rollout_spans FINAL
WHERE RolloutKeySource = 'rollout' AND RunId != ''
UNION ALL
SELECT multiIf(s.RolloutKeySource = 'rollout', s.RolloutKey, t.Attempts > 1, '', t.RolloutId != '', t.RolloutId, s.RolloutKey),
    if(t.RunId != '', t.RunId, s.RunId), if(t.Mode != '', t.Mode, s.Mode),
    multiIf(s.RolloutKeySource = 'rollout', s.Attempt, t.Attempts = 1, t.Attempt, 0),
    s.RolloutKey, s.RolloutKeySource, s.Timestamp, s.TraceId, s.SpanId, s.EventIndex, s.RowKind, s.ParentSpanId, s.ProcessId, s.Seq, s.SpanName,
    s.SpanKind, s.ServiceName, s.ScopeName, s.Duration, s.StatusCode, s.StatusMessage, s.Attributes, s.IngestedAt
FROM (SELECT * FROM spangrad_internal.rollout_spans FINAL WHERE RolloutKeySource != 'rollout' OR RunId = '') AS s
LEFT JOIN spangrad_internal.trace_owners AS t ON s.TraceId = t.TraceId
COMMENT 'Spans (RowKind span) and evaluations, each once, with the attempt that they belong to: the one that they name, else the only one that their trace names; where it names none, their session, conversation or trace; where it names several, none. Of one rollout, filter by RolloutId and by TraceId IN rollout_traces: both are read by key.';

CREATE VIEW IF NOT EXISTS spangrad.rollout_traces AS
SELECT DISTINCT RolloutKey AS RolloutId, TraceId FROM spangrad_internal.rollout_spans
COMMENT 'Traces with a span that names the rollout, session or conversation itself, or none: all traces that a rollout may have spans in.';

CREATE VIEW IF NOT EXISTS spangrad.calls AS SELECT * EXCEPT (DedupRank), CallId FROM spangrad_internal.calls FINAL
COMMENT 'Policy calls that the gateway recorded, each choice once. Calls of direct mode are in transitions and drops.';

-- BuildId of the newest revision of each rollout that was built. spangrad/store/datasets.py says the same as of a time.
CREATE VIEW IF NOT EXISTS spangrad_internal.newest_builds AS
SELECT argMax(BuildId, Precedence) AS BuildId
FROM spangrad_internal.builds
GROUP BY RunId, RolloutId, BuildSpec;

CREATE VIEW IF NOT EXISTS spangrad.builds AS
SELECT RunId, BuildSpec, RolloutId, Mode, GroupId, GroupSize, TaskId, Attempt, Revision, Content, Calls, Transitions, Drops, Rewards, Failure,
    Watermark, RowsRead, IngestedAt
FROM spangrad_internal.builds FINAL
WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
COMMENT 'The newest revision of each rollout that was built, as the builder wrote it; spangrad.rollouts says more.';

CREATE VIEW IF NOT EXISTS spangrad.rewards AS
SELECT * FROM spangrad_internal.rewards FINAL
WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
COMMENT 'Rewards of the newest build of each rollout.';

CREATE VIEW IF NOT EXISTS spangrad.transitions AS
SELECT t.* EXCEPT (CallKey), a.Advantage AS Advantage
FROM (
    SELECT *, CallKey FROM spangrad_internal.transitions FINAL
    WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
) AS t
LEFT ANY JOIN (
    SELECT CallKey, argMax(toNullable(Advantage), (IngestedAt, Policy, Branch)) AS Advantage
    FROM spangrad_internal.trained_calls
    GROUP BY CallKey
) AS a ON a.CallKey = t.CallKey
COMMENT 'Transitions of the newest build of each rollout. Advantage: mean over its tokens of what the newest step that trained the call used; NULL: none did.';

CREATE VIEW IF NOT EXISTS spangrad.drops AS
SELECT * FROM spangrad_internal.drops FINAL
WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
COMMENT 'Drops of the newest build of each rollout.';

CREATE VIEW IF NOT EXISTS spangrad.tool_calls AS
SELECT * FROM spangrad_internal.tool_calls FINAL
WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
COMMENT 'Tool calls of the newest build of each rollout, with latency, failure, reward and the policy call that caused it.';

CREATE VIEW IF NOT EXISTS spangrad.execution AS
SELECT t.RunId AS RunId, t.Mode AS Mode, t.BuildSpec AS BuildSpec, t.GroupId AS GroupId, t.TaskId AS TaskId, t.RolloutId AS RolloutId,
    t.Attempt AS Attempt, t.Timestamp AS Timestamp, 'llm' AS Kind, t.Model AS Name, t.AgentName AS AgentName, t.CallId AS CallId,
    false AS Failed, CAST(NULL, 'Nullable(UInt64)') AS Duration, '' AS Input, '' AS Output, t.PromptIds AS InputIds,
    t.ResponseIds AS OutputIds, r.Reward AS Reward, t.TraceId AS TraceId, t.SpanId AS SpanId
FROM (
    SELECT * FROM spangrad_internal.transitions FINAL
    WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
) AS t
LEFT JOIN (
    SELECT RunId, RolloutId, BuildSpec, CallId, sum(toNullable(Value)) AS Reward
    FROM spangrad.rewards
    WHERE CallId != ''
    GROUP BY RunId, RolloutId, BuildSpec, CallId
) AS r ON r.RunId = t.RunId AND r.RolloutId = t.RolloutId AND r.BuildSpec = t.BuildSpec AND r.CallId = t.CallId
UNION ALL
SELECT RunId, Mode, BuildSpec, GroupId, TaskId, RolloutId, Attempt, Timestamp, 'tool', ToolName, AgentName, CallId,
    Failed, Duration, Arguments, Result, [], [], Reward, TraceId, SpanId
FROM spangrad.tool_calls
COMMENT 'What rollouts did, in order of time: policy calls that may be trained, and tool calls, each with what went in, what came out, and its own reward. Texts of policy calls are in spangrad.call_texts.';

CREATE VIEW IF NOT EXISTS spangrad.call_texts AS
SELECT TraceId, SpanId,
    any(if(ScopeName = 'spangrad.gateway', SpanAttributes['spangrad.request.json'], SpanAttributes['input.value'])) AS Input,
    any(if(ScopeName = 'spangrad.gateway', SpanAttributes['spangrad.response.json'], SpanAttributes['output.value'])) AS Output
FROM otel.otel_traces
GROUP BY TraceId, SpanId
COMMENT 'Texts of spans, each once: of policy calls the whole request and response. Filter by TraceId, which is indexed: a query without that reads every span.';

CREATE VIEW IF NOT EXISTS spangrad.reconcile AS
SELECT
    RunId, max(Mode) AS Mode, BuildSpec, RolloutId, max(Revision) AS Revision,
    sum(Counted) AS Calls, sum(Kept) AS Transitions, sum(Dropped) AS Drops,
    abs(toInt64(Calls) - toInt64(countIf(CallId != '' AND Kept + Dropped > 0)))
        + toInt64(sumIf(Kept + Dropped - 1, CallId != '' AND Kept + Dropped > 0)) AS Unaccounted,
    countIf(Recorded > 0 AND Kept + Dropped = 0) AS Missing
FROM (
    SELECT RunId, max(Mode) AS Mode, BuildSpec, RolloutId, CallId, max(Revision) AS Revision,
        sum(Counted) AS Counted, sum(Kept) AS Kept, sum(Dropped) AS Dropped, max(Recorded) AS Recorded
    FROM (
        SELECT RunId, Mode, BuildSpec, RolloutId, '' AS CallId, Revision, toUInt64(Calls) AS Counted, 0 AS Kept, 0 AS Dropped, 0 AS Recorded
        FROM spangrad.builds
        UNION ALL
        SELECT RunId, Mode, BuildSpec, RolloutId, CallId, Revision, 0, 1, 0, 0 FROM spangrad.transitions
        UNION ALL
        SELECT RunId, Mode, BuildSpec, RolloutId, CallId, Revision, 0, 0, 1, 0 FROM spangrad.drops WHERE CallId != ''
        UNION ALL
        SELECT b.RunId, b.Mode, b.BuildSpec, b.RolloutId, c.CallId, b.Revision, 0, 0, 0, 1
        FROM (
            SELECT if(t.RunId = '' OR (a.RolloutKeySource = 'rollout' AND a.RunId != ''), a.RunId, t.RunId) AS RunId, a.CallId AS CallId,
                if(a.RolloutKeySource = 'rollout' OR t.RolloutId = '', a.RolloutKey, t.RolloutId) AS RolloutId
            FROM (SELECT DISTINCT RunId, RolloutKey, RolloutKeySource, TraceId, CallId FROM spangrad_internal.calls) AS a
            LEFT JOIN spangrad_internal.trace_owners AS t ON a.TraceId = t.TraceId
        ) AS c
        INNER JOIN (
            SELECT RunId, Mode, BuildSpec, RolloutId, Revision,
                min(RunId) OVER (PARTITION BY RolloutId) = max(RunId) OVER (PARTITION BY RolloutId) AS Lone
            FROM spangrad.builds
        ) AS b ON c.RolloutId = b.RolloutId
        WHERE c.RunId = b.RunId OR (c.RunId = '' AND b.Lone)
    )
    GROUP BY RunId, BuildSpec, RolloutId, CallId)
GROUP BY RunId, BuildSpec, RolloutId
COMMENT 'The accounting of calls as a question, a row a rollout and build: each call that the build counted has one row, and so has each that the gateway recorded.';

CREATE VIEW IF NOT EXISTS spangrad.datasets AS SELECT * EXCEPT (DedupRank) FROM spangrad_internal.datasets FINAL
COMMENT 'Names of build specifications and their revisions.';

CREATE VIEW IF NOT EXISTS spangrad.attempts AS
SELECT * EXCEPT (DedupRank) FROM spangrad_internal.attempts FINAL
COMMENT 'Attempts of rollouts by their root spans, built or not: outcome and duration; the last one where Final is true.';

CREATE VIEW IF NOT EXISTS spangrad.rollouts AS
SELECT
    b.RunId AS RunId, b.Mode AS Mode, b.TaskId AS TaskId, b.GroupId AS GroupId, b.GroupSize AS GroupSize, b.RolloutId AS RolloutId,
    b.BuildSpec AS BuildSpec, b.Revision AS Revision, b.Attempt AS Attempt, b.Attempts AS Attempts,
    if(b.Failure = '', 'succeeded', b.Failure) AS Outcome, b.Return AS Return, b.ReturnsByRole AS ReturnsByRole,
    mapFromArrays(arrayMap((name, role) -> if(role = '', name, concat(name, ' of ', role)), b.`RewardTotals.Name`, b.`RewardTotals.Role`),
        b.`RewardTotals.Value`) AS Rewards,
    b.Calls AS Calls, b.Transitions AS Transitions, b.Drops AS Drops, b.InputTokens AS InputTokens, b.OutputTokens AS OutputTokens,
    b.ToolCalls AS ToolCalls, b.FailedToolCalls AS FailedToolCalls, b.AgentNames AS AgentNames, b.Models AS Models,
    b.PolicyVersions AS PolicyVersions, b.StartedAt AS StartedAt, b.Seconds AS Seconds,
    mapFromArrays(b.`StageSeconds.Name`, b.`StageSeconds.Value`) AS StageSeconds,
    t.Trained AS Trained, b.IngestedAt AS BuiltAt
FROM (
    SELECT *, Return, ReturnsByRole FROM spangrad_internal.builds FINAL
    WHERE BuildId IN (SELECT BuildId FROM spangrad_internal.newest_builds)
) AS b
LEFT JOIN (
    SELECT RunId, RolloutId, BuildSpec, groupUniqArray((Policy, Branch, Version)) AS Trained
    FROM spangrad_internal.batches
    GROUP BY RunId, RolloutId, BuildSpec
) AS t ON t.RunId = b.RunId AND t.RolloutId = b.RolloutId AND t.BuildSpec = b.BuildSpec
COMMENT 'Rollouts that were built, a row each and build specification: task, outcome, rewards, tokens, tools, time by stage, and the version that it trained.';

CREATE VIEW IF NOT EXISTS spangrad.steps AS
WITH name -> if(mapContains(Metrics, name), Metrics[name], NULL) AS metric
SELECT Policy, Branch, Version, Parent, RunId, Mode, BatchId, metric('mean_return') AS Return, metric('success') AS Success,
    metric('rollouts') AS Rollouts, metric('transitions') AS Transitions, metric('tokens') AS Tokens,
    metric('staleness_mean') AS Staleness, metric('loss') AS Loss, metric('grad_norm') AS GradNorm,
    mapFilter((name, value) -> startsWith(name, 'seconds_'), Metrics) AS Seconds, Metrics, IngestedAt
FROM spangrad_internal.policy_versions FINAL
WHERE Status = 'committed' AND BatchId != ''
COMMENT 'Training steps: a row each committed version that a batch made, with all metrics of the step. NULL: the step has no such number, as training on files has no return.';

CREATE VIEW IF NOT EXISTS spangrad.policy_versions AS SELECT * FROM spangrad_internal.policy_versions FINAL
COMMENT 'Versions of policies, each once.';

CREATE VIEW IF NOT EXISTS spangrad.trained_calls AS SELECT * FROM spangrad_internal.trained_calls FINAL
COMMENT 'Calls that a committed batch trained, each once: what they were, and the return and the advantage that were used.';

CREATE VIEW IF NOT EXISTS spangrad.batches AS SELECT * FROM spangrad_internal.batches FINAL
COMMENT 'Rollouts of committed batches, each once.';

CREATE VIEW IF NOT EXISTS spangrad.already_trained AS
SELECT
    t.Policy AS Policy, t.Branch AS Branch, t.Version AS Version, t.BatchId AS BatchId, b.RunId AS RunId, b.Mode AS Mode, b.GroupId AS GroupId,
    b.RolloutId AS RolloutId, t.BuildSpec AS TrainedSpec, t.Revision AS TrainedRevision, b.BuildSpec AS BuildSpec, b.Revision AS Revision,
    b.IngestedAt AS BuiltAt
FROM spangrad.builds AS b
INNER JOIN spangrad.batches AS t ON b.RunId = t.RunId AND b.RolloutId = t.RolloutId
WHERE b.BuildSpec != t.BuildSpec OR b.Revision > t.Revision
COMMENT 'Rollouts that a branch has trained and that have another build now: a later revision, or one of another specification. It trains none again.';

-- Not FINAL over the calls: rows of one that was written twice are the same here, and a filter is then read by key.
CREATE VIEW IF NOT EXISTS spangrad.lineage AS
SELECT DISTINCT
    c.Policy AS Policy, c.Branch AS Branch, c.Version AS Version, v.Parent AS Parent, v.ParentBranch AS ParentBranch, v.Checksum AS Checksum,
    v.Path AS Path, c.BatchId AS BatchId, c.GroupId AS GroupId, c.RolloutId AS RolloutId, c.Attempt AS Attempt,
    c.TransitionId AS TransitionId, c.CallId AS CallId, c.TraceId AS TraceId, c.SpanId AS SpanId
FROM spangrad_internal.batch_calls AS c
INNER JOIN (SELECT * FROM spangrad_internal.policy_versions FINAL) AS v
    ON v.Policy = c.Policy AND v.Branch = c.Branch AND v.BatchId = c.BatchId AND v.Version = c.Version
COMMENT 'From a checkpoint to the spans that made it, and back: filter by Policy and Version, by RolloutId, or by SpanId.';
