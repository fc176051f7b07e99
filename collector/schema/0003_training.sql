-- What the stages conclude: rewards, transitions, drops, policy versions and the batches that made them.
-- Facts only. Returns, advantages and merged sequences are derived when a batch is made.

-- Rewards of rollouts and calls, raw, with name, source and role.
CREATE TABLE IF NOT EXISTS spangrad_internal.rewards (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) COMMENT 'Hash of the build specification' CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    Content UInt64 COMMENT 'Of spangrad_internal.builds: rows of a build that was never concluded are nobody''s' CODEC(ZSTD(1)),
    CallId String COMMENT 'Empty: the reward is of the whole rollout' CODEC(ZSTD(1)),
    Name LowCardinality(String) CODEC(ZSTD(1)),
    Role LowCardinality(String) COMMENT 'Agent or policy that the reward is of; empty: everybody''s' CODEC(ZSTD(1)),
    Value Float64 CODEC(ZSTD(1)),
    Source LowCardinality(String) COMMENT 'Precedence: runner, evaluation_event, evaluation_log, span_attribute, sql, air' CODEC(ZSTD(1)),
    RuleHash LowCardinality(String) COMMENT 'Of the rule or query that gave it; empty where there is none' CODEC(ZSTD(1)),
    TraceId String COMMENT 'The span that said so' CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    BuildId UInt64 MATERIALIZED sipHash64(RunId, RolloutId, BuildSpec, Revision, Content) COMMENT 'As in spangrad_internal.builds' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (RunId, Mode, BuildSpec, RolloutId, Attempt, Revision, Content, CallId, Name, Role, Source, RuleHash, TraceId, SpanId)
SETTINGS index_granularity = 1024;

-- Policy calls that may be trained, with raw rewards, agent, parent call and branch.
CREATE TABLE IF NOT EXISTS spangrad_internal.transitions (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 COMMENT 'Rollouts that share the baseline; 0: not known' CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    Content UInt64 CODEC(ZSTD(1)),
    Turn UInt32 COMMENT 'Place of the call among the rollout''s policy calls, from 0' CODEC(ZSTD(1)),
    TransitionId String CODEC(ZSTD(1)),
    CallId String CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    ChoiceIndex UInt16 CODEC(ZSTD(1)),
    Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
    ParentCallId String COMMENT 'The call that came before this one on its branch; empty: none did' CODEC(ZSTD(1)),
    Branch UInt32 COMMENT 'Of the tree of the rollout''s calls: 0 is the branch of its first call' CODEC(ZSTD(1)),
    AgentName LowCardinality(String) CODEC(ZSTD(1)),
    Components Array(LowCardinality(String)) COMMENT 'Names of the agents, chains and tools around the call, outermost first' CODEC(ZSTD(1)),
    Tools Array(LowCardinality(String)) COMMENT 'Names of the tools that the call caused to run, in order' CODEC(ZSTD(1)),
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'Of the weights that sampled the response''s first token' CODEC(ZSTD(1)),
    Versions Nested (
        Start UInt32,
        Version UInt64
    ) COMMENT 'Response token at which each policy version begins; the first Start is 0' CODEC(ZSTD(1)),
    Model LowCardinality(String) CODEC(ZSTD(1)),
    TokenizerHash LowCardinality(String) CODEC(ZSTD(1)),
    PromptIds Array(UInt32) CODEC(ZSTD(1)),
    ResponseIds Array(UInt32) CODEC(ZSTD(1)),
    Logprobs Array(Float32) CODEC(ZSTD(1)),
    Temperature Float64 CODEC(ZSTD(1)),
    Reshaping LowCardinality(String) COMMENT 'Sampling parameters that reshaped the distribution, such as top_p=0.9; empty: none did' CODEC(ZSTD(1)),
    FinishReason LowCardinality(String) CODEC(ZSTD(1)),
    Rewards Nested (
        Name LowCardinality(String),
        Value Float64,
        Source LowCardinality(String),
        CallId String,
        Role LowCardinality(String),
        Turn UInt32
    ) COMMENT 'CallId: of the call that earned the reward, empty for the whole rollout''s; Role: as in spangrad_internal.rewards; Turn: when it was earned' CODEC(ZSTD(1)),
    CallKey UInt64 MATERIALIZED sipHash64(CallId) CODEC(ZSTD(1)),
    BuildId UInt64 MATERIALIZED sipHash64(RunId, RolloutId, BuildSpec, Revision, Content) COMMENT 'As in spangrad_internal.builds' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX idx_span SpanId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
PARTITION BY toYYYYMM(Timestamp)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, Turn, CallId)
SETTINGS index_granularity = 1024, min_bytes_for_wide_part = 268435456;

-- Policy calls, and rollouts without one, that may not be trained, with the reason.
CREATE TABLE IF NOT EXISTS spangrad_internal.drops (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    Content UInt64 CODEC(ZSTD(1)),
    CallId String COMMENT 'Empty: the rollout itself, which had no call to name' CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    ChoiceIndex UInt16 CODEC(ZSTD(1)),
    Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
    AgentName LowCardinality(String) CODEC(ZSTD(1)),
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Model LowCardinality(String) CODEC(ZSTD(1)),
    Convention LowCardinality(String) COMMENT 'Of the span that describes the call' CODEC(ZSTD(1)),
    Reason LowCardinality(String) CODEC(ZSTD(1)),
    Detail String CODEC(ZSTD(1)),
    BuildId UInt64 MATERIALIZED sipHash64(RunId, RolloutId, BuildSpec, Revision, Content) COMMENT 'As in spangrad_internal.builds' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, CallId)
SETTINGS index_granularity = 1024;

-- Tool calls of every attempt, each once, however many spans record it, with the policy call that caused it.
CREATE TABLE IF NOT EXISTS spangrad_internal.tool_calls (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    Content UInt64 CODEC(ZSTD(1)),
    Position UInt32 COMMENT 'Among the tool calls of its attempt, from 0' CODEC(ZSTD(1)),
    ToolName LowCardinality(String) CODEC(ZSTD(1)),
    ToolCallId String COMMENT 'By which the policy requested it; empty: not recorded' CODEC(ZSTD(1)),
    Arguments String COMMENT 'As text; empty: not recorded, or longer than 1 KiB' CODEC(ZSTD(1)),
    Result String COMMENT 'As text; empty: not recorded, or longer than 1 KiB' CODEC(ZSTD(1)),
    Failed Bool CODEC(ZSTD(1)),
    Error String COMMENT 'Status message of a failed tool call' CODEC(ZSTD(1)),
    Timestamp DateTime64(9) COMMENT 'Start' CODEC(Delta(8), ZSTD(1)),
    Duration UInt64 COMMENT 'Nanoseconds' CODEC(ZSTD(1)),
    AgentName LowCardinality(String) COMMENT 'Agent that ran it' CODEC(ZSTD(1)),
    CallId String COMMENT 'Policy call that caused it; empty: none did' CODEC(ZSTD(1)),
    Requested Bool COMMENT 'Whether that call requested it by its id; else it is the call that came before' CODEC(ZSTD(1)),
    Reward Nullable(Float64) COMMENT 'Sum of the rewards that its spans gave; NULL: they gave none' CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    BuildId UInt64 MATERIALIZED sipHash64(RunId, RolloutId, BuildSpec, Revision, Content) COMMENT 'As in spangrad_internal.builds' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, Position)
SETTINGS index_granularity = 1024;

-- Written last, when all rewards, transitions, drops and tool calls of the revision are there: what has no row here does not exist for any reader.
CREATE TABLE IF NOT EXISTS spangrad_internal.builds (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 COMMENT 'That counts' CODEC(ZSTD(1)),
    Revision UInt32 COMMENT '0, 1, ...: late spans and rewards make a new one' CODEC(ZSTD(1)),
    Content UInt64 COMMENT 'Hash of what was concluded; the same again makes no new revision' CODEC(ZSTD(1)),
    Calls UInt32 COMMENT 'Policy calls of all attempts, a choice each: transitions and drops that name a call' CODEC(ZSTD(1)),
    Transitions UInt32 CODEC(ZSTD(1)),
    Drops UInt32 COMMENT 'With the one of a rollout that has no calls' CODEC(ZSTD(1)),
    Rewards UInt32 COMMENT 'Entries of Rewards on the transitions' CODEC(ZSTD(1)),
    InputTokens UInt64 COMMENT 'Prompt tokens of the transitions' CODEC(ZSTD(1)),
    OutputTokens UInt64 COMMENT 'Response tokens of the transitions' CODEC(ZSTD(1)),
    ToolCalls UInt32 COMMENT 'Tool calls of all attempts' CODEC(ZSTD(1)),
    FailedToolCalls UInt32 CODEC(ZSTD(1)),
    AgentNames Array(LowCardinality(String)) COMMENT 'Of the transitions' CODEC(ZSTD(1)),
    Models Array(LowCardinality(String)) COMMENT 'Of the transitions' CODEC(ZSTD(1)),
    PolicyVersions Array(UInt64) COMMENT 'That sampled tokens of the transitions' CODEC(ZSTD(1)),
    RewardTotals Nested (
        Name LowCardinality(String),
        Role LowCardinality(String),
        Value Float64
    ) COMMENT 'Sums of the rewards of the rollout and its calls, by name and role (empty: everybody''s)' CODEC(ZSTD(1)),
    ReturnsByRole Map(String, Float64) MATERIALIZED CAST(arrayMap(
        role -> (role, arraySum(arrayMap((value, of) -> if(of = '' OR of = role, value, 0), `RewardTotals.Value`, `RewardTotals.Role`))),
        arraySort(arrayDistinct(arrayFilter(role -> role != '', CAST(`RewardTotals.Role`, 'Array(String)'))))), 'Map(String, Float64)')
        COMMENT 'Of each role that a reward names: its rewards and everybody''s' CODEC(ZSTD(1)),
    Return Nullable(Float64) MATERIALIZED if(
        length(ReturnsByRole) > 1 OR (Transitions = 0 AND empty(`RewardTotals.Value`)), NULL, arraySum(`RewardTotals.Value`))
        COMMENT 'Sum of the rewards; NULL: there is neither a reward nor a transition, or they name several roles, whose rewards are never added up' CODEC(ZSTD(1)),
    Attempts UInt16 COMMENT 'Of which a root span arrived; 1 where none did' CODEC(ZSTD(1)),
    StartedAt DateTime64(9) COMMENT 'Begin of the last attempt; 1970: no root span arrived' CODEC(Delta(8), ZSTD(1)),
    Seconds Float64 COMMENT 'Duration of the last attempt' CODEC(ZSTD(1)),
    StageSeconds Nested (
        Name LowCardinality(String),
        Value Float64
    ) COMMENT 'Durations of the stages of its attempts (init, run, evaluate), summed' CODEC(ZSTD(1)),
    Failure LowCardinality(String) COMMENT 'Of the attempt that counts; empty: it ended well' CODEC(ZSTD(1)),
    Watermark DateTime64(6) COMMENT 'Arrival of the newest span that was read' CODEC(ZSTD(1)),
    RowsRead UInt64 COMMENT 'Of spangrad_internal.rollout_spans: a row that is dated before the watermark may be seen after it' CODEC(ZSTD(1)),
    Builder LowCardinality(String) CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    DedupRank UInt64 DEFAULT 18446744073709551615 - toUInt64(toUnixTimestamp64Micro(IngestedAt)) CODEC(ZSTD(1)),
    BuildId UInt64 MATERIALIZED sipHash64(RunId, RolloutId, BuildSpec, Revision, Content)
        COMMENT 'Of this revision: its rows of other tables have the same, so that a reader selects them by one number' CODEC(ZSTD(1)),
    Precedence UInt256 MATERIALIZED bitOr(bitShiftLeft(toUInt256(Revision), 128), bitOr(
        bitShiftLeft(toUInt256(bitNot(toUInt64(toUnixTimestamp64Micro(IngestedAt)))), 64), toUInt256(bitNot(Content))))
        COMMENT 'The greatest counts of a rollout''s: the newest revision, and of two builders that made the same one at once the first' CODEC(ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(DedupRank)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Revision, Content)
SETTINGS index_granularity = 1024;

-- Who builds what, so that several builders share the work. A claim that is older than the lease binds nobody.
CREATE TABLE IF NOT EXISTS spangrad_internal.claims (
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Builder LowCardinality(String) CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (BuildSpec, RunId, RolloutId, Builder)
TTL toDateTime(IngestedAt) + INTERVAL 1 DAY
SETTINGS index_granularity = 1024;

-- Names of build specifications: NAME@REVISION. Another specification under the same name is its next revision.
CREATE TABLE IF NOT EXISTS spangrad_internal.datasets (
    Name LowCardinality(String) CODEC(ZSTD(1)),
    Revision UInt32 COMMENT '1, 2, ...' CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    Settings String COMMENT 'What decides a build''s result, as JSON' CODEC(ZSTD(1)),
    Reason String COMMENT 'Why there is a new revision' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    DedupRank UInt64 DEFAULT 18446744073709551615 - toUInt64(toUnixTimestamp64Micro(IngestedAt)) CODEC(ZSTD(1))
) ENGINE = ReplacingMergeTree(DedupRank)
ORDER BY (Name, Revision);

-- Versions: parent and the parent's branch, batch, checksum, path, and the metrics of the step.
CREATE TABLE IF NOT EXISTS spangrad_internal.policy_versions (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    Version UInt64 CODEC(ZSTD(1)),
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) COMMENT 'Of the rollouts that trained it' CODEC(ZSTD(1)),
    Parent Nullable(UInt64) COMMENT 'NULL: training began with these weights' CODEC(ZSTD(1)),
    ParentBranch LowCardinality(String) COMMENT 'Of the parent: of the first version of a branch, the one that it comes from' CODEC(ZSTD(1)),
    BatchId String COMMENT 'Empty: training began with these weights' CODEC(ZSTD(1)),
    Checksum String CODEC(ZSTD(1)),
    Path String CODEC(ZSTD(1)),
    TokenizerHash LowCardinality(String) CODEC(ZSTD(1)),
    Status LowCardinality(String) COMMENT 'committed or orphaned' CODEC(ZSTD(1)),
    Metrics Map(LowCardinality(String), Float64) COMMENT 'Of the step that made it' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version);

-- Calls that a committed batch trained, with the return and the advantage that were used.
CREATE TABLE IF NOT EXISTS spangrad_internal.trained_calls (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    BatchId String CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'That the batch made' CODEC(ZSTD(1)),
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    Revision UInt32 COMMENT 'Of the rollout that was trained' CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Turn UInt32 CODEC(ZSTD(1)),
    TransitionId String CODEC(ZSTD(1)),
    CallId String CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    AgentName LowCardinality(String) CODEC(ZSTD(1)),
    Tools Array(LowCardinality(String)) COMMENT 'Names of the tools that the call caused to run, in order' CODEC(ZSTD(1)),
    SampledVersions Array(UInt64) COMMENT 'Behaviour versions of the response''s tokens, in order' CODEC(ZSTD(1)),
    Staleness Nullable(UInt32) COMMENT 'Committed versions of the branch between the one that sampled the first token and the one that was trained; NULL: the branch does not have it' CODEC(ZSTD(1)),
    InputTokens UInt32 CODEC(ZSTD(1)),
    OutputTokens UInt32 COMMENT 'Trained tokens: those of the response' CODEC(ZSTD(1)),
    FinishReason LowCardinality(String) CODEC(ZSTD(1)),
    Reward Float64 COMMENT 'Sum of the raw rewards that the transition carries' CODEC(ZSTD(1)),
    Return Float64 COMMENT 'Of its rollout: the weighted sum of all its rewards' CODEC(ZSTD(1)),
    Advantage Float32 COMMENT 'Mean over the trained tokens of the advantage that the loss used; all of them have the same, unless the estimator gives each token its own' CODEC(ZSTD(1)),
    CallKey UInt64 MATERIALIZED sipHash64(CallId) CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version, BatchId, RunId, GroupId, RolloutId, Attempt, CallId)
SETTINGS index_granularity = 1024;

-- Rollouts that a committed batch used, or that rows of its files came from.
CREATE TABLE IF NOT EXISTS spangrad_internal.batches (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    BatchId String CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'That the batch made' CODEC(ZSTD(1)),
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version, BatchId, RunId, GroupId, RolloutId, Attempt)
SETTINGS index_granularity = 1024;

-- Calls of the rollouts of committed batches, narrow and ordered by version: copied from their transitions when the batch arrives.
CREATE TABLE IF NOT EXISTS spangrad_internal.batch_calls (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    BatchId String CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'That the batch made' CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    TransitionId String CODEC(ZSTD(1)),
    CallId String CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX idx_span SpanId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version, BatchId, GroupId, RolloutId, Attempt, TransitionId, CallId)
SETTINGS index_granularity = 1024;

-- A batch is inserted after its rollouts were built, and transitions of a revision never change. In a materialized view, `batches` is what is
-- inserted, also in IN: builds and transitions are read by the keys of its rollouts, not joined whole at each question. Of two builders that
-- made the same revision at once, the transitions of the first count.
CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.batch_calls_mv TO spangrad_internal.batch_calls AS
SELECT DISTINCT
    r.Policy AS Policy, r.Branch AS Branch, r.BatchId AS BatchId, r.Version AS Version, r.GroupId AS GroupId, r.RolloutId AS RolloutId,
    r.Attempt AS Attempt, t.TransitionId AS TransitionId, t.CallId AS CallId, t.TraceId AS TraceId, t.SpanId AS SpanId
FROM spangrad_internal.batches AS r
INNER JOIN (
    SELECT RunId, BuildSpec, RolloutId, Attempt, Revision, Policy, TransitionId, CallId, TraceId, SpanId FROM spangrad_internal.transitions
    WHERE (RunId, Mode, BuildSpec, GroupId, RolloutId) IN (SELECT RunId, Mode, BuildSpec, GroupId, RolloutId FROM spangrad_internal.batches)
        AND BuildId IN (
            SELECT argMax(BuildId, Precedence) FROM spangrad_internal.builds
            WHERE (RunId, Mode, BuildSpec, GroupId, RolloutId) IN (SELECT RunId, Mode, BuildSpec, GroupId, RolloutId FROM spangrad_internal.batches)
            GROUP BY RunId, RolloutId, BuildSpec, Revision)
) AS t ON t.RunId = r.RunId AND t.RolloutId = r.RolloutId AND t.Attempt = r.Attempt AND t.BuildSpec = r.BuildSpec
    AND t.Revision = r.Revision AND t.Policy = r.Policy;
