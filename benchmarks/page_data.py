"""A store as the page reads it after weeks of training: rollouts with their builds, batches, versions and trained calls.

In: a number of rollouts. Out: statements that fill a store. Invariant: the same workload gives the same rows; half of the rollouts, those
of the first and the last run, have spans, and those of the first run have transitions as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.lookup_data import CALLS_A_ROLLOUT, GROUP_SIZE, RUNS, STEP, Workload

POLICY, BRANCH, SPEC = "policy", "main", "0123456789abcdef"
SPANS_A_STEP = 6
"""Spans of a training step: its own, and one each stage."""
LONG_BRANCH, LONG_STEPS = "long", 20_000
"""Another branch of the policy, and its steps."""
TASKS = 997
HELD_OUT_RUN = 2
"""The run whose rollouts count as held-out ones; it has no spans."""
TASKS_AGAIN = TASKS * GROUP_SIZE // STEP
"""Versions after which most tasks of a version come again."""
_ROLLOUTS_AN_INSERT = 2500
_PARTS = 32
"""Statements over which transitions are spread: the store bounds the memory of each."""
LONG_ROLLOUT = "long-rollout"
LONG_CALLS, LONG_TOKENS = 200, 1000
"""Calls of the long rollout, and the tokens of each."""


@dataclass(frozen=True, slots=True)
class PageWorkload:
    """Rollouts in the store of a page."""

    spans: Workload

    @property
    def rollouts(self) -> int:
        """Number of rollouts, all of which are built."""
        return self.spans.rollouts

    @property
    def versions(self) -> int:
        """Number of committed versions, each trained on a step's rollouts."""
        return self.rollouts // STEP

    def statements(self) -> Iterator[str]:
        """Yield INSERT statements that fill the store."""
        run_size = self.rollouts // RUNS
        for run in (0, RUNS - 1):
            for first in range(run * run_size, (run + 1) * run_size, _ROLLOUTS_AN_INSERT):
                count = min(_ROLLOUTS_AN_INSERT, (run + 1) * run_size - first)
                yield self.spans.traces_sql(first, count)
                yield self.spans.logs_sql(first, count)
        transitions = (_TRANSITIONS.replace("{{part}}", str(part)) for part in range(_PARTS))
        for statement in (_BUILDS, _BATCHES, _VERSIONS, _LONG_BRANCH, _STEPS, *transitions, _TRAINED, _TOOLS, _REWARDS, _DATASET, *_LONG):
            yield statement.format(**self._terms())

    def _terms(self) -> dict[str, object]:
        begin = 1_767_225_600
        return {
            "id": self.spans.id_sql("rollout"),
            "seed": self.spans.seed,
            "begin": begin,
            "pace": self.spans.seconds_a_rollout,
            "run_size": self.rollouts // RUNS,
            "rollouts": self.rollouts,
            "versions": self.versions,
        }


_OF_ROLLOUT = f"""
    concat('run-', toString(intDiv(rollout, {{run_size}}))) AS RunId,
    if(intDiv(rollout, {{run_size}}) = {HELD_OUT_RUN}, 'validate', 'train') AS Mode, '{SPEC}' AS BuildSpec,
    lower(hex(MD5(concat('{{seed}}/group/', toString(intDiv(rollout, {GROUP_SIZE})))))) AS GroupId,
    {{id}} AS RolloutId, 0 AS Attempt, 0 AS Revision"""
_BUILDS = f"""
INSERT INTO spangrad_internal.builds (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, GroupSize, TaskId, Content, Calls,
    Transitions, Drops, Rewards, InputTokens, OutputTokens, ToolCalls, FailedToolCalls, AgentNames, Models, PolicyVersions,
    `RewardTotals.Name`, `RewardTotals.Value`, Attempts, StartedAt, Seconds, `StageSeconds.Name`, `StageSeconds.Value`, Failure, Watermark,
    RowsRead, Builder, IngestedAt)
WITH number AS rollout, cityHash64('{{seed}}/build', rollout) AS chance
SELECT {_OF_ROLLOUT},
    {GROUP_SIZE}, concat('task-', toString(intDiv(rollout, {GROUP_SIZE}) % {TASKS})), 1, {CALLS_A_ROLLOUT}, {CALLS_A_ROLLOUT} - chance % 2,
    chance % 2, 2, 4160, 800, 2, rollout % 16 = 0, [if(chance % 3 = 0, 'planner', 'researcher')], ['policy'],
    [intDiv(rollout, {STEP})], ['reward', 'style'], [(chance % 101) / 100, 0.5], 1,
    fromUnixTimestamp64Nano(toInt64(({{begin}} + rollout * {{pace}}) * 1000) * 1000000), 20 + chance % 40, ['init', 'run', 'evaluate'],
    [1, 18 + chance % 40, 1], if(chance % 50 = 0, 'timeout', ''), now64(6), 30, 'benchmark',
    fromUnixTimestamp64Micro(toInt64(({{begin}} + 60 + rollout * {{pace}}) * 1000) * 1000)
FROM numbers({{rollouts}})
"""
_BATCHES = f"""
INSERT INTO spangrad_internal.batches (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Policy, Branch, BatchId, Version)
WITH number AS rollout
SELECT {_OF_ROLLOUT}, '{POLICY}', '{BRANCH}', concat('batch-', toString(intDiv(rollout, {STEP}) + 1)), intDiv(rollout, {STEP}) + 1
FROM numbers({{rollouts}})
"""
_VERSIONS = f"""
INSERT INTO spangrad_internal.policy_versions (Policy, Branch, Version, RunId, Mode, Parent, ParentBranch, BatchId, Checksum, Path,
    TokenizerHash, Status, Metrics)
SELECT '{POLICY}', '{BRANCH}', number, concat('run-', toString(intDiv(number * {STEP}, {{run_size}}))), 'train',
    if(number = 0, NULL, number - 1), '{BRANCH}', if(number = 0, '', concat('batch-', toString(number))), hex(MD5(toString(number))),
    concat('/checkpoints/', toString(number)), '0123456789abcdef', 'committed',
    if(number = 0, map(), map('mean_return', 0.2 + 0.6 * number / {{versions}} + (cityHash64(number) % 100) / 1000, 'success',
        0.1 + 0.8 * number / {{versions}}, 'rollouts', {STEP}, 'transitions', {STEP * CALLS_A_ROLLOUT}, 'tokens', 1270000,
        'staleness_mean', (number % 3) / 2, 'loss', 0.01, 'grad_norm', 0.3 + (number % 7) / 20, 'ppo_kl', 0.002, 'clip_low', 0.01,
        'clip_high', 0.02, 'entropy', 1.2 - 0.6 * number / {{versions}}, 'logprob_gap_mean', 0.002, 'logprob_gap_p99', 0.02,
        'logprob_gap_max', 0.2, 'seconds_train', 12, 'seconds_step', 20, 'seconds_idle', 4, 'seconds_publish', 1, 'engine_idle', 0.2,
        'groups', {STEP // GROUP_SIZE}))
FROM numbers({{versions}} + 1)
"""
_LONG_BRANCH = f"""
INSERT INTO spangrad_internal.policy_versions (Policy, Branch, Version, RunId, Mode, Parent, ParentBranch, BatchId, Status, Metrics,
    IngestedAt)
SELECT Policy, '{LONG_BRANCH}', number + 1000000, 'run-0', 'train', number + 999999, '{LONG_BRANCH}', concat('long-', toString(number)),
    Status, Metrics, toDateTime64('2020-01-01', 6)
FROM numbers({LONG_STEPS}) AS steps
CROSS JOIN (SELECT * FROM spangrad_internal.policy_versions WHERE Policy = '{POLICY}' AND Version = {{versions}}) AS newest
"""
_TRANSITIONS = f"""
INSERT INTO spangrad_internal.transitions (RunId, Mode, BuildSpec, GroupId, GroupSize, TaskId, RolloutId, Attempt, Revision, Content, Turn,
    TransitionId, CallId, TraceId, SpanId, ChoiceIndex, Timestamp, ParentCallId, Branch, AgentName, Components, Tools, Policy, Version,
    `Versions.Start`, `Versions.Version`, Model, TokenizerHash, PromptIds, ResponseIds, Logprobs, Temperature, FinishReason,
    `Rewards.Name`, `Rewards.Value`, `Rewards.Source`, `Rewards.CallId`, `Rewards.Role`, `Rewards.Turn`)
SELECT c.RunId, 'train', '{SPEC}', b.GroupId, {GROUP_SIZE}, b.TaskId, c.RolloutKey, 0, 0, 1,
    row_number() OVER (PARTITION BY c.RolloutKey ORDER BY c.Timestamp) - 1 AS Turn, lower(hex(MD5(c.CallId))), c.CallId, c.TraceId,
    c.SpanId, 0, c.Timestamp,
    lagInFrame(c.CallId) OVER (PARTITION BY c.RolloutKey ORDER BY c.Timestamp ROWS BETWEEN 1 PRECEDING AND CURRENT ROW), 0,
    'researcher', ['researcher'], [], c.Policy, c.`Versions.Version`[1], c.`Versions.Start`, c.`Versions.Version`, c.Model, c.TokenizerHash,
    c.PromptIds, c.ResponseIds, c.Logprobs, 1, c.FinishReason, ['reward'], [0.5], ['runner'], [''], [''], [0]
FROM spangrad_internal.calls AS c
INNER JOIN (SELECT RolloutId, GroupId, TaskId FROM spangrad_internal.builds WHERE RunId = 'run-0') AS b ON b.RolloutId = c.RolloutKey
WHERE c.RunId = 'run-0' AND cityHash64(c.RolloutKey) % {_PARTS} = {{{{part}}}}
"""
_TRAINED = f"""
INSERT INTO spangrad_internal.trained_calls (Policy, Branch, BatchId, Version, RunId, Mode, BuildSpec, Revision, GroupId, TaskId, RolloutId,
    Attempt, Turn, TransitionId, CallId, TraceId, SpanId, AgentName, SampledVersions, Staleness, InputTokens, OutputTokens, FinishReason,
    Reward, Return, Advantage)
SELECT '{POLICY}', '{BRANCH}', concat('batch-', toString(Version + 1)), Version + 1, RunId, Mode, BuildSpec, Revision, GroupId, TaskId,
    RolloutId, Attempt, Turn, TransitionId, CallId, TraceId, SpanId, AgentName, [Version], Version % 3, length(PromptIds),
    length(ResponseIds), FinishReason, 0.5, (cityHash64(RolloutId) % 101) / 100, (cityHash64(RolloutId) % 201) / 100 - 1
FROM spangrad_internal.transitions
"""
_TOOLS = f"""
INSERT INTO spangrad_internal.tool_calls (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, GroupSize, TaskId, Content,
    Position, ToolName, Timestamp, Duration, Failed, AgentName)
WITH intDiv(number, 2) AS rollout
SELECT {_OF_ROLLOUT}, {GROUP_SIZE}, 'task', 1, number % 2, 'search',
    fromUnixTimestamp64Nano(toInt64(({{begin}} + rollout * {{pace}}) * 1000) * 1000000), 5000000, rollout % 16 = 0, 'researcher'
FROM numbers({{rollouts}} * 2)
"""
_REWARDS = f"""
INSERT INTO spangrad_internal.rewards (RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, Name, Value, Source)
SELECT RunId, Mode, BuildSpec, RolloutId, Attempt, Revision, 1, 'reward', (cityHash64('{{seed}}/build', rollout) % 101) / 100, 'runner'
FROM (SELECT number AS rollout, {_OF_ROLLOUT} FROM numbers({{rollouts}}))
""".replace("BuildSpec, GroupId, RolloutId", "BuildSpec, RolloutId")
_DATASET = f"""
INSERT INTO spangrad_internal.datasets (Name, Revision, BuildSpec, Settings, Reason)
VALUES ('default', 1, '{SPEC}', '{{{{}}}}', 'the first')
"""
_STEPS = f"""
INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, ScopeName, SpanAttributes,
    Duration, StatusCode)
WITH intDiv(number, {SPANS_A_STEP}) + 1 AS version, number % {SPANS_A_STEP} AS place, {STEP} * {{pace}} / {SPANS_A_STEP} AS seconds
SELECT fromUnixTimestamp64Nano(
        toInt64({{begin}} + (version - 1) * {STEP} * {{pace}} + if(place = 0, 0, (place - 1) * seconds)) * 1000000000),
    lower(hex(MD5(concat('step/', toString(version))))), lower(leftPad(hex(number + 4294967296), 16, '0')),
    if(place = 0, '', lower(leftPad(hex(number - place + 4294967296), 16, '0'))),
    ['train step', 'idle', 'load', 'credit', 'train', 'checkpoint'][place + 1], 'Internal', 'spangrad-trainer', 'spangrad.trainer',
    if(place = 0, map('spangrad.policy.name', '{POLICY}', 'spangrad.trainer.branch', '{BRANCH}', 'spangrad.trainer.version',
        toString(version)), map()), toUInt64(seconds * if(place = 0, {SPANS_A_STEP - 1}, 1) * 1000000000), 'Ok'
FROM numbers({{versions}} * {SPANS_A_STEP})
"""
_LONG_ATTRIBUTES = f"""map('spangrad.run.id', 'run-0', 'spangrad.rollout.mode', 'train', 'spangrad.rollout.id', '{LONG_ROLLOUT}',
        'spangrad.rollout.attempt', '0', 'spangrad.process.id', 'process-long', 'spangrad.seq', toString(number))"""
_LONG = (
    f"""
INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, ParentSpanId, SpanName, SpanKind, ServiceName, ScopeName, SpanAttributes,
    Duration, StatusCode)
WITH number % 3 AS place, intDiv(number, 3) AS turn, repeat('0', 31) || '7' AS trace,
    arrayMap(at -> toUInt32((turn * 7919 + at * 31) % 30000), range({LONG_TOKENS // 2})) AS tokens,
    arrayMap(at -> toFloat32(-(at % 100) / 50), range({LONG_TOKENS // 2})) AS logprobs
SELECT fromUnixTimestamp64Nano(toInt64({{begin}} + number) * 1000000000), trace, lower(leftPad(hex(number + 1), 16, '0')),
    multiIf(number = 0, '', place = 1, lower(leftPad(hex(number), 16, '0')), '0000000000000001'),
    multiIf(number = 0, 'rollout', place = 1, 'chat policy', place = 2, 'search', 'ChatCompletion'), 'Internal', 'agent',
    multiIf(number = 0, 'spangrad.runner', place = 1, 'spangrad.gateway', 'agent'),
    mapConcat({_LONG_ATTRIBUTES}, multiIf(
        number = 0, map('spangrad.task.id', 'long', 'spangrad.group.id', 'long', 'spangrad.group.size', '1', 'spangrad.rollout.calls',
            '{LONG_CALLS}', 'spangrad.rollout.final', 'true'),
        place = 1, map('spangrad.policy.name', 'policy', 'gen_ai.request.model', 'policy', 'spangrad.policy.versions', '[[[0,1]]]',
            'http.response.status_code', '200', 'gen_ai.response.finish_reasons', '["stop"]', 'gen_ai.request.temperature', '1',
            'spangrad.tokenizer.hash', '0123456789abcdef',
            'spangrad.input.token_ids', base64Encode(reinterpret(tokens, 'String')),
            'spangrad.output.token_ids', base64Encode(reinterpret(tokens, 'String')),
            'spangrad.output.logprobs', base64Encode(reinterpret(logprobs, 'String')),
            'spangrad.request.json', concat('{{{{"model":"policy","messages":[{{{{"role":"user","content":"question ', toString(turn), ' ',
                repeat('word ', {LONG_TOKENS // 2}), '"}}}}]}}}}'),
            'spangrad.response.json', concat('{{{{"choices":[{{{{"index":0,"finish_reason":"stop","message":',
                '{{{{"role":"assistant","content":"', repeat('word ', {LONG_TOKENS // 2}), '"}}}}}}}}]}}}}')),
        place = 2, map('openinference.span.kind', 'TOOL', 'tool.name', 'search'), map('openinference.span.kind', 'LLM'))),
    900000000, 'Ok'
FROM numbers({LONG_CALLS * 3})
""",
)
