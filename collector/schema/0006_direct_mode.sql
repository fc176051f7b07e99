-- Direct mode: calls of agents that talk to an engine of ours directly, from their own clients' spans.
--
-- The engine's middleware adds the field `spangrad` to its answers, and the span keeps the answer in output.value. The gateway takes that
-- field out again, so that a call which it recorded is never here a second time. Whatever a sender writes there, the view must not fail:
-- what cannot be read, or holds more choices than an engine gives, is left out.
--
-- Two steps, because an insert pays for planning each view, whether its rows concern it or not: the first is all that most inserts pay.

-- Nothing: answers of direct mode pass through it on their way to calls.
CREATE TABLE IF NOT EXISTS spangrad_internal.direct_answers (
    Timestamp DateTime64(9),
    TraceId String,
    SpanId String,
    ParentSpanId String,
    Duration UInt64,
    SpanAttributes Map(LowCardinality(String), String)
) ENGINE = Null;

CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.direct_answers_mv TO spangrad_internal.direct_answers AS
SELECT Timestamp, TraceId, SpanId, ParentSpanId, Duration, SpanAttributes
FROM otel.otel_traces
WHERE ScopeName IN ('openinference.instrumentation.openai', 'openinference.instrumentation.anthropic')
    AND SpanAttributes['openinference.span.kind'] = 'LLM' AND StatusCode != 'Error'
    AND position(SpanAttributes['output.value'], '"spangrad"') > 0;

CREATE MATERIALIZED VIEW IF NOT EXISTS spangrad_internal.plain_calls_mv TO spangrad_internal.calls AS
WITH
    -- Types of the parts of prompt and answer, by the instrumentation's own attributes and in the JSON of request and answer.
    arrayConcat(
        mapValues(mapFilter((name, value) -> endsWith(name, '.message_content.type'), SpanAttributes)),
        extractAll(SpanAttributes['input.value'], '"type"\\s*:\\s*"([a-z_]+)"'),
        extractAll(SpanAttributes['output.value'], '"type"\\s*:\\s*"([a-z_]+)"')
    ) AS part_types,
    -- Kinds of content that are not text.
    arrayDistinct(arrayFilter(kind -> kind != '', arrayMap(type -> transform(
        type,
        ['image', 'image_url', 'input_image', 'image_generation_call', 'computer_screenshot', 'audio', 'audio_url', 'input_audio',
            'output_audio', 'video', 'video_url', 'input_video', 'file', 'input_file', 'document'],
        ['image', 'image', 'image', 'image', 'image', 'audio', 'audio', 'audio', 'audio', 'video', 'video', 'video', 'file', 'file', 'file'],
        ''
    ), part_types))) AS kinds,
    answer.spangrad.generations AS generations,
    length(answer.choices) + length(generations) AS many,
    -- Chats and completions have choices; of Responses and messages the engine tells each time that it sampled.
    multiIf(
        many > 1024 OR many * byteSize(SpanAttributes) > 268435456, [],
        notEmpty(answer.choices), arrayMap(one -> (
            one.index,
            if(empty(one.prompt_token_ids), answer.prompt_token_ids, one.prompt_token_ids),
            one.token_ids,
            if(empty(one.logprobs.content), one.logprobs.token_logprobs, one.logprobs.content.logprob),
            one.finish_reason
        ), answer.choices),
        arrayMap((one, place) -> (
            toUInt16(place - 1), one.prompt_token_ids, one.token_ids, one.logprobs, one.finish_reason
        ), generations, arrayEnumerate(generations))
    ) AS choices
SELECT
    SpanAttributes['spangrad.run.id'] AS RunId,
    SpanAttributes['spangrad.rollout.mode'] AS Mode,
    if(SpanAttributes['spangrad.rollout.id'] != '', SpanAttributes['spangrad.rollout.id'], TraceId) AS RolloutKey,
    if(SpanAttributes['spangrad.rollout.id'] != '', 'rollout', 'trace') AS RolloutKeySource,
    toUInt16OrZero(SpanAttributes['spangrad.rollout.attempt']) AS Attempt,
    Timestamp, TraceId, SpanId,
    choice.1 AS Choice,
    ParentSpanId,
    SpanAttributes['spangrad.process.id'] AS ProcessId,
    toUInt64OrZero(SpanAttributes['spangrad.seq']) AS Seq,
    Duration,
    answer.spangrad.policy AS Policy,
    tupleElement(answer.spangrad.versions[choice.1 + 1], 1) AS `Versions.Start`,
    tupleElement(answer.spangrad.versions[choice.1 + 1], 2) AS `Versions.Version`,
    answer.model AS Model, answer.id AS ResponseId, answer.spangrad.tokenizer_hash AS TokenizerHash,
    'agent' AS IdsSource,
    choice.2 AS PromptIds,
    choice.3 AS ResponseIds,
    choice.4 AS Logprobs,
    -- As the engine says, its defaults applied: what the client asked for does not tell all of it.
    answer.spangrad.sampling.temperature AS Temperature, answer.spangrad.sampling.top_p AS TopP, answer.spangrad.sampling.top_k AS TopK,
    answer.spangrad.sampling.min_p AS MinP, answer.spangrad.sampling.presence_penalty AS PresencePenalty,
    answer.spangrad.sampling.frequency_penalty AS FrequencyPenalty, answer.spangrad.sampling.repetition_penalty AS RepetitionPenalty,
    answer.spangrad.sampling.constrained AS Constrained,
    arrayStringConcat(arraySort(kinds), ',') AS Modality,
    choice.5 AS FinishReason,
    choice.5 = '' AS Aborted
FROM (
    SELECT
        *,
        JSONExtract(SpanAttributes['output.value'], 'Tuple(
            id String, model String, prompt_token_ids Array(UInt32),
            choices Array(Tuple(
                index UInt16, finish_reason String, token_ids Array(UInt32), prompt_token_ids Array(UInt32),
                logprobs Tuple(content Array(Tuple(logprob Float32)), token_logprobs Array(Float32)))),
            spangrad Tuple(
                policy String, versions Array(Array(Tuple(UInt32, UInt64))), tokenizer_hash String,
                sampling Tuple(
                    temperature Nullable(Float64), top_p Nullable(Float64), top_k Nullable(Int64), min_p Nullable(Float64),
                    presence_penalty Nullable(Float64), frequency_penalty Nullable(Float64), repetition_penalty Nullable(Float64),
                    constrained Bool),
                generations Array(Tuple(
                    prompt_token_ids Array(UInt32), token_ids Array(UInt32), logprobs Array(Float32), finish_reason String))))') AS answer
    FROM spangrad_internal.direct_answers
)
ARRAY JOIN choices AS choice;
