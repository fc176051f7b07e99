-- What people and dashboards read: each counts a span, a call, a conclusion once, however often it was delivered.

CREATE VIEW IF NOT EXISTS otel.v_spans AS SELECT * FROM otel.rollout_spans FINAL WHERE RowKind = 'span';

-- Every span with the rollout that it belongs to: the one that it names itself, else the one that any span of its trace names, else
-- its session, its conversation, its trace. So an attribute on the root alone is enough.
CREATE VIEW IF NOT EXISTS otel.v_rollout_spans AS
SELECT
    multiIf(
        s.RolloutKeySource = 'rollout', s.RolloutKey,
        t.RolloutId != '', t.RolloutId,
        s.SessionId != '', s.SessionId,
        t.SessionId != '', t.SessionId,
        s.ConversationId != '', s.ConversationId,
        t.ConversationId != '', t.ConversationId,
        s.TraceId) AS RolloutId,
    if(s.RunId != '', s.RunId, t.RunId) AS RunId,
    if(s.Mode != '', s.Mode, t.Mode) AS Mode,
    if(s.RolloutKeySource = 'rollout', s.Attempt, t.Attempt) AS Attempt,
    s.Timestamp AS Timestamp, s.TraceId AS TraceId, s.SpanId AS SpanId, s.Choice AS Choice, s.RowKind AS RowKind, s.ParentSpanId AS ParentSpanId,
    s.ProcessId AS ProcessId, s.Seq AS Seq, s.SpanName AS SpanName, s.SpanKind AS SpanKind, s.ServiceName AS ServiceName, s.ScopeName AS ScopeName,
    s.Duration AS Duration, s.StatusCode AS StatusCode, s.StatusMessage AS StatusMessage, s.Attributes AS Attributes, s.IngestedAt AS IngestedAt
FROM otel.rollout_spans AS s FINAL
LEFT JOIN (
    SELECT TraceId, max(RolloutId) AS RolloutId, max(SessionId) AS SessionId, max(ConversationId) AS ConversationId, max(RunId) AS RunId,
        max(Mode) AS Mode, max(Attempt) AS Attempt
    FROM otel.trace_rollouts
    GROUP BY TraceId
) AS t ON s.TraceId = t.TraceId;

CREATE VIEW IF NOT EXISTS otel.v_calls AS SELECT *, CallId FROM otel.calls FINAL;

CREATE VIEW IF NOT EXISTS otel.v_rewards AS SELECT * FROM otel.rewards FINAL;

-- The newest revision of each rollout, whether it left transitions, drops or both.
CREATE VIEW IF NOT EXISTS otel.v_builds AS
SELECT RunId, Mode, BuildSpec, GroupId, any(GroupSize) AS GroupSize, TaskId, RolloutId, Attempt, max(Revision) AS Revision,
    min(IngestedAt) AS FirstBuiltAt
FROM (
    SELECT RunId, Mode, BuildSpec, GroupId, GroupSize, TaskId, RolloutId, Attempt, Revision, IngestedAt FROM otel.transitions
    UNION ALL
    SELECT RunId, Mode, BuildSpec, GroupId, GroupSize, TaskId, RolloutId, Attempt, Revision, IngestedAt FROM otel.drops)
GROUP BY RunId, Mode, BuildSpec, GroupId, TaskId, RolloutId, Attempt;

CREATE VIEW IF NOT EXISTS otel.v_transitions AS
SELECT * FROM otel.transitions FINAL
WHERE (RunId, RolloutId, Attempt, BuildSpec, Revision) IN (SELECT RunId, RolloutId, Attempt, BuildSpec, Revision FROM otel.v_builds);

CREATE VIEW IF NOT EXISTS otel.v_drops AS
SELECT * FROM otel.drops FINAL
WHERE (RunId, RolloutId, Attempt, BuildSpec, Revision) IN (SELECT RunId, RolloutId, Attempt, BuildSpec, Revision FROM otel.v_builds);

CREATE VIEW IF NOT EXISTS otel.v_rollouts AS
SELECT
    RunId, Mode, RolloutKey AS RolloutId, Attempt, Timestamp, Duration, TraceId, SpanId,
    Attributes['spangrad.task.id'] AS TaskId,
    Attributes['spangrad.group.id'] AS GroupId,
    toUInt32OrZero(Attributes['spangrad.group.size']) AS GroupSize,
    toUInt32OrNull(Attributes['spangrad.rollout.calls']) AS Calls,
    Attributes['spangrad.rollout.final'] = 'true' AS Final,
    Attributes['spangrad.rollout.failure'] AS Failure,
    StatusCode, StatusMessage, IngestedAt
FROM otel.rollout_spans FINAL
WHERE RowKind = 'span' AND SpanName = 'rollout' AND RolloutKeySource = 'rollout' AND mapContains(Attributes, 'spangrad.rollout.final');

CREATE VIEW IF NOT EXISTS otel.v_policy_versions AS SELECT * FROM otel.policy_versions FINAL;

CREATE VIEW IF NOT EXISTS otel.v_batches AS SELECT * FROM otel.batches FINAL;

-- From a checkpoint to the spans that made it, and back: filter by Policy and Version, or by SpanId.
CREATE VIEW IF NOT EXISTS otel.v_lineage AS
SELECT
    v.Policy AS Policy, v.Branch AS Branch, v.Version AS Version, v.Parent AS Parent, v.Checksum AS Checksum, v.Path AS Path,
    b.BatchId AS BatchId, b.GroupId AS GroupId, b.RolloutId AS RolloutId, b.Attempt AS Attempt,
    t.TransitionId AS TransitionId, t.CallId AS CallId, t.TraceId AS TraceId, t.SpanId AS SpanId
FROM otel.policy_versions AS v FINAL
INNER JOIN otel.batches AS b FINAL ON v.Policy = b.Policy AND v.Branch = b.Branch AND v.BatchId = b.BatchId AND v.Version = b.Version
INNER JOIN otel.transitions AS t FINAL ON t.RunId = b.RunId AND t.RolloutId = b.RolloutId AND t.Attempt = b.Attempt AND t.BuildSpec = b.BuildSpec AND t.Revision = b.Revision
    AND t.Policy = v.Policy;
