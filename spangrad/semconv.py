"""Names of attributes in one place: spangrad's own, and those of the conventions that we write or that several parts read.

docs/reference/attributes.md describes our own. A name that only one dialect of the builder reads is defined in that dialect. The gen_ai
names are hard-coded because OpenTelemetry moved its constants to another repository and marks the old ones deprecated.
"""

from __future__ import annotations

from typing import Final

# Every span of ours.
RUN_ID: Final = "spangrad.run.id"
ROLLOUT_ID: Final = "spangrad.rollout.id"
ROLLOUT_MODE: Final = "spangrad.rollout.mode"
ROLLOUT_ATTEMPT: Final = "spangrad.rollout.attempt"
PROCESS_ID: Final = "spangrad.process.id"
SEQ: Final = "spangrad.seq"

PROMPT_NAME: Final = "spangrad.prompt.name"
PROMPT_VERSION: Final = "spangrad.prompt.version"
"""Name and version of the prompt that the attempt is pinned to, or that the span's code has fetched."""

CONTEXT_KEYS: Final = (RUN_ID, ROLLOUT_ID, ROLLOUT_MODE, ROLLOUT_ATTEMPT, PROMPT_NAME, PROMPT_VERSION)
"""Attributes that baggage carries and every span of an agent repeats."""

# The root span of an attempt.
ROOT_SPAN_NAME: Final = "rollout"
TASK_ID: Final = "spangrad.task.id"
GROUP_ID: Final = "spangrad.group.id"
GROUP_SIZE: Final = "spangrad.group.size"
ROLLOUT_CALLS: Final = "spangrad.rollout.calls"
ROLLOUT_FINAL: Final = "spangrad.rollout.final"
ROLLOUT_FAILURE: Final = "spangrad.rollout.failure"
INIT_SECONDS: Final = "spangrad.rollout.init.seconds"
RUN_SECONDS: Final = "spangrad.rollout.run.seconds"
EVALUATE_SECONDS: Final = "spangrad.rollout.evaluate.seconds"
"""Duration of a stage in seconds, the wait for a slot excluded. Absent: the attempt did not reach the stage, or has no such stage."""

# The gateway's span.
GATEWAY_SCOPE: Final = "spangrad.gateway"
POLICY_NAME: Final = "spangrad.policy.name"
POLICY_VERSIONS: Final = "spangrad.policy.versions"
"""Policy versions of the response tokens, as JSON: for each choice a list of pairs, the token at which a version begins and the version."""
INPUT_TOKEN_IDS: Final = "spangrad.input.token_ids"
INPUT_LENGTHS: Final = "spangrad.input.lengths"
OUTPUT_TOKEN_IDS: Final = "spangrad.output.token_ids"
OUTPUT_LOGPROBS: Final = "spangrad.output.logprobs"
OUTPUT_LENGTHS: Final = "spangrad.output.lengths"
REQUEST_JSON: Final = "spangrad.request.json"
RESPONSE_JSON: Final = "spangrad.response.json"
TOKENIZER_HASH: Final = "spangrad.tokenizer.hash"
IDS_SOURCE: Final = "spangrad.ids.source"
"""`retokenized`: the token ids were computed from the text, by the tokenizer that the hash names. Absent: they are the engine's."""
MODALITY: Final = "spangrad.modality"
"""Kinds of content of the call that are not text, such as `audio,image`. Absent: text only."""
RELAXED: Final = "spangrad.request.relaxed"
"""Names of `gateway.relax` that changed the request to the engine; `spangrad.request.json` is the client's request."""
REDACTED: Final = "spangrad.redacted"
ABORTED: Final = "spangrad.aborted"
SAMPLING_MIN_P: Final = "spangrad.sampling.min_p"
SAMPLING_REPETITION_PENALTY: Final = "spangrad.sampling.repetition_penalty"
SAMPLING_CONSTRAINED: Final = "spangrad.sampling.constrained"
"""True when a grammar, a JSON schema or a required tool masked tokens."""

REWARD: Final = "spangrad.reward"
"""A reward as an attribute of any span; `spangrad.reward.NAME` where it has a name. On a span that is no call, it is the rollout's."""

ANSWER_FIELD: Final = "spangrad"
"""Extra field of an engine's response: {"policy", "versions", "tokenizer_hash", "sampling"}."""

# The trainer's own spans: a step, and its stages below it. They name no rollout; what they consumed are their links.
TRAINER_SCOPE: Final = "spangrad.trainer"
TRAINER_BRANCH: Final = "spangrad.trainer.branch"
TRAINER_VERSION: Final = "spangrad.trainer.version"
"""Version that the step produced."""
TRAINER_PARENT: Final = "spangrad.trainer.parent"
TRAINER_BATCH: Final = "spangrad.trainer.batch"
TRAINER_METRIC: Final = "spangrad.trainer.metric"
"""Prefix of an attribute, followed by a metric's name."""
TRAINER_CONSUMED: Final = "spangrad.trainer.rollout"
"""Attribute of a link, never of a span: the rollout whose root span the link points to."""

# OpenTelemetry's generative AI conventions.
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
"""Sampling parameters. On the gateway's span: those in effect, the engine's defaults applied, also where the request names none."""
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_TOOL_NAME: Final = "gen_ai.tool.name"
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
EVALUATION_EVENT: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
REWARD_ROLE: Final = "spangrad.reward.role"
"""Role (agent or policy) of a reward, on an evaluation or beside scores among a span's attributes. Absent: every role."""
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"
ERROR_TYPE: Final = "error.type"
HTTP_STATUS: Final = "http.response.status_code"
HTTP_ROUTE: Final = "http.route"
"""Dialect of the request and of the response on the gateway's span, as the path of its endpoint."""
SESSION_ID: Final = "session.id"

# OpenInference.
OPENINFERENCE_KIND: Final = "openinference.span.kind"
OPENINFERENCE_OUTPUT: Final = "output.value"
OPENINFERENCE_INPUT: Final = "input.value"
OPENINFERENCE_TOOL_NAME: Final = "tool.name"
OPENINFERENCE_AGENT_NAME: Final = "agent.name"
OPENINFERENCE_GRAPH_NODE: Final = "graph.node.id"

REWARD_NAME: Final = "reward"
"""Name of a rollout's final reward, as an evaluation result."""
