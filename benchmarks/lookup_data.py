"""A store full of rollouts, made by the engine itself: seeded, in the exporter's column layout, through the schema's views.

In: a number of rollouts. Out: rows of otel.otel_traces and otel.otel_logs, and who is who. Invariant: the same workload gives the
same rows, whatever size the inserts have; rollouts of one training step follow one another.

A rollout is a root, an agent's span, 8 openai-level spans, each with the gateway's call below it, and two tools: 20 spans. Its prompts
grow: each call repeats the prompt and the response before it. Every rollout has a reward as an event on its root, every fourth one
more as a log record. Three of four runs have agents that name their rollout; the agents of the fourth know nothing of us, so that
only root and gateway name it and the rest is found by its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SPANS_A_ROLLOUT = 20
CALLS_A_ROLLOUT = 8
GROUP_SIZE = 8
STEP = 256
"""Rollouts of one training step."""
RUNS = 4
FOREIGN_RUN = RUNS - 1
"""The run whose agents do not name their rollout."""
_FIRST_PROMPT, _RESPONSE, _BETWEEN = 100, 100, 20
_BEGIN = 1_767_225_600
"""2026-01-01, in seconds."""
_ROLLOUTS_AN_INSERT = 2500


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts in the store."""

    rollouts: int
    """A multiple of RUNS * STEP."""
    months: int = 3
    seed: int = 0
    ordered: bool = False
    """True if rollout ids begin with the time of the rollout, like UUIDs of version 7. False: they are random, like version 4."""

    @property
    def seconds_a_rollout(self) -> float:
        """Seconds between the starts of two rollouts."""
        return self.months * 30 * 86_400 / self.rollouts

    def statements(self) -> Iterator[str]:
        """Yield INSERT statements that fill the store."""
        for first in range(0, self.rollouts, _ROLLOUTS_AN_INSERT):
            count = min(_ROLLOUTS_AN_INSERT, self.rollouts - first)
            yield self.traces_sql(first, count)
            yield self.logs_sql(first, count)

    def run_of(self, rollout: int) -> int:
        """Return the run of a rollout; the rollouts of a run are consecutive."""
        return rollout * RUNS // self.rollouts

    def steps(self, run: int) -> list[range]:
        """The training steps of a run, as rollouts."""
        size = self.rollouts // RUNS
        return [range(first, first + STEP) for first in range(run * size, (run + 1) * size - STEP + 1, STEP)]

    def id_sql(self, number: str) -> str:
        """The id of a rollout, as SQL over its number."""
        random = f"lower(hex(MD5(concat('{self.seed}/rollout/', toString({number})))))"
        if not self.ordered:
            return random
        milliseconds = f"toUInt64({_BEGIN * 1000} + {number} * {self.seconds_a_rollout * 1000})"
        return f"concat(lower(substring(hex({milliseconds}), -12)), substring({random}, 13))"

    def trace_sql(self, number: str) -> str:
        """The id of a rollout's trace, as SQL over its number."""
        return f"lower(hex(MD5(concat('{self.seed}/trace/', toString({number})))))"

    def tokens(self, rollouts: int) -> int:
        """Prompt ids in the calls of so many rollouts."""
        return rollouts * sum(_FIRST_PROMPT + turn * (_RESPONSE + _BETWEEN) for turn in range(CALLS_A_ROLLOUT))

    def traces_sql(self, first: int, count: int) -> str:
        """Spans of some rollouts."""
        return _TRACES.format(first=first * SPANS_A_ROLLOUT, rows=count * SPANS_A_ROLLOUT, **self._terms())

    def logs_sql(self, first: int, count: int) -> str:
        """Evaluations that arrive as log records, of some rollouts."""
        return _LOGS.format(first=first, rows=count, **self._terms())

    def _terms(self) -> dict[str, object]:
        return {
            "id": self.id_sql("rollout"),
            "trace": self.trace_sql("rollout"),
            "seed": self.seed,
            "begin": _BEGIN,
            "pace": self.seconds_a_rollout,
            "run_size": self.rollouts // RUNS,
        }


_TRACES = f"""
INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, ResourceAttributes, ScopeName,
    SpanAttributes, Duration, StatusCode, StatusMessage, `Events.Timestamp`, `Events.Name`, `Events.Attributes`)
WITH
    intDiv(number, {SPANS_A_ROLLOUT}) AS rollout,
    number % {SPANS_A_ROLLOUT} AS place,
    multiIf(place = 0, 'root', place = 1, 'agent', place >= 18, 'tool', place % 2 = 0, 'client', 'gateway') AS kind,
    intDiv(place - 2, 2) AS turn,
    {{id}} AS rollout_id,
    {{trace}} AS trace_id,
    (at) -> lower(leftPad(hex(cityHash64('{{seed}}/span', rollout, at)), 16, '0')) AS span_id,
    intDiv(rollout, {{run_size}}) AS run,
    -- Token `position` of the rollout's conversation, frequent ones more often; a prompt is its beginning, a response what follows.
    (position) -> toUInt32(pow(150000, (cityHash64('{{seed}}/token', rollout, position) % 1000000) / 1000000)) AS token,
    {_FIRST_PROMPT} + turn * {_RESPONSE + _BETWEEN} AS prompt_length,
    kind = 'gateway' ? arrayMap(token, range(toUInt64(prompt_length))) : [] AS prompt,
    kind = 'gateway' ? arrayMap(token, range(toUInt64(prompt_length), toUInt64(prompt_length) + {_RESPONSE})) : [] AS response,
    kind = 'gateway' ? arrayMap(one -> toFloat32(-(one % 1000) / 500), response) : [] AS logprobs,
    concat('run-', toString(run)) AS run_id,
    map('spangrad.run.id', run_id, 'spangrad.rollout.mode', 'train', 'spangrad.rollout.id', rollout_id, 'spangrad.rollout.attempt', '0')
        AS context,
    map('spangrad.process.id', concat('process-', toString(run)), 'spangrad.seq', toString(number)) AS agents_own
SELECT
    fromUnixTimestamp64Nano(toInt64(({{begin}} + rollout * {{pace}}) * 1000) * 1000000 + place * 1000000) AS Timestamp,
    trace_id, span_id(place),
    multiIf(place = 0, '', place = 1, span_id(0), kind = 'gateway', span_id(place - 1), span_id(1)),
    transform(kind, ['root', 'agent', 'client', 'gateway'], ['rollout', 'agent', 'ChatCompletion', 'chat policy'], 'search'),
    multiIf(kind = 'gateway', 'Server', 'Internal'),
    multiIf(kind = 'root', 'spangrad-runner', kind = 'gateway', 'spangrad-gateway', 'agent'),
    map('service.name', 'any', 'telemetry.sdk.language', 'python'),
    transform(kind, ['root', 'gateway', 'client'],
        ['spangrad.runner', 'spangrad.gateway', 'openinference.instrumentation.openai'], 'agent'),
    mapConcat(
        multiIf(kind IN ('root', 'gateway'), mapConcat(context, agents_own), run = {FOREIGN_RUN}, map(), mapConcat(context, agents_own)),
        multiIf(
            kind = 'root', map(
                'spangrad.task.id', concat('task-', toString(intDiv(rollout, {GROUP_SIZE}) % 997)),
                'spangrad.group.id', lower(hex(MD5(concat('{{seed}}/group/', toString(intDiv(rollout, {GROUP_SIZE})))))),
                'spangrad.group.size', '{GROUP_SIZE}', 'spangrad.rollout.calls', '{CALLS_A_ROLLOUT}', 'spangrad.rollout.final', 'true'),
            kind = 'agent', map('openinference.span.kind', 'AGENT', 'agent.name', 'researcher', 'input.value', 'What is the capital?'),
            kind = 'client', map('openinference.span.kind', 'LLM', 'llm.model_name', 'policy', 'llm.provider', 'openai',
                'llm.invocation_parameters', '{{{{"temperature": 1.0, "max_tokens": 256, "model": "policy"}}}}',
                'llm.token_count.prompt', toString(prompt_length), 'llm.token_count.completion', '{_RESPONSE}',
                'output.value', repeat('an answer of some length ', 80)),
            kind = 'tool', map('openinference.span.kind', 'TOOL', 'tool.name', 'search', 'input.value', '{{{{"query": "capital"}}}}'),
            map('gen_ai.operation.name', 'chat', 'gen_ai.request.model', 'policy',
                'gen_ai.response.id', concat('chatcmpl-', span_id(place)), 'gen_ai.response.finish_reasons', '["stop"]',
                'gen_ai.usage.input_tokens', toString(prompt_length), 'gen_ai.usage.output_tokens', '{_RESPONSE}',
                'spangrad.policy.name', 'policy', 'spangrad.policy.versions', concat('[[[0,', toString(intDiv(rollout, {STEP})), ']]]'),
                'spangrad.tokenizer.hash', '0123456789abcdef',
                'gen_ai.request.temperature', '1', 'http.response.status_code', '200',
                'spangrad.input.token_ids', base64Encode(reinterpret(prompt, 'String')),
                'spangrad.output.token_ids', base64Encode(reinterpret(response, 'String')),
                'spangrad.output.logprobs', base64Encode(reinterpret(logprobs, 'String'))))),
    1000000 * (1 + place), if(kind = 'tool' AND rollout % 16 = 0, 'Error', 'Ok'), '',
    if(kind = 'root', [Timestamp], []),
    if(kind = 'root', ['gen_ai.evaluation.result'], []),
    if(kind = 'root', [map('gen_ai.evaluation.name', 'reward', 'gen_ai.evaluation.score.value', toString(rollout % 2))], [])
FROM numbers({{first}}, {{rows}})
"""

_LOGS = """
INSERT INTO otel.otel_logs (Timestamp, TraceId, SpanId, ServiceName, LogAttributes, EventName)
WITH number AS rollout, intDiv(rollout, {run_size}) AS run
SELECT
    fromUnixTimestamp64Nano(toInt64(({begin} + rollout * {pace}) * 1000) * 1000000 + 900000000),
    {trace},
    lower(leftPad(hex(cityHash64('{seed}/span', rollout, 0)), 16, '0')),
    'judge',
    map('gen_ai.evaluation.name', 'style', 'gen_ai.evaluation.score.value', '0.5', 'spangrad.run.id', concat('run-', toString(run)),
        'spangrad.rollout.mode', 'train', 'spangrad.rollout.id', {id}, 'spangrad.rollout.attempt', '0'),
    'gen_ai.evaluation.result'
FROM numbers({first}, {rows})
WHERE rollout % 4 = 0
"""
