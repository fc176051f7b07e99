"""Spans that nobody recorded, made by the registries of their conventions: a list a dialect, and where its names come from.

In: nothing. Out: `REGISTRY`, by dialect. Invariant: each attribute is one that its convention's own source writes; values are ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Made:
    """A span as its convention's instrumentation makes it."""

    scope: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    status: str = "Unset"


@dataclass(frozen=True, slots=True)
class Registry:
    """Spans of one dialect."""

    source: str
    """The repository and path that the names were read in."""
    spans: tuple[Made, ...]


_CHOICE = {"index": 0, "finish_reason": "stop", "token_ids": [4, 5], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}}
_ANSWER = json.dumps({"id": "chatcmpl-7", "object": "chat.completion", "model": "m", "prompt_token_ids": [1, 2, 3], "choices": [_CHOICE]})
_ARGS = '{"city": "Paris"}'
_CALLED = {
    "gen_ai.request.model": "m",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.usage.input_tokens": "9",
    "gen_ai.usage.output_tokens": "4",
}

REGISTRY = {
    "gen_ai": Registry(
        "open-telemetry/semantic-conventions-genai docs/gen-ai/gen-ai-spans.md, gen-ai-agent-spans.md, mcp.md; "
        "google/adk-python src/google/adk/telemetry/tracing.py",
        (
            Made("my-service", "chat m", {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", **_CALLED}),
            Made("my-service", "anything", {"gen_ai.request.model": "m"}),
            Made(
                "opentelemetry.instrumentation.google_genai", "generate_content m", {"gen_ai.operation.name": "generate_content", **_CALLED}
            ),
            Made("opentelemetry.instrumentation.openai_v2", "text_completion m", {"gen_ai.operation.name": "text_completion", **_CALLED}),
            Made(
                "opentelemetry.instrumentation.openai_v2",
                "embeddings m",
                {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"},
            ),
            Made("a", "invoke_agent Math Tutor", {"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"}),
            Made(
                "a",
                "create_agent Tutor",
                {"gen_ai.operation.name": "create_agent", "gen_ai.agent.name": "Tutor", "gen_ai.request.model": "m"},
            ),
            Made("a", "invoke_workflow crew", {"gen_ai.operation.name": "invoke_workflow"}),
            Made(
                "a",
                "execute_tool get_weather",
                {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.call.id": "call_1",
                    "gen_ai.tool.call.arguments": _ARGS,
                    "gen_ai.tool.call.result": "rain",
                },
            ),
            Made(
                "a",
                "execute_tool broken",
                {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "broken", "error.type": "ValueError"},
            ),
            Made(
                "mcp",
                "tools/call search",
                {
                    "mcp.method.name": "tools/call",
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": "search",
                    "gen_ai.tool.call.result": '{"content": [], "isError": true}',
                },
            ),
            Made("gcp.vertex.agent", "call_llm", {"gen_ai.system": "gcp.vertex.agent", "gen_ai.request.model": "m"}),
            Made("a", "counted", {"gen_ai.system": "x", "gen_ai.usage.output_tokens": "3"}),
            Made("judge", "evaluate", {"gen_ai.evaluation.name": "quality", "gen_ai.evaluation.score.value": "0.5"}),
        ),
    ),
    "traceloop": Registry(
        "traceloop/openllmetry packages/opentelemetry-semantic-conventions-ai/opentelemetry/semconv_ai/__init__.py",
        (
            Made("traceloop.tracer", "joke.workflow", {"traceloop.span.kind": "workflow", "traceloop.entity.name": "joke"}),
            Made("traceloop.tracer", "writer.agent", {"traceloop.span.kind": "agent", "traceloop.entity.name": "writer"}),
            Made("traceloop.tracer", "step.task", {"traceloop.span.kind": "task", "traceloop.entity.name": "step"}),
            Made(
                "traceloop.tracer",
                "search.tool",
                {
                    "traceloop.span.kind": "tool",
                    "traceloop.entity.name": "search",
                    "traceloop.entity.input": '{"inputs": {"q": "x"}}',
                    "traceloop.entity.output": '"found"',
                },
                "Error",
            ),
            Made(
                "opentelemetry.instrumentation.anthropic",
                "anthropic.chat",
                {
                    "llm.request.type": "chat",
                    "gen_ai.system": "Anthropic",
                    "gen_ai.request.model": "m",
                    "gen_ai.completion.0.finish_reason": "stop",
                    "gen_ai.usage.completion_tokens": "4",
                },
            ),
            Made("opentelemetry.instrumentation.langchain", "ChatOpenAI.chat", {"llm.request.type": "chat", "gen_ai.request.model": "m"}),
            Made(
                "opentelemetry.instrumentation.openai.v1",
                "openai.embeddings",
                {"llm.request.type": "embedding", "gen_ai.request.model": "e"},
            ),
            Made("opentelemetry.instrumentation.cohere", "cohere.rerank", {"llm.request.type": "rerank", "gen_ai.request.model": "r"}),
        ),
    ),
    "langfuse": Registry(
        "langfuse/langfuse-python langfuse/_client/attributes.py, langfuse/_client/constants.py",
        (
            Made("langfuse-sdk", "researcher", {"langfuse.observation.type": "agent", "langfuse.trace.name": "trip"}),
            Made(
                "langfuse-sdk",
                "OpenAI-generation",
                {
                    "langfuse.observation.type": "generation",
                    "langfuse.observation.model.name": "m",
                    "langfuse.observation.model.parameters": '{"temperature": 0.5}',
                    "langfuse.observation.usage_details": '{"input": 9, "output": 4}',
                },
            ),
            Made("langfuse-sdk", "ChatOpenAI", {"langfuse.observation.type": "generation", "langfuse.observation.model.name": "m"}),
            Made(
                "langfuse-sdk",
                "weather",
                {
                    "langfuse.observation.type": "tool",
                    "langfuse.observation.input": _ARGS,
                    "langfuse.observation.output": "",
                    "langfuse.observation.level": "ERROR",
                },
            ),
            Made("langfuse-sdk", "LangGraph", {"langfuse.observation.type": "chain"}),
            Made("langfuse-sdk", "embed", {"langfuse.observation.type": "embedding", "langfuse.observation.model.name": "e"}),
            Made("langfuse-sdk", "step", {"langfuse.observation.type": "span"}),
        ),
    ),
    "vercel": Registry(
        "vercel/ai packages/ai/src/generate-text/__snapshots__/generate-text.test.ts.snap; ai-sdk.dev/docs/ai-sdk-core/telemetry",
        (
            Made("ai", "ai.generateText", {"ai.operationId": "ai.generateText", "ai.telemetry.functionId": "planner", "ai.model.id": "m"}),
            Made(
                "ai",
                "ai.generateText.doGenerate",
                {
                    "ai.operationId": "ai.generateText.doGenerate",
                    "ai.telemetry.functionId": "planner",
                    "ai.response.finishReason": "tool-calls",
                    "ai.response.toolCalls": '[{"toolCallId": "call-1", "toolName": "weather", "input": "{}"}]',
                    "ai.settings.temperature": "0.5",
                    **_CALLED,
                },
            ),
            Made("ai", "ai.streamText.doStream", {"ai.operationId": "ai.streamText.doStream", "ai.response.id": "r-1", "ai.model.id": "m"}),
            Made(
                "ai",
                "ai.toolCall",
                {
                    "ai.operationId": "ai.toolCall",
                    "ai.toolCall.name": "weather",
                    "ai.toolCall.id": "call-1",
                    "ai.toolCall.args": _ARGS,
                    "ai.toolCall.result": '"rain"',
                },
            ),
            Made("ai", "ai.embed.doEmbed", {"ai.operationId": "ai.embed.doEmbed", "ai.model.id": "e"}),
        ),
    ),
    "pydantic_ai": Registry(
        "pydantic/pydantic-ai pydantic_ai_slim/pydantic_ai/capabilities/instrumentation.py, tests/test_logfire.py",
        (
            Made(
                "pydantic-ai",
                "agent run",
                {"agent_name": "my_agent", "model_name": "m", "final_result": "x", "gen_ai.usage.output_tokens": "12"},
            ),
            Made("pydantic-ai", "invoke_agent my_agent", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "my_agent"}),
            Made("pydantic-ai", "chat m", {"gen_ai.operation.name": "chat", "gen_ai.agent.name": "my_agent", **_CALLED}),
            Made(
                "pydantic-ai",
                "running tool",
                {"gen_ai.tool.name": "my_ret", "gen_ai.tool.call.id": "call_2", "tool_arguments": '{"x": 0}', "tool_response": "1"},
            ),
            Made(
                "pydantic-ai",
                "execute_tool my_ret",
                {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "my_ret", "gen_ai.tool.call.result": "1"},
                "Error",
            ),
            Made("pydantic-ai", "running 2 tools", {"tools": '["a", "b"]'}),
        ),
    ),
    "mlflow": Registry(
        "mlflow/mlflow mlflow/tracing/constant.py, mlflow/entities/span.py, mlflow/tracing/provider.py",
        (
            Made("mlflow.tracing.provider", "solver", {"mlflow.spanType": '"AGENT"'}),
            Made(
                "mlflow.tracing.provider",
                "Completions",
                {
                    "mlflow.spanType": '"CHAT_MODEL"',
                    "mlflow.message.format": '"openai"',
                    "mlflow.spanInputs": '{"model": "m", "temperature": 0.5}',
                    "mlflow.spanOutputs": _ANSWER,
                    "mlflow.chat.tokenUsage": '{"input_tokens": 3, "output_tokens": 2}',
                },
            ),
            Made("mlflow.tracing.provider", "ChatOpenAI", {"mlflow.spanType": '"CHAT_MODEL"', "mlflow.message.format": '"langchain"'}),
            Made(
                "mlflow.tracing.provider",
                "weather",
                {"mlflow.spanType": '"TOOL"', "mlflow.spanInputs": _ARGS, "mlflow.spanOutputs": '"rain"'},
            ),
            Made("mlflow.tracing.provider", "graph", {"mlflow.spanType": '"CHAIN"'}),
            Made("mlflow.tracing.provider", "embed", {"mlflow.spanType": '"EMBEDDING"', "mlflow.llm.model": '"e"'}),
        ),
    ),
    "agent_lightning": Registry(
        "agentlightning 0.3.0: semconv.py, adapter/triplet.py, emitter/reward.py, instrumentation/agentops.py; "
        "agentops 0.4.21: semconv/span_attributes.py, semconv/tool.py",
        (
            Made("agentops", "solver.agent", {"agentops.span.kind": "agent", "operation.name": "solver"}),
            Made(
                "agentops.instrumentation.providers.openai",
                "openai.chat.completion",
                {"prompt_token_ids": "[1, 2]", "response_token_ids": "[3]", "gen_ai.response.finish_reason": "stop", **_CALLED},
            ),
            Made(
                "agentops",
                "search.tool",
                {"agentops.span.kind": "tool", "tool.name": "search", "tool.result": "x", "tool.status": "failed"},
            ),
            Made(
                "agentlightning",
                "openai.chat.completions.create",
                {
                    "agentlightning.operation.name": "openai.chat.completions.create",
                    "agentlightning.operation.output.object": "chat.completion",
                    "agentlightning.operation.output.id": "chatcmpl-2",
                    "agentlightning.operation.output.model": "m",
                },
            ),
            Made(
                "agentlightning",
                "agentlightning.annotation",
                {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": "0.75"},
            ),
            Made(
                "agentlightning",
                "agentlightning.annotation",
                {
                    "agentlightning.reward.0.name": "task",
                    "agentlightning.reward.0.value": "1.0",
                    "agentlightning.reward.1.name": "speed",
                    "agentlightning.reward.1.value": "NaN",
                },
            ),
            Made("agentops", "reward.task", {"agentops.span.kind": "task", "agentops.task.output": '{"type": "reward", "value": 0.25}'}),
        ),
    ),
    "vllm": Registry(
        "vllm 0.32: vllm/tracing/utils.py, vllm/v1/engine/output_processor.py",
        (
            Made(
                "vllm.llm_engine",
                "llm_request",
                {
                    "gen_ai.request.id": "chatcmpl-1",
                    "gen_ai.request.temperature": "1.0",
                    "gen_ai.usage.prompt_tokens": "9",
                    "gen_ai.usage.completion_tokens": "4",
                    "gen_ai.latency.e2e": "0.5",
                },
            ),
            Made("vllm.engine.core", "Load weights", {"code.function": "load"}),
        ),
    ),
    "gateway": Registry(
        "ours: gateway/recorder/record.py",
        (Made("spangrad.gateway", "chat policy", {"gen_ai.operation.name": "chat", "spangrad.policy.name": "policy", **_CALLED}),),
    ),
    "others": Registry(
        "mlflow/mlflow mlflow/tracing/otel/translation/ (laminar.py, voltagent.py, claude_code.py); langsmith, haystack-ai, trulens, "
        "genkit and datadog by their documentation",
        (
            Made("langsmith", "ChatModel", {"langsmith.span.kind": "llm", "gen_ai.request.model": "m"}),
            Made("langsmith", "search", {"langsmith.span.kind": "tool"}, "Error"),
            Made("lmnr", "litellm.completion", {"lmnr.span.type": "LLM", "gen_ai.response.model": "m"}),
            Made("lmnr", "weather", {"lmnr.span.type": "TOOL", "lmnr.span.input": _ARGS, "lmnr.span.output": "rain"}),
            Made("voltagent", "llm", {"voltagent.operation_id": "o", "span.type": "llm", "entity.type": "agent", "llm.model": "m"}),
            Made("voltagent", "run", {"voltagent.operation_id": "o", "entity.type": "agent", "entity.name": "helper"}),
            Made(
                "com.anthropic.claude_code.tracing",
                "claude_code.llm_request",
                {"span.type": "llm_request", "model": "m", "output_tokens": "4"},
            ),
            Made("com.anthropic.claude_code.tracing", "claude_code.tool", {"span.type": "tool", "tool_name": "Bash"}),
            Made(
                "haystack", "haystack.component.run", {"haystack.component.type": "OpenAIChatGenerator", "haystack.component.name": "llm"}
            ),
            Made("trulens", "generate", {"ai.observability.span_type": "generation", "ai.observability.cost.model": "m"}),
            Made("genkit", "generate", {"genkit:metadata:subtype": "model", "genkit:name": "m"}),
            Made("ddtrace", "completion", {"_ml_obs.meta.span.kind": "llm", "_ml_obs.meta.model_name": "m"}),
        ),
    ),
    "unread": Registry(
        "open-telemetry/semantic-conventions docs/http/http-spans.md; the rest is invented",
        (
            Made(
                "opentelemetry.instrumentation.requests", "POST", {"http.method": "POST", "http.url": "http://h:8000/v1/chat/completions"}
            ),
            Made(
                "undici",
                "POST",
                {"http.request.method": "POST", "url.full": "https://h/openai/deployments/d/chat/completions?api-version=1"},
            ),
            Made("undici", "POST", {"http.request.method": "POST", "url.full": "https://h/v1/messages"}),
            Made("undici", "POST", {"http.request.method": "POST", "url.full": "https://h/responses"}),
            Made("undici", "GET", {"http.request.method": "GET", "url.full": "https://h/v1/responses"}),
            Made("undici", "POST", {"http.request.method": "POST", "url.full": "https://discord.com/api/v10/channels/7/messages"}),
            Made("fastapi", "POST /v1/messages", {"http.method": "POST", "http.url": "http://h/v1/messages", "http.route": "/v1/messages"}),
            Made("opentelemetry.instrumentation.botocore", "Bedrock Runtime.InvokeModel", {"rpc.system": "aws-api"}),
            Made("homemade", "ask", {"llm.model": "m", "llm.completion": "hello"}),
            Made("homemade", "plan", {"plan.steps": "3", "agent.name": "planner"}),
            Made("homemade", "judge", {"spangrad.reward": "1", "spangrad.reward.style": "0.5", "eval.tone.score": "none"}),
        ),
    ),
}
