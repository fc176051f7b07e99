-- What the stages conclude: rewards, transitions, drops, policy versions and the batches that made them.
-- Facts only. Returns, advantages and merged sequences are derived when a batch is made.

CREATE TABLE IF NOT EXISTS otel.rewards (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    CallId String COMMENT 'Empty: the reward is of the whole rollout' CODEC(ZSTD(1)),
    Name LowCardinality(String) CODEC(ZSTD(1)),
    Value Float64 CODEC(ZSTD(1)),
    Source LowCardinality(String) COMMENT 'Precedence: runner, evaluation_event, evaluation_log, span_attribute, sql, air' CODEC(ZSTD(1)),
    RuleHash LowCardinality(String) COMMENT 'Of the rule or query that gave it; empty where there is none' CODEC(ZSTD(1)),
    TraceId String COMMENT 'The span that said so' CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (RunId, RolloutId, Attempt, CallId, Name, Source, RuleHash, TraceId, SpanId)
SETTINGS index_granularity = 1024;

CREATE TABLE IF NOT EXISTS otel.transitions (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) COMMENT 'Hash of the build specification' CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 COMMENT 'Rollouts that share the baseline; 0: not known' CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    Turn UInt32 COMMENT 'Place of the call among the rollout''s policy calls, from 0' CODEC(ZSTD(1)),
    TransitionId String CODEC(ZSTD(1)),
    CallId String CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    Choice UInt16 CODEC(ZSTD(1)),
    Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
    AgentName LowCardinality(String) CODEC(ZSTD(1)),
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'Of the weights that sampled the response' CODEC(ZSTD(1)),
    Model LowCardinality(String) CODEC(ZSTD(1)),
    TokenizerHash LowCardinality(String) CODEC(ZSTD(1)),
    PromptIds Array(UInt32) CODEC(ZSTD(1)),
    ResponseIds Array(UInt32) CODEC(ZSTD(1)),
    Logprobs Array(Float32) CODEC(ZSTD(1)),
    Temperature Float64 CODEC(ZSTD(1)),
    FinishReason LowCardinality(String) CODEC(ZSTD(1)),
    Rewards Nested (
        Name LowCardinality(String),
        Value Float64,
        Source LowCardinality(String)
    ) CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX idx_span SpanId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
PARTITION BY toYYYYMM(Timestamp)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Turn, CallId)
SETTINGS index_granularity = 1024, min_bytes_for_wide_part = 268435456;

CREATE TABLE IF NOT EXISTS otel.drops (
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) CODEC(ZSTD(1)),
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    GroupId String CODEC(ZSTD(1)),
    GroupSize UInt32 CODEC(ZSTD(1)),
    TaskId String CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    Attempt UInt16 CODEC(ZSTD(1)),
    Revision UInt32 CODEC(ZSTD(1)),
    CallId String COMMENT 'Empty: the rollout itself, which had no call to name' CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    Choice UInt16 CODEC(ZSTD(1)),
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Reason LowCardinality(String) CODEC(ZSTD(1)),
    Detail String CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_rollout RolloutId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, CallId)
SETTINGS index_granularity = 1024;

CREATE TABLE IF NOT EXISTS otel.policy_versions (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    Version UInt64 CODEC(ZSTD(1)),
    RunId LowCardinality(String) CODEC(ZSTD(1)),
    Mode LowCardinality(String) COMMENT 'Of the rollouts that trained it' CODEC(ZSTD(1)),
    Parent Nullable(UInt64) COMMENT 'NULL: training began with these weights' CODEC(ZSTD(1)),
    BatchId String COMMENT 'Empty: training began with these weights' CODEC(ZSTD(1)),
    Checksum String CODEC(ZSTD(1)),
    Path String CODEC(ZSTD(1)),
    TokenizerHash LowCardinality(String) CODEC(ZSTD(1)),
    Status LowCardinality(String) COMMENT 'committed or orphaned' CODEC(ZSTD(1)),
    Metrics Map(LowCardinality(String), Float64) COMMENT 'Of the step that made it' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version);

CREATE TABLE IF NOT EXISTS otel.batches (
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
