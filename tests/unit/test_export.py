"""Texts of calls in every form that spans give them, and what merging and counting keep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from spangrad.errors import BuilderError
from transition_builder.dialects.messages import Dialogue, UnreadableError, dialogue
from transition_builder.dialects.texts import NoTextError, RedactedError, SpanText, read
from transition_builder.export.conversations import of_messages, of_tokens
from transition_builder.export.tally import ExportTally, LeftOut

FIXTURES = Path(__file__).parents[1] / "fixtures"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}


def call(arguments: str, id_: str = "c1", name: str = "add") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_dialogue_of_chat() -> None:
    request = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, HI],
        "tools": [ADD],
    }
    message = {"role": "assistant", "content": None, "refusal": None, "reasoning": "so", "tool_calls": [call('{"a": 1}')]}
    answer = {
        "choices": [{"index": 1, "message": message, "finish_reason": "length"}, {"index": 0, "message": HELLO, "finish_reason": "stop"}]
    }
    prompt = [{"role": "system", "content": "a\nb"}, HI]
    assert dialogue(request, answer, 0) == Dialogue(prompt, HELLO, [ADD])
    reply = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1}')], "reasoning_content": "so"}
    assert dialogue(request, answer, 1) == Dialogue(prompt, reply, [ADD], cut=True)
    with pytest.raises(UnreadableError, match="no choice 2"):
        dialogue(request, answer, 2)


def test_dialogue_names_and_ids_that_are_no_texts_become_texts() -> None:
    fields = {"role": "tool", "name": 10**30, "tool_call_id": 5, "reasoning_content": ["a"]}
    answer = {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}
    read_message = dialogue({"messages": [{"content": "x", **fields}]}, answer, 0).prompt[0]
    expected = {"role": "tool", "content": "x", "name": f"{10**30}", "tool_call_id": "5", "reasoning_content": '["a"]'}
    assert read_message == expected


def test_dialogue_with_images_keeps_parts() -> None:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "u"}}]
    read = dialogue({"messages": [{"role": "user", "content": parts}]}, {"choices": [{"message": HELLO}]}, 0)
    assert read.prompt == [{"role": "user", "content": parts}]


def test_dialogue_of_completions_gives_prompt_of_choice() -> None:
    answer = {"choices": [{"index": place, "text": str(place), "finish_reason": "stop"} for place in range(4)]}
    assert dialogue({"prompt": ["a", "b"], "n": 2}, answer, 2) == Dialogue("b", "2", [])
    with pytest.raises(UnreadableError, match="token ids"):
        dialogue({"prompt": [1, 2]}, {"choices": [{"text": "x"}]}, 0)


def test_dialogue_of_responses() -> None:
    request = {
        "instructions": "Be good.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one moment"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    }
    answer = {
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}],
        "status": "incomplete",
    }
    prompt = [
        {"role": "system", "content": "Be good."},
        HI,
        {"role": "assistant", "content": "one moment", "reasoning_content": "hm", "tool_calls": [call("{}"), call("{}", "c2")]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert dialogue(request, answer, 0) == Dialogue(prompt, HELLO, [ADD], cut=True)
    with pytest.raises(UnreadableError, match="another call"):
        dialogue({**request, "previous_response_id": "r"}, answer, 0)


def test_dialogue_of_responses_keeps_reasoning_between_items() -> None:
    def reasoned(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    text, tool = {"type": "message", "role": "assistant", "content": "so"}, {"type": "function_call", "call_id": "c1", "name": "add"}
    calling = {"role": "assistant", "content": "so", "tool_calls": [call("{}")]}
    for items, reasoning in {
        (0, 2, 1, 3): "a\nb",
        (2, 1, 3): "b",
        (0, 1, 2, 3): "a\nb",
    }.items():
        given = [(reasoned("a"), reasoned("b"), text, tool)[item] for item in items]
        assert dialogue({"input": given}, {"output": given}, 0).reply == {**calling, "reasoning_content": reasoning}
        assert dialogue({"input": given}, {"output": given}, 0).prompt == [{**calling, "reasoning_content": reasoning}]


def test_dialogue_of_anthropic_messages() -> None:
    request = {
        "system": [{"type": "text", "text": "Be good."}],
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}, {"type": "text", "text": "go on"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    answer = {"type": "message", "content": [{"type": "text", "text": "hello"}], "stop_reason": "max_tokens"}
    prompt = [
        {"role": "system", "content": "Be good."},
        HI,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call('{"a": 1}')]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "user", "content": "go on"},
    ]
    assert dialogue(request, answer, 0) == Dialogue(prompt, HELLO, [ADD], cut=True)


def _recorded() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return recorded requests to vLLM and their answers, without errors and streams (the gateway joins a stream before it is stored)."""
    recorded = {file.stem: json.loads(file.read_text()) for file in sorted((FIXTURES / "gateway").glob("*.json"))}
    whole = {
        name: exchange for name, exchange in recorded.items() if exchange["bare"]["status"] == 200 and not exchange["request"].get("stream")
    }
    return {name: (exchange["request"], json.loads(exchange["bare"]["body"])) for name, exchange in whole.items()}


@pytest.mark.parametrize(("request_", "answer"), _recorded().values(), ids=_recorded())
def test_dialogue_of_recorded_vllm_exchanges_is_read(request_: dict[str, Any], answer: dict[str, Any]) -> None:
    prompts = request_.get("prompt")
    if isinstance(prompts, list) and not isinstance(prompts[0], str):
        with pytest.raises(UnreadableError, match="token ids"):
            dialogue(request_, answer, 0)
        return
    parsed = dialogue(request_, answer, 0)
    assert parsed.prompt
    assert parsed.reply


OPENINFERENCE = {
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.type": "text",
    "llm.input_messages.0.message.contents.0.message_content.text": "hi",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": "{}",
    "llm.tools.0.tool.json_schema": json.dumps(ADD),
    "llm.finish_reason": "length",
}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
SPANS = {
    "gateway": (
        {"spangrad.request.json": json.dumps({"messages": [HI]}), "spangrad.response.json": json.dumps({"choices": [{"message": HELLO}]})},
        [],
    ),
    "client": ({"input.value": json.dumps({"messages": [HI]}), "output.value": json.dumps({"choices": [{"message": HELLO}]})}, []),
    "gen_ai": (
        {
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
            "gen_ai.output.messages": json.dumps(
                [{"role": "assistant", "parts": [{"type": "text", "content": "hello"}], "finish_reason": "stop"}]
            ),
        },
        [],
    ),
    "gen_ai's event": (
        {},
        [
            (
                "gen_ai.client.inference.operation.details",
                {"gen_ai.input.messages": json.dumps([HI]), "gen_ai.output.messages": json.dumps([HELLO])},
            )
        ],
    ),
    "traceloop": (
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "hi",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "hello",
        },
        [],
    ),
    "events": ({}, [("gen_ai.user.message", {"content": "hi"}), ("gen_ai.choice", {"index": "0", "message": json.dumps(HELLO)})]),
    "log records": (
        {},
        [("gen_ai.user.message", {"body": '{"content": "hi"}'}), ("gen_ai.choice", {"body": json.dumps({"index": 0, "message": HELLO})})],
    ),
    "vercel": (
        {"ai.prompt.messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]), "ai.response.text": "hello"},
        [],
    ),
    "langfuse": ({"langfuse.observation.input": json.dumps([HI]), "langfuse.observation.output": json.dumps(HELLO)}, []),
    "mlflow": (
        {"mlflow.spanInputs": json.dumps({"messages": [HI]}), "mlflow.spanOutputs": json.dumps({"choices": [{"message": HELLO}]})},
        [],
    ),
}


@pytest.mark.parametrize("name", SPANS)
def test_read_each_convention_gives_same_dialogue(name: str) -> None:
    attributes, events = SPANS[name]
    assert read(SpanText(attributes, events), 0) == Dialogue([HI], HELLO, [])
    with pytest.raises((UnreadableError, NoTextError)):
        read(SpanText(attributes, events), 1)


def test_read_openinference_span() -> None:
    assert read(SpanText(OPENINFERENCE), 0) == Dialogue([HI], CALLED, [ADD], cut=True)


def test_dialogue_of_message_alone_is_answer_with_tool_calls() -> None:
    asked = [HI, {"role": "assistant", "content": None, "tool_calls": [call("{}")]}, {"role": "tool", "content": "1", "tool_call_id": "c1"}]
    read = dialogue({"messages": asked}, {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}', "c2")]}, 0)
    assert read.prompt == [HI, {**asked[1], "content": ""}, asked[2]]
    assert read.reply == {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1}', "c2")]}


def test_dialogue_with_server_items_raises() -> None:
    output = [{"type": "web_search_call", "id": "w1"}, {"type": "message", "role": "assistant", "content": "hello"}]
    with pytest.raises(UnreadableError, match="and other items"):
        dialogue({"input": "hi"}, {"output": output}, 0)


def test_read_gen_ai_parts() -> None:
    messages = [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"sum": 2}}]},
    ]
    attributes = {
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be good."}]),
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "hello"}]}]),
        "gen_ai.tool.definitions": json.dumps([ADD]),
    }
    prompt = [
        {"role": "system", "content": "Be good."},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call('{"a": 1}')]},
        {"role": "tool", "content": '{"sum": 2}', "tool_call_id": "c1"},
    ]
    assert read(SpanText(attributes), 0) == Dialogue(prompt, HELLO, [ADD])


def test_read_vercel_span_has_tools_results_and_reasoning() -> None:
    reasoning = [{"type": "reasoning", "text": text} for text in (None, "hm", "")]
    requested = [*reasoning, {"type": "tool-call", "toolCallId": "c1", "toolName": "add", "input": {"a": 1}}]
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": requested},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "output": {"type": "text", "value": "sunny"}}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "output": {"type": "json", "value": {"sum": 2}}}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "result": {"value": 3}}]},
    ]
    attributes = {
        "ai.prompt.messages": json.dumps(prompt),
        "ai.prompt.tools": json.dumps([json.dumps({"type": "function", "name": "add", "inputSchema": {"type": "object"}})]),
        "ai.response.text": "hello",
    }
    answers = [{"role": "tool", "content": text, "tool_call_id": "c1"} for text in ("sunny", '{"sum": 2}', '{"value": 3}')]
    calling = {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1}')], "reasoning_content": "hm"}
    assert read(SpanText(attributes), 0) == Dialogue([HI, calling, *answers], HELLO, [ADD])


def test_read_half_of_surrogate_pair_is_replaced() -> None:
    emoji = "\U0001f600 \\ud83d"  # a whole pair, and what only looks like an escape
    request, response = {"messages": [{"role": "user", "content": "cut \ud83d here"}]}, {"choices": [{"message": {"content": emoji}}]}
    span = SpanText({"spangrad.request.json": json.dumps(request), "spangrad.response.json": json.dumps(response)})
    assert read(span, 0) == Dialogue([{"role": "user", "content": "cut \ufffd here"}], {"role": "assistant", "content": emoji}, [])


def test_read_redacted_missing_or_broken_text_raises_distinct_errors() -> None:
    with pytest.raises(RedactedError):
        read(SpanText({**SPANS["gateway"][0], "spangrad.redacted": "true"}), 0)
    with pytest.raises(NoTextError):
        read(SpanText({"spangrad.request.json": "{}"}), 0)
    with pytest.raises(UnreadableError):
        read(SpanText({"spangrad.request.json": "{", "spangrad.response.json": "{}"}), 0)


def test_read_recorded_model_spans_have_texts() -> None:
    """Texts are read from the recorded model spans of every instrumented client, failures aside."""
    scopes = ("openinference.instrumentation.openai", "openinference.instrumentation.anthropic", "opentelemetry.instrumentation.openai.v1")
    outcomes = Counter[str]()
    for file in sorted((FIXTURES / "spans").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            for resource in json.loads(line).get("resourceSpans", []):
                spans = [span for scope in resource["scopeSpans"] if scope["scope"].get("name") in scopes for span in scope["spans"]]
                for span in spans:
                    if span.get("status", {}).get("code") != 2:
                        outcomes[f"{file.stem}: {_outcome(span)}"] += 1
    assert outcomes == snapshot(
        Counter(
            {
                "aborted_stream+gateway: no text": 3,
                "aborted_stream+gateway: text": 1,
                "anthropic: text": 2,
                "attribute_limit_dropped: text": 1,
                "attribute_limit_raised: text": 1,
                "autogen: text": 8,
                "clock_skew+gateway: text": 3,
                "langchain+gateway: text": 2,
                "langchain: text": 2,
                "langchain_linked: text": 2,
                "langchain_streaming: text": 2,
                "langgraph_tool_error: text": 2,
                "litellm: text": 3,
                "openai_agents+gateway: text": 4,
                "openai_agents: text": 4,
                "openai_agents_responses: text": 4,
                "openai_client+gateway: text": 6,
                "openai_client: text": 8,
                "openai_client_httpx: text": 6,
                "parallel_calls+gateway: text": 50,
                "traceloop: text": 8,
                "traceloop_langchain: text": 2,
            }
        )
    )


def _outcome(span: dict[str, Any]) -> str:
    attributes = {attribute["key"]: str(next(iter(attribute["value"].values()))) for attribute in span["attributes"]}
    try:
        parsed = read(SpanText(attributes), 0)
    except NoTextError:
        return "no text"
    return "text" if parsed.prompt and parsed.reply else "empty"


def test_conversations_of_messages_with_reworded_reply_begin_anew() -> None:
    again = {"role": "user", "content": "again"}
    reasoned = {**HELLO, "reasoning_content": "hm"}
    conversations = of_messages([([HI], reasoned, []), ([HI, HELLO, again], HELLO, [])])
    assert [(conversation.messages, conversation.trained, conversation.calls) for conversation in conversations] == [
        ([HI, reasoned], [False, True], [0]),
        ([HI, HELLO, again, HELLO], [False, False, False, True], [1]),
    ]


def test_conversations_of_messages_ignore_spelling_of_arguments() -> None:
    sent, back = ({"role": "assistant", "content": "", "tool_calls": [call(text)]} for text in ('{"a":1}', '{"a": 1}'))
    (conversation,) = of_messages([([HI], sent, [ADD]), ([HI, back, HI], HELLO, [ADD])])
    assert (conversation.messages, conversation.trained) == ([HI, sent, HI, HELLO], [False, True, False, True])
    assert len(of_messages([([HI], sent, [ADD]), ([HI, back, HI], HELLO, [])])) == 2
    deep = {"role": "assistant", "content": "", "tool_calls": [call("[" * 100_000)]}
    assert len(of_messages([([HI], deep, []), ([HI, deep, HI], HELLO, [])])) == 1


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=8
    )
)
def test_conversations_train_each_token_and_reply_once(calls: list[tuple[list[int], list[int]]]) -> None:
    tokens = of_tokens(calls)
    assert sorted(at for conversation in tokens for at in conversation.calls) == list(range(len(calls)))
    assert sum(sum(conversation.mask) for conversation in tokens) == sum(len(response) for _, response in calls)
    for conversation in tokens:
        for at in conversation.calls:
            prompt, response = calls[at]
            assert conversation.ids[: len(prompt) + len(response)] == prompt + response
            assert conversation.mask[len(prompt) : len(prompt) + len(response)] == [1] * len(response)
    roles = ("user", "assistant", "tool")
    texts = [
        ([{"role": roles[number], "content": ""} for number in prompt], {"role": "assistant", "content": str(response)}, [])
        for prompt, response in calls
    ]
    conversations = of_messages(texts)
    assert sorted(at for conversation in conversations for at in conversation.calls) == list(range(len(calls)))
    for conversation in conversations:
        assert sum(conversation.trained) == len(conversation.calls)
        for at in conversation.calls:
            prompt, reply, _ = texts[at]
            assert conversation.messages[: len(prompt) + 1] == [*prompt, reply]
            assert conversation.trained[len(prompt)]


def test_conversations_of_tokens_copy_prompts_only_where_their_last_ids_agree() -> None:
    """A map-reduce agent makes thousands of calls that share a long beginning and do not extend each other."""
    copied = 0

    class Prompt(list[int]):
        def __getitem__(self, key: Any) -> Any:
            nonlocal copied
            copied += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            return super().__getitem__(key)

    calls = [(Prompt([*range(1000), *[2000 + number] * (2 * number + 1)]), [3000 + number]) for number in range(100)]
    longer = (Prompt([*calls[7][0], *calls[7][1], 1]), [2])
    sequences = of_tokens([*calls, longer])
    assert [sequence.calls for sequence in sequences if len(sequence.calls) > 1] == [[7, 100]]
    assert len(sequences) == 100
    assert copied < 200_000


def test_export_tally_check_with_missing_calls_raises() -> None:
    tally = ExportTally(calls=3)
    tally.write(1, rows=1)
    tally.count_left_out(LeftOut.TIE, 2)
    tally.check()
    tally.calls = 4
    with pytest.raises(BuilderError, match="of 4 calls 1 were written and 2 left out: 1 are not accounted for"):
        tally.check()
