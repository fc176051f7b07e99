-- What spangrad makes of spans: public tables in `spangrad`, everything else in `spangrad_internal`.

CREATE DATABASE IF NOT EXISTS spangrad;

CREATE DATABASE IF NOT EXISTS spangrad_internal;

-- The typed half: every span and evaluation lean, and every choice of every policy call with its token ids,
-- ordered by rollout so that reading a batch of rollouts never scans.
--
-- A span delivered twice has the same sorting key twice: ReplacingMergeTree keeps the row with the highest
-- DedupRank, that is the first delivery, so that reading the past (IngestedAt <= T) never changes its answer.
-- Read with FINAL, or through the views of 0004.
--
-- Both are compressed as the server compresses by default, with LZ4: reading a batch costs 15 to 30 % less CPU than with ZSTD,
-- for a third more bytes.
--
-- RolloutKey is the best name that the span itself gives for its rollout: ours, else session, conversation, trace.
-- trace_rollouts says which rollout a span belongs to that does not name one.

-- Spans and evaluation results (events or log records) of rollouts, lean: attributes longer than 1 KiB are left out.
CREATE TABLE IF NOT EXISTS spangrad_internal.rollout_spans (
    RunId LowCardinality(String),
    Mode LowCardinality(String),
    RolloutKey String,
    RolloutKeySource LowCardinality(String),
    SessionId String,
    ConversationId String,
    Attempt UInt16,
    Timestamp DateTime64(9) CODEC(Delta(8), Default),
    TraceId String,
    SpanId String,
    EventIndex UInt64 COMMENT 'Of a span 0; tells the evaluations of a span and nanosecond apart',
    RowKind LowCardinality(String),
    ParentSpanId String,
    ProcessId LowCardinality(String),
    Seq UInt64,
    SpanName LowCardinality(String),
    SpanKind LowCardinality(String),
    ServiceName LowCardinality(String),
    ScopeName LowCardinality(String),
    Duration UInt64,
    StatusCode LowCardinality(String),
    StatusMessage String,
    Attributes Map(LowCardinality(String), String),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), Default),
    DedupRank UInt64 DEFAULT 18446744073709551615 - toUInt64(toUnixTimestamp64Micro(IngestedAt)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(DedupRank)
PARTITION BY toYYYYMM(Timestamp)
ORDER BY (RolloutKey, Attempt, Timestamp, TraceId, SpanId, EventIndex)
SETTINGS index_granularity = 1024, min_bytes_for_wide_part = 268435456;

-- A span and the evaluation events on it, in one view, so that an insert makes one part of both: row 0 is the span, row n its n-th event.
CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.rollout_spans_mv TO spangrad_internal.rollout_spans AS
SELECT
    RunId, Mode, RolloutKey, RolloutKeySource, SessionId, ConversationId, Attempt, Timestamp, TraceId, SpanId,
    toUInt64(event) AS EventIndex,
    if(event = 0, 'span', 'evaluation_event') AS RowKind,
    ParentSpanId, ProcessId, Seq,
    if(event = 0, SpanName, 'gen_ai.evaluation.result') AS SpanName,
    SpanKind, ServiceName, ScopeName,
    if(event = 0, Duration, 0) AS Duration,
    StatusCode,
    if(event = 0, StatusMessage, '') AS StatusMessage,
    said AS Attributes
FROM (
    SELECT
        -- A program without our span processors, in any language, names its rollout in OTEL_RESOURCE_ATTRIBUTES.
        SpanAttributes['spangrad.rollout.id'] = '' AND ResourceAttributes['spangrad.rollout.id'] != '' AS by_resource,
        if(by_resource, ResourceAttributes['spangrad.run.id'], SpanAttributes['spangrad.run.id']) AS RunId,
        if(by_resource, ResourceAttributes['spangrad.rollout.mode'], SpanAttributes['spangrad.rollout.mode']) AS Mode,
        if(by_resource, ResourceAttributes['spangrad.rollout.id'], SpanAttributes['spangrad.rollout.id']) AS RolloutId,
        SpanAttributes['session.id'] AS SessionId,
        SpanAttributes['gen_ai.conversation.id'] AS ConversationId,
        multiIf(RolloutId != '', RolloutId, SessionId != '', SessionId, ConversationId != '', ConversationId, TraceId) AS RolloutKey,
        multiIf(RolloutId != '', 'rollout', SessionId != '', 'session', ConversationId != '', 'conversation', 'trace') AS RolloutKeySource,
        toUInt16OrZero(if(by_resource, ResourceAttributes['spangrad.rollout.attempt'], SpanAttributes['spangrad.rollout.attempt'])) AS Attempt,
        Timestamp, TraceId, SpanId, ParentSpanId,
        -- Who counts nothing still has a clock of its own, which '~' tells apart from a process that counts.
        multiIf(SpanAttributes['spangrad.process.id'] != '', SpanAttributes['spangrad.process.id'],
            ResourceAttributes['service.instance.id'] != '', concat('~', ResourceAttributes['service.instance.id']), '') AS ProcessId,
        toUInt64OrZero(SpanAttributes['spangrad.seq']) AS Seq,
        SpanName, SpanKind, ServiceName, ScopeName, Duration, StatusCode,
        substringUTF8(StatusMessage, 1, 1024) AS StatusMessage,
        -- Lean: long values and texts of prompts stay in otel_traces, token ids and logprobs in calls, and what has a column of its own is there.
        mapFilter((k, v) -> length(v) <= 1024 AND NOT startsWith(k, 'llm.input_messages.') AND NOT startsWith(k, 'gen_ai.prompt.') AND k NOT IN (
            'gen_ai.input.messages', 'gen_ai.system_instructions',
            'spangrad.input.token_ids', 'spangrad.output.token_ids', 'spangrad.output.logprobs',
            'spangrad.request.json', 'spangrad.response.json', 'spangrad.run.id', 'spangrad.rollout.mode', 'spangrad.rollout.id',
            'spangrad.rollout.attempt', 'spangrad.process.id', 'spangrad.seq', 'session.id', 'gen_ai.conversation.id'
        ), SpanAttributes) AS lean,
        arrayFilter((event, name) -> name = 'gen_ai.evaluation.result', arrayEnumerate(Events.Name), Events.Name) AS evaluations,
        arrayFilter((attributes, name) -> name = 'gen_ai.evaluation.result', Events.Attributes, Events.Name) AS scores
    FROM otel.otel_traces
)
-- Each row gets what it says itself, and no row what all of them say: a span of thousands of evaluations would need gigabytes.
ARRAY JOIN arrayConcat([0], evaluations) AS event, arrayConcat([lean], scores) AS said;

CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.rollout_evaluation_logs_mv TO spangrad_internal.rollout_spans AS
WITH
    LogAttributes['spangrad.rollout.id'] = '' AND ResourceAttributes['spangrad.rollout.id'] != '' AS by_resource,
    if(by_resource, ResourceAttributes['spangrad.rollout.id'], LogAttributes['spangrad.rollout.id']) AS rollout_id
SELECT
    if(by_resource, ResourceAttributes['spangrad.run.id'], LogAttributes['spangrad.run.id']) AS RunId,
    if(by_resource, ResourceAttributes['spangrad.rollout.mode'], LogAttributes['spangrad.rollout.mode']) AS Mode,
    multiIf(rollout_id != '', rollout_id,
            LogAttributes['session.id'] != '', LogAttributes['session.id'],
            LogAttributes['gen_ai.conversation.id'] != '', LogAttributes['gen_ai.conversation.id'],
            TraceId) AS RolloutKey,
    multiIf(rollout_id != '', 'rollout',
            LogAttributes['session.id'] != '', 'session',
            LogAttributes['gen_ai.conversation.id'] != '', 'conversation',
            'trace') AS RolloutKeySource,
    LogAttributes['session.id'] AS SessionId,
    LogAttributes['gen_ai.conversation.id'] AS ConversationId,
    toUInt16OrZero(if(by_resource, ResourceAttributes['spangrad.rollout.attempt'], LogAttributes['spangrad.rollout.attempt'])) AS Attempt,
    Timestamp, TraceId, SpanId,
    -- Several evaluations may share a span and a nanosecond: their content tells them apart.
    bitOr(cityHash64(mapKeys(LogAttributes), mapValues(LogAttributes)), bitShiftLeft(toUInt64(1), 63)) AS EventIndex,
    'evaluation_log' AS RowKind,
    '' AS ParentSpanId,
    LogAttributes['spangrad.process.id'] AS ProcessId,
    toUInt64OrZero(LogAttributes['spangrad.seq']) AS Seq,
    'gen_ai.evaluation.result' AS SpanName, '' AS SpanKind, ServiceName, ScopeName, 0 AS Duration, '' AS StatusCode,
    '' AS StatusMessage,
    mapFilter((k, v) -> length(v) <= 1024, LogAttributes) AS Attributes
FROM otel.otel_logs
-- Older SDKs name the event in an attribute.
WHERE EventName = 'gen_ai.evaluation.result' OR LogAttributes['event.name'] = 'gen_ai.evaluation.result';

-- Root spans of attempts, narrow: questions about rollouts over time read no other span.
CREATE TABLE IF NOT EXISTS spangrad_internal.attempts (
    RunId LowCardinality(String),
    Mode LowCardinality(String),
    RolloutId String,
    Attempt UInt16,
    Timestamp DateTime64(9) COMMENT 'Start' CODEC(Delta(8), Default),
    Duration UInt64 COMMENT 'Nanoseconds, evaluation included',
    TraceId String,
    SpanId String,
    TaskId String,
    GroupId String,
    GroupSize UInt32,
    Calls Nullable(UInt32) COMMENT 'Policy calls that the gateway counted; NULL: no gateway counted',
    Final Bool COMMENT 'Whether no attempt follows it',
    Failure LowCardinality(String) COMMENT 'Empty: it ended well',
    StatusCode LowCardinality(String),
    StatusMessage String,
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), Default),
    DedupRank UInt64 DEFAULT 18446744073709551615 - toUInt64(toUnixTimestamp64Micro(IngestedAt))
) ENGINE = ReplacingMergeTree(DedupRank)
ORDER BY (RunId, RolloutId, Attempt, Timestamp, TraceId, SpanId)
SETTINGS index_granularity = 1024;

CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.attempts_mv TO spangrad_internal.attempts AS
SELECT
    RunId, Mode, RolloutKey AS RolloutId, Attempt, Timestamp, Duration, TraceId, SpanId,
    Attributes['spangrad.task.id'] AS TaskId,
    Attributes['spangrad.group.id'] AS GroupId,
    toUInt32OrZero(Attributes['spangrad.group.size']) AS GroupSize,
    toUInt32OrNull(Attributes['spangrad.rollout.calls']) AS Calls,
    Attributes['spangrad.rollout.final'] = 'true' AS Final,
    Attributes['spangrad.rollout.failure'] AS Failure,
    StatusCode, StatusMessage, IngestedAt
FROM spangrad_internal.rollout_spans
WHERE SpanName = 'rollout' AND RowKind = 'span' AND RolloutKeySource = 'rollout' AND mapContains(Attributes, 'spangrad.rollout.final');

-- Keys of the spans and evaluations that do not name their rollout, by the trace that may: empty where everybody does.
CREATE TABLE IF NOT EXISTS spangrad_internal.trace_keys (
    TraceId String CODEC(ZSTD(1)),
    RolloutKey String CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (TraceId, RolloutKey)
SETTINGS index_granularity = 128;

CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.trace_keys_mv TO spangrad_internal.trace_keys AS
SELECT DISTINCT TraceId, RolloutKey
FROM spangrad_internal.rollout_spans
WHERE RolloutKeySource != 'rollout' AND TraceId != '';

-- Policy calls that the gateway recorded, a row a choice, with token ids and logprobs as arrays.
CREATE TABLE IF NOT EXISTS spangrad_internal.calls (
    RunId LowCardinality(String),
    Mode LowCardinality(String),
    RolloutKey String,
    RolloutKeySource LowCardinality(String),
    Attempt UInt16,
    Timestamp DateTime64(9) CODEC(Delta(8), Default),
    TraceId String,
    SpanId String,
    ChoiceIndex UInt16,
    CallId String MATERIALIZED lower(hex(substring(SHA256(concat(TraceId, ':', SpanId, ':', toString(ChoiceIndex))), 1, 16))),
    ParentSpanId String,
    ProcessId LowCardinality(String),
    Seq UInt64,
    Duration UInt64,
    Policy LowCardinality(String),
    Versions Nested (
        Start UInt32,
        Version UInt64
    ) COMMENT 'Response token at which each policy version begins; empty: not known',
    Model LowCardinality(String),
    ResponseId String,
    TokenizerHash LowCardinality(String),
    IdsSource LowCardinality(String),
    PromptIds Array(UInt32),
    ResponseIds Array(UInt32),
    Logprobs Array(Float32),
    Temperature Nullable(Float64),
    TopP Nullable(Float64),
    TopK Nullable(Int64),
    MinP Nullable(Float64),
    PresencePenalty Nullable(Float64),
    FrequencyPenalty Nullable(Float64),
    RepetitionPenalty Nullable(Float64),
    Constrained Bool,
    Relaxed Array(LowCardinality(String)) COMMENT 'Names of gateway.relax that changed what the engine was asked',
    Modality LowCardinality(String) COMMENT 'Kinds of content that are not text; empty: text only',
    FinishReason LowCardinality(String),
    ErrorType LowCardinality(String),
    HttpStatus UInt16,
    Aborted Bool,
    Redacted Bool,
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), Default),
    DedupRank UInt64 DEFAULT 18446744073709551615 - toUInt64(toUnixTimestamp64Micro(IngestedAt)),
    INDEX idx_ingested IngestedAt TYPE minmax GRANULARITY 1,
    INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(DedupRank)
PARTITION BY toYYYYMM(Timestamp)
ORDER BY (RolloutKey, Attempt, Timestamp, TraceId, SpanId, ChoiceIndex)
SETTINGS index_granularity = 1024, min_bytes_for_wide_part = 268435456;

-- Whatever a sender puts into these attributes, the view must not fail: a call without sound ids is dropped by the builder, with a reason.
-- What follows from all ids and lengths is computed below, where it is a column: each use of an alias is analysed anew, for every insert.
CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.calls_mv TO spangrad_internal.calls AS
WITH
    -- n choices of p prompts: choice i answers prompt i / (n / p)
    intDiv((choice_index - 1) * length(prompt_lengths), length(response_lengths)) + 1 AS prompt_index,
    arraySum(arraySlice(response_lengths, 1, choice_index - 1)) + 1 AS response_start,
    arraySum(arraySlice(prompt_lengths, 1, prompt_index - 1)) + 1 AS prompt_start
SELECT
    SpanAttributes['spangrad.run.id'] AS RunId,
    SpanAttributes['spangrad.rollout.mode'] AS Mode,
    if(SpanAttributes['spangrad.rollout.id'] != '', SpanAttributes['spangrad.rollout.id'], TraceId) AS RolloutKey,
    if(SpanAttributes['spangrad.rollout.id'] != '', 'rollout', 'trace') AS RolloutKeySource,
    toUInt16OrZero(SpanAttributes['spangrad.rollout.attempt']) AS Attempt,
    Timestamp, TraceId, SpanId,
    toUInt16(choice_index - 1) AS ChoiceIndex,
    ParentSpanId,
    SpanAttributes['spangrad.process.id'] AS ProcessId,
    toUInt64OrZero(SpanAttributes['spangrad.seq']) AS Seq,
    Duration,
    SpanAttributes['spangrad.policy.name'] AS Policy,
    tupleElement(versions[choice_index], 1) AS `Versions.Start`,
    tupleElement(versions[choice_index], 2) AS `Versions.Version`,
    SpanAttributes['gen_ai.request.model'] AS Model,
    SpanAttributes['gen_ai.response.id'] AS ResponseId,
    SpanAttributes['spangrad.tokenizer.hash'] AS TokenizerHash,
    multiIf(NOT sound OR empty(response_ids), 'none', SpanAttributes['spangrad.ids.source'] = 'retokenized', 'retokenized', 'engine') AS IdsSource,
    arraySlice(prompt_ids, prompt_start, if(sound, prompt_lengths[prompt_index], 0)) AS PromptIds,
    arraySlice(response_ids, response_start, if(sound, response_lengths[choice_index], 0)) AS ResponseIds,
    -- Of several choices, logprobs that are not as many as the ids can't be told apart.
    arraySlice(logprobs, response_start,
        if(sound AND (length(response_lengths) = 1 OR length(logprobs) = length(response_ids)), response_lengths[choice_index], 0)) AS Logprobs,
    toFloat64OrNull(SpanAttributes['gen_ai.request.temperature']) AS Temperature,
    toFloat64OrNull(SpanAttributes['gen_ai.request.top_p']) AS TopP,
    toInt64OrNull(SpanAttributes['gen_ai.request.top_k']) AS TopK,
    toFloat64OrNull(SpanAttributes['spangrad.sampling.min_p']) AS MinP,
    toFloat64OrNull(SpanAttributes['gen_ai.request.presence_penalty']) AS PresencePenalty,
    toFloat64OrNull(SpanAttributes['gen_ai.request.frequency_penalty']) AS FrequencyPenalty,
    toFloat64OrNull(SpanAttributes['spangrad.sampling.repetition_penalty']) AS RepetitionPenalty,
    SpanAttributes['spangrad.sampling.constrained'] = 'true' AS Constrained,
    JSONExtract(SpanAttributes['spangrad.request.relaxed'], 'Array(String)') AS Relaxed,
    SpanAttributes['spangrad.modality'] AS Modality,
    finish_reasons[choice_index] AS FinishReason,
    SpanAttributes['error.type'] AS ErrorType,
    toUInt16OrZero(SpanAttributes['http.response.status_code']) AS HttpStatus,
    SpanAttributes['spangrad.aborted'] = 'true' AS Aborted,
    SpanAttributes['spangrad.redacted'] = 'true' AS Redacted
FROM (
    WITH
        tryBase64Decode(SpanAttributes['spangrad.input.token_ids']) AS prompt_bytes,
        reinterpret(if(length(prompt_bytes) % 4 = 0, prompt_bytes, ''), 'Array(UInt32)') AS prompt_ids,
        tryBase64Decode(SpanAttributes['spangrad.output.token_ids']) AS response_bytes,
        reinterpret(if(length(response_bytes) % 4 = 0, response_bytes, ''), 'Array(UInt32)') AS response_ids,
        tryBase64Decode(SpanAttributes['spangrad.output.logprobs']) AS logprob_bytes,
        reinterpret(if(length(logprob_bytes) % 4 = 0, logprob_bytes, ''), 'Array(Float32)') AS logprobs,
        JSONExtract(SpanAttributes['spangrad.input.lengths'], 'Array(UInt32)') AS stated_prompt_lengths,
        JSONExtract(SpanAttributes['spangrad.output.lengths'], 'Array(UInt32)') AS stated_response_lengths,
        JSONExtract(SpanAttributes['gen_ai.response.finish_reasons'], 'Array(String)') AS finish_reasons,
        JSONExtract(SpanAttributes['spangrad.policy.versions'], 'Array(Array(Tuple(UInt32, UInt64)))') AS versions,
        if(empty(stated_prompt_lengths), [toUInt32(length(prompt_ids))], stated_prompt_lengths) AS prompt_lengths,
        if(empty(stated_response_lengths), [toUInt32(length(response_ids))], stated_response_lengths) AS response_lengths,
        -- Lengths that do not add up to the ids, or of more choices than an engine gives, tell nothing: the call has no sound ids.
        length(stated_response_lengths) <= 1024 AND length(stated_response_lengths) * byteSize(SpanAttributes) <= 268435456 AS plausible,
        plausible AND arraySum(prompt_lengths) = length(prompt_ids) AND arraySum(response_lengths) = length(response_ids)
            AND length(response_lengths) % length(prompt_lengths) = 0 AS sound
    SELECT
        Timestamp, TraceId, SpanId, ParentSpanId, Duration, SpanAttributes, prompt_ids, response_ids, logprobs, prompt_lengths, response_lengths,
        plausible, sound, finish_reasons, versions
    FROM otel.otel_traces
    WHERE ScopeName = 'spangrad.gateway'
)
ARRAY JOIN range(1, if(plausible, length(response_lengths), 1) + 1) AS choice_index;

-- Traces, and what their spans name: attempts of rollouts, sessions, conversations. 0004 says what follows for the spans that name no rollout.
-- Of the attempts the least and the greatest are kept: they differ where a trace names several, however many those are.
CREATE TABLE IF NOT EXISTS spangrad_internal.trace_rollouts (
    TraceId String CODEC(ZSTD(1)),
    FirstRolloutId SimpleAggregateFunction(min, Nullable(String)) CODEC(ZSTD(1)),
    LastRolloutId SimpleAggregateFunction(max, Nullable(String)) CODEC(ZSTD(1)),
    FirstAttempt SimpleAggregateFunction(min, Nullable(UInt16)) CODEC(ZSTD(1)),
    LastAttempt SimpleAggregateFunction(max, Nullable(UInt16)) CODEC(ZSTD(1)),
    SessionId SimpleAggregateFunction(max, String) CODEC(ZSTD(1)),
    ConversationId SimpleAggregateFunction(max, String) CODEC(ZSTD(1)),
    RunId SimpleAggregateFunction(max, String) CODEC(ZSTD(1)),
    Mode SimpleAggregateFunction(max, String) CODEC(ZSTD(1)),
    FirstSeen SimpleAggregateFunction(min, DateTime64(9)) CODEC(ZSTD(1)),
    LastSeen SimpleAggregateFunction(max, DateTime64(9)) CODEC(ZSTD(1)),
    IngestedAt SimpleAggregateFunction(max, DateTime64(6)) CODEC(ZSTD(1))
) ENGINE = AggregatingMergeTree
ORDER BY (TraceId)
SETTINGS index_granularity = 128;

-- From the lean rows, which have these attributes as columns: looking for them in the map of each span would cost more than all the rest.
CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.trace_rollouts_mv TO spangrad_internal.trace_rollouts AS
SELECT
    TraceId,
    min(if(RolloutKeySource = 'rollout', RolloutKey, NULL)) AS FirstRolloutId,
    max(if(RolloutKeySource = 'rollout', RolloutKey, NULL)) AS LastRolloutId,
    min(if(RolloutKeySource = 'rollout', s.Attempt, NULL)) AS FirstAttempt,
    max(if(RolloutKeySource = 'rollout', s.Attempt, NULL)) AS LastAttempt,
    max(s.SessionId) AS SessionId,
    max(s.ConversationId) AS ConversationId,
    max(s.RunId) AS RunId,
    max(s.Mode) AS Mode,
    min(Timestamp) AS FirstSeen,
    max(Timestamp) AS LastSeen,
    max(now64(6)) AS IngestedAt
FROM spangrad_internal.rollout_spans AS s
WHERE RowKind = 'span' AND TraceId != ''
GROUP BY TraceId;

-- Where in time a trace lies: the Collector's exporter and Grafana's data source ask under this name.
CREATE VIEW IF NOT EXISTS otel.otel_traces_trace_id_ts AS
SELECT TraceId, toDateTime(min(FirstSeen)) AS Start, toDateTime(max(LastSeen)) AS End
FROM spangrad_internal.trace_rollouts
GROUP BY TraceId;
