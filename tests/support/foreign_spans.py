"""Span forests of frameworks that nobody recorded here, made by the names and shapes that their sources and their tests have.

In: nothing. Out: `FORESTS`, by set-up. Invariant: names and attributes are the frameworks', values are ours. `wire` marks the spans from
which a request to a model leaves, each once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.spans import SpanFactory

OI = "openinference.instrumentation"


@dataclass(frozen=True, slots=True)
class Tree:
    """A span, and those inside of it."""

    scope: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    inside: tuple[Tree, ...] = ()
    status: str = "Ok"
    wire: bool = False


@dataclass(frozen=True, slots=True)
class Forest:
    """The spans of one run of an agent."""

    source: str
    """The repository and path that the names were read in."""
    trees: tuple[Tree, ...]
    calls: int
    """That its agent made, each of which must leave as a call or as a drop."""
    reasons: frozenset[str] = frozenset({"no_token_ids"})
    """Of the drops, without a gateway."""


def _llm(scope: str, name: str, *inside: Tree, **more: str) -> Tree:
    attributes = {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.token_count.prompt": "9", "llm.token_count.completion": "4"}
    return Tree(f"{OI}.{scope}", name, attributes | more, inside)


def _kind(kind: str, scope: str, name: str, *inside: Tree, status: str = "Ok", **more: str) -> Tree:
    return Tree(f"{OI}.{scope}", name, {"openinference.span.kind": kind} | more, inside, status)


def _genai(scope: str, name: str, operation: str, *inside: Tree, **more: str) -> Tree:
    return Tree(scope, name, {"gen_ai.operation.name": operation} | more, inside)


def _wire(tree: Tree) -> Tree:
    """From which a request leaves."""
    return replace(tree, wire=True)


def _post(url: str, scope: str = "undici") -> Tree:
    return Tree(scope, "POST", {"http.request.method": "POST", "url.full": url}, wire=True)


_OPENAI = _wire(_llm("openai", "ChatCompletion"))
_MODEL = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": "9", "gen_ai.usage.output_tokens": "4"}
_COMPLETIONS = "http://h:8000/v1/chat/completions"
_ARGS = json.dumps({"city": "Paris"})


def _adk(inside: tuple[Tree, ...] = ()) -> Tree:
    asked = {"gen_ai.system": "gcp.vertex.agent", "gcp.vertex.agent.invocation_id": "e-1", "gcp.vertex.agent.llm_request": "{}", **_MODEL}
    call = _wire(_llm("litellm", "acompletion"))
    return Tree("gcp.vertex.agent", "call_llm", asked, (call, *inside))


def _strands(*inside: Tree) -> Tree:
    bedrock = _wire(
        _genai(
            "opentelemetry.instrumentation.botocore.bedrock-runtime",
            "chat us.anthropic.claude",
            "chat",
            **{"gen_ai.system": "aws.bedrock", "rpc.system": "aws-api", "rpc.service": "Bedrock Runtime", **_MODEL},
        )
    )
    chat = _genai("strands.telemetry.tracer", "chat", "chat", bedrock, **{"gen_ai.system": "strands-agents", **_MODEL})
    return Tree("strands.telemetry.tracer", "execute_event_loop_cycle", {"event_loop.cycle_id": "1"}, (chat, *inside))


def _proxied(*inside: Tree, **more: str) -> Tree:
    """An agent's call to LiteLLM's proxy, and the proxy's own spans."""
    server = Tree("litellm", "Received Proxy Server Request", {"http.route": "/chat/completions", **more}, inside)
    sent = Tree("opentelemetry.instrumentation.httpx", "POST", {"http.method": "POST", "http.url": _COMPLETIONS}, (server,))
    return _llm("openai", "ChatCompletion", sent)


_RAW = Tree("litellm", "raw_gen_ai_request", {"llm.openai.model": "m", "llm.openai.messages": "[]", "llm.openai.usage": "{}"}, wire=True)
_LITELLM = {"gen_ai.system": "openai", "llm.is_streaming": "False", "gen_ai.operation.name": "chat", **_MODEL}

FORESTS = {
    "crewai": Forest(
        "Arize-ai/openinference openinference-instrumentation-crewai _wrappers.py",
        (
            _kind(
                "CHAIN",
                "crewai",
                "Crew_1.kickoff",
                _kind(
                    "AGENT",
                    "crewai",
                    "Researcher._execute_core",
                    _llm("litellm", "completion", _OPENAI),
                    _kind("TOOL", "crewai", "search.run", **{"tool.name": "search", "input.value": _ARGS, "output.value": "found"}),
                    _llm("litellm", "completion", _OPENAI),
                    **{"graph.node.id": "Researcher"},
                ),
            ),
        ),
        2,
    ),
    "llama_index": Forest(
        "Arize-ai/openinference openinference-instrumentation-llama-index _handler.py",
        (
            _kind(
                "CHAIN",
                "llama_index",
                "AgentWorkflow.run",
                _kind(
                    "CHAIN",
                    "llama_index",
                    "AgentWorkflow.run_agent_step",
                    _llm("llama_index", "OpenAI.astream_chat_with_tools", _llm("llama_index", "OpenAI.astream_chat", _OPENAI)),
                ),
                _kind("TOOL", "llama_index", "FunctionTool.acall", **{"tool.name": "search", "tool.parameters": _ARGS}),
            ),
        ),
        1,
    ),
    "haystack_pipeline": Forest(
        "deepset-ai/haystack haystack/core/pipeline/base.py, haystack/tracing/opentelemetry.py",
        (
            Tree(
                "haystack",
                "haystack.pipeline.run",
                {"haystack.pipeline.metadata": "{}"},
                (
                    Tree(
                        "haystack",
                        "haystack.component.run",
                        {
                            "haystack.component.name": "llm",
                            "haystack.component.type": "OpenAIChatGenerator",
                            "haystack.component.visits": "1",
                        },
                        wire=True,
                    ),
                    Tree(
                        "haystack",
                        "haystack.component.run",
                        {"haystack.component.name": "tools", "haystack.component.type": "ToolInvoker", "haystack.component.visits": "1"},
                    ),
                ),
            ),
        ),
        1,
    ),
    "haystack_agent": Forest(
        "deepset-ai/haystack haystack/components/agents/agent.py",
        (
            Tree(
                "haystack",
                "haystack.agent.run",
                {"haystack.agent.max_steps": "5"},
                (
                    Tree(
                        "haystack",
                        "haystack.agent.step",
                        {"haystack.agent.step": "0"},
                        (
                            Tree("haystack", "haystack.agent.step.llm", {}, wire=True),
                            Tree("haystack", "haystack.agent.step.tool", {"haystack.tool.name": "search"}),
                        ),
                    ),
                ),
            ),
        ),
        1,
    ),
    "dspy": Forest(
        "Arize-ai/openinference openinference-instrumentation-dspy __init__.py",
        (
            _kind(
                "CHAIN",
                "dspy",
                "ReAct.forward",
                _kind(
                    "CHAIN",
                    "dspy",
                    "Predict.forward",
                    _kind("CHAIN", "dspy", "ChatAdapter.__call__", _llm("dspy", "LM.__call__", _wire(_llm("litellm", "completion")))),
                ),
                _kind("TOOL", "dspy", "search", **{"input.value": _ARGS}),
            ),
        ),
        1,
    ),
    "smolagents": Forest(
        "Arize-ai/openinference openinference-instrumentation-smolagents _wrappers.py",
        (
            _kind(
                "AGENT",
                "smolagents",
                "ToolCallingAgent.run",
                _kind("CHAIN", "smolagents", "Step 1", _llm("smolagents", "OpenAIModel.generate", _OPENAI)),
                _kind(
                    "CHAIN",
                    "smolagents",
                    "Step 2",
                    _llm("smolagents", "OpenAIModel.generate", _OPENAI),
                    _kind("TOOL", "smolagents", "FinalAnswerTool", **{"tool.name": "final_answer"}),
                ),
                # The agent's own span counts all of its tokens; it is no call for that.
                **{"llm.token_count.prompt": "18", "llm.token_count.completion": "8", "smolagents.max_steps": "20"},
            ),
        ),
        2,
    ),
    "google_adk": Forest(
        "google/adk-python src/google/adk/telemetry/tracing.py",
        (
            Tree(
                "gcp.vertex.agent",
                "invocation",
                {},
                (
                    _genai(
                        "gcp.vertex.agent",
                        "invoke_agent root",
                        "invoke_agent",
                        _adk(
                            (
                                _genai(
                                    "gcp.vertex.agent",
                                    "execute_tool get_weather",
                                    "execute_tool",
                                    **{
                                        "gen_ai.tool.name": "get_weather",
                                        "gen_ai.tool.call.id": "call_1",
                                        "gcp.vertex.agent.tool_call_args": _ARGS,
                                        "gcp.vertex.agent.tool_response": '{"result": "rain"}',
                                        "gcp.vertex.agent.llm_request": "{}",
                                        "gcp.vertex.agent.llm_response": "{}",
                                    },
                                ),
                                _genai(
                                    "gcp.vertex.agent",
                                    "execute_tool (merged tools)",
                                    "execute_tool",
                                    **{"gen_ai.tool.name": "(merged tools)", "gcp.vertex.agent.llm_request": "{}"},
                                ),
                            )
                        ),
                        _adk(),
                        **{"gen_ai.agent.name": "root", "gen_ai.agent.description": ""},
                    ),
                ),
            ),
        ),
        2,
    ),
    "semantic_kernel": Forest(
        "microsoft/semantic-kernel python/semantic_kernel/utils/telemetry/model_diagnostics/decorators.py",
        (
            _genai(
                "semantic_kernel.utils.telemetry.agent_diagnostics.decorators",
                "invoke_agent Host",
                "invoke_agent",
                Tree(
                    "semantic_kernel.connectors.ai.chat_completion_client_base",
                    "AutoFunctionInvocationLoop",
                    {"sk.available_functions": "weather-get"},
                    (
                        _genai(
                            "semantic_kernel.utils.telemetry.model_diagnostics.decorators",
                            "chat.completions m",
                            "chat.completions",
                            _post(_COMPLETIONS, "opentelemetry.instrumentation.httpx"),
                            **{
                                "gen_ai.system": "openai",
                                "gen_ai.response.id": "chatcmpl-1",
                                "gen_ai.response.finish_reason": "tool_calls",
                            },
                            **_MODEL,
                        ),
                        _genai(
                            "semantic_kernel.functions.kernel_function",
                            "execute_tool weather-get",
                            "execute_tool",
                            **{"gen_ai.tool.name": "weather-get", "gen_ai.tool.call.id": "call_1"},
                        ),
                        _genai(
                            "semantic_kernel.utils.telemetry.model_diagnostics.decorators",
                            "chat.completions m",
                            "chat.completions",
                            _post(_COMPLETIONS, "opentelemetry.instrumentation.httpx"),
                            **{"gen_ai.system": "openai", "gen_ai.response.id": "chatcmpl-2", **_MODEL},
                        ),
                    ),
                ),
                **{"gen_ai.agent.name": "Host"},
            ),
        ),
        2,
    ),
    "strands": Forest(
        "strands-agents/sdk-python src/strands/telemetry/tracer.py; "
        "open-telemetry/opentelemetry-python-contrib opentelemetry-instrumentation-botocore extensions/bedrock.py",
        (
            _genai(
                "strands.telemetry.tracer",
                "invoke_agent Weather",
                "invoke_agent",
                _strands(
                    _genai(
                        "strands.telemetry.tracer",
                        "execute_tool get_weather",
                        "execute_tool",
                        **{"gen_ai.tool.name": "get_weather", "gen_ai.tool.call.id": "tooluse_1", "gen_ai.tool.status": "success"},
                    )
                ),
                _strands(),
                # As each cycle's chat, the agent's span names the model and counts tokens.
                **{"gen_ai.system": "strands-agents", "gen_ai.agent.name": "Weather", **_MODEL},
            ),
        ),
        2,
    ),
    "beeai": Forest(
        "Arize-ai/openinference openinference-instrumentation-beeai processors/chat.py, processors/agents/base.py",
        (
            _kind(
                "AGENT",
                "beeai",
                "RequirementAgent",
                _llm("beeai", "OpenAIChatModel", _wire(_llm("litellm", "acompletion"))),
                _kind("TOOL", "beeai", "OpenMeteoTool", **{"tool.name": "OpenMeteoTool", "tool.parameters": _ARGS}),
                _llm("beeai", "OpenAIChatModel", _wire(_llm("litellm", "acompletion"))),
                **{"agent.name": "planner"},
            ),
        ),
        2,
    ),
    "agno": Forest(
        "Arize-ai/openinference openinference-instrumentation-agno _model_wrapper.py",
        (
            _kind(
                "AGENT",
                "agno",
                "News_Agent.run",
                _llm("agno", "OpenAIChat.invoke", _OPENAI),
                _kind("TOOL", "agno", "duckduckgo_search", **{"tool.name": "duckduckgo_search"}),
                _llm("agno", "OpenAIChat.invoke", _OPENAI),
                **{"agno.agent.id": "1"},
            ),
        ),
        2,
    ),
    "instructor": Forest(
        "Arize-ai/openinference openinference-instrumentation-instructor _wrappers.py",
        # The wrapper around the call calls itself a tool.
        (_kind("TOOL", "instructor", "instructor.patch", _kind("TOOL", "instructor", "instructor.async_patch", _OPENAI)),),
        1,
    ),
    "mastra": Forest(
        "mastra-ai/mastra observability/otel-exporter/src/gen-ai-semantics.ts",
        (
            _genai(
                "@mastra/otel-exporter",
                "invoke_agent weather-agent",
                "invoke_agent",
                _genai(
                    "@mastra/otel-exporter",
                    "chat m",
                    "chat",
                    _wire(_genai("@mastra/otel-exporter", "step 0", "model_step", **{"mastra.span.type": "model_step"})),
                    _genai(
                        "@mastra/otel-exporter",
                        "execute_tool get-weather",
                        "execute_tool",
                        **{"mastra.span.type": "tool_call", "gen_ai.tool.name": "get-weather", "gen_ai.tool.call.arguments": _ARGS},
                    ),
                    _wire(_genai("@mastra/otel-exporter", "step 1", "model_step", **{"mastra.span.type": "model_step"})),
                    **{
                        "mastra.span.type": "model_generation",
                        "gen_ai.provider.name": "openai",
                        "gen_ai.agent.name": "weather-agent",
                        **_MODEL,
                    },
                ),
                **{"mastra.span.type": "agent_run", "gen_ai.agent.name": "weather-agent"},
            ),
        ),
        2,
    ),
    "openai_js": Forest(
        "Arize-ai/openinference js/packages/openinference-instrumentation-openai; "
        "open-telemetry/opentelemetry-js-contrib instrumentation-openai",
        (
            Tree(
                "@arizeai/openinference-instrumentation-openai",
                "OpenAI Chat Completions",
                {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.system": "openai"},
                (_post(_COMPLETIONS),),
            ),
            _genai("@opentelemetry/instrumentation-openai", "chat m", "chat", _post(_COMPLETIONS), **{"gen_ai.system": "openai", **_MODEL}),
        ),
        2,
    ),
    "litellm_proxy": Forest(
        "BerriAI/litellm litellm/integrations/opentelemetry.py",
        (
            _proxied(
                Tree("litellm", "proxy_pre_call", {"service": "proxy_pre_call"}),
                Tree("litellm", "router", {"call_type": "acompletion", "service": "router"}),
                Tree("litellm", "litellm_request", _LITELLM, (_RAW,)),
                Tree("litellm", "self", {"call_type": "make_openai_chat_completion_request", "service": "self"}),
            ),
            # From 1.81 on the proxy's server span has the attributes of litellm_request itself.
            _proxied(_RAW, **_LITELLM),
        ),
        2,
    ),
    "bedrock": Forest(
        "open-telemetry/opentelemetry-python-contrib opentelemetry-instrumentation-botocore extensions/bedrock.py",
        (
            _wire(
                _genai(
                    "opentelemetry.instrumentation.botocore.bedrock-runtime",
                    "chat amazon.nova",
                    "chat",
                    **{"gen_ai.system": "aws.bedrock", "rpc.system": "aws-api", "rpc.method": "Converse", **_MODEL},
                )
            ),
            # An older version, or another operation: no generative attributes.
            Tree("opentelemetry.instrumentation.botocore", "Bedrock Runtime.InvokeModel", {"rpc.system": "aws-api"}, wire=True),
        ),
        2,
        frozenset({"no_token_ids", "unknown_convention"}),
    ),
    "vercel_gateway": Forest(
        "vercel/ai packages/gateway/src/gateway-language-model.ts, packages/ai/src/generate-text",
        (
            Tree(
                "ai",
                "ai.generateText",
                {"ai.operationId": "ai.generateText", "ai.model.provider": "gateway", "ai.model.id": "openai/m"},
                (
                    Tree(
                        "ai",
                        "ai.generateText.doGenerate",
                        {
                            "ai.operationId": "ai.generateText.doGenerate",
                            "ai.model.provider": "gateway",
                            "ai.model.id": "openai/m",
                            **_MODEL,
                        },
                        (_post("https://ai-gateway.vercel.sh/v1/ai/language-model"),),
                    ),
                    Tree("ai", "ai.toolCall", {"ai.operationId": "ai.toolCall", "ai.toolCall.name": "weather", "ai.toolCall.args": _ARGS}),
                ),
            ),
        ),
        1,
    ),
    "vercel_gateway_alone": Forest(
        "vercel/ai packages/gateway/src/gateway-language-model.ts",
        (_post("https://ai-gateway.vercel.sh/v1/ai/language-model"),),
        1,
        frozenset({"unknown_convention"}),
    ),
}


def planted(forest: Forest, factory: SpanFactory, root: str, *, gateway: bool = False, **where: Any) -> None:
    """Make a forest's spans below a root, with a recording gateway's span behind each request if it is there."""

    def plant(tree: Tree, parent: str) -> None:
        span = factory.span(tree.name, parent, scope=tree.scope, status=tree.status, Attributes=dict(tree.attributes), **where)
        if tree.wire and gateway:
            factory.call(span, **where)
        for one in tree.inside:
            plant(one, span)

    for tree in forest.trees:
        plant(tree, root)
