"""Calls of upstreams that give no token ids: ids made from their text, marked as that, after the client's answer."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.rollout_spans import key_value
from gateway.proxy.retokenize import Retokenizer, load
from spangrad import semconv
from spangrad.errors import GatewayError
from spangrad.weights.checksums import tokenizer_hash
from tests.support.fake_engine import ANSWER_TEXT, FakeEngine, uint32s
from tests.support.gateways import MESSAGES, staged

CHAT, COMPLETIONS, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PROMPT = "<|im_start|> user say rome <|im_end|> <|im_start|> assistant"
"""MESSAGES as the example's chat template renders them."""


def answered(*texts: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": i, "message": {"role": "assistant", "content": text, **more}} for i, text in enumerate(texts)]}


def span(route: str, request: object, response: object, **attributes: Any) -> bytes:
    texts = {semconv.REQUEST_JSON: json.dumps(request), semconv.RESPONSE_JSON: json.dumps(response), semconv.HTTP_ROUTE: route}
    return Span(name="chat m", attributes=[key_value(key, value) for key, value in {**texts, **attributes}.items()]).SerializeToString()


def attributes_of(serialized: bytes) -> dict[str, Any]:
    """The attributes that matter, arrays decoded."""
    decoded: dict[str, Any] = {}
    for attribute in Span.FromString(serialized).attributes:
        assert attribute.key not in decoded
        match attribute.value.WhichOneof("value"):
            case "bytes_value":
                decoded[attribute.key] = uint32s(attribute.value.bytes_value)
            case "array_value":
                decoded[attribute.key] = [each.int_value for each in attribute.value.array_value.values]
            case _:
                decoded[attribute.key] = attribute.value.string_value
    for name in (semconv.REQUEST_JSON, semconv.RESPONSE_JSON, semconv.HTTP_ROUTE):
        del decoded[name]
    return decoded


class Letters:
    """A tokenizer whose ids are code points, and a template that is easy to read."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, *, tools: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert tokenize is False
        turns = "".join(f"<{message['role']}>{message['content']}{_called(message)}" for message in conversation)
        return (f"[{len(tools)} tools]" if tools else "") + turns + ("<assistant>" if add_generation_prompt else "")


def _called(message: dict[str, Any]) -> str:
    return "".join(f"{call['function']['name']}({call['function']['arguments']['town']})" for call in message.get("tool_calls", []))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def fill(route: str, request: object, response: object, **attributes: Any) -> dict[str, Any]:
    (filled,) = Retokenizer(Letters(), "h4sh")([span(route, request, response, **attributes)])
    return attributes_of(filled)


def marked(prompts: list[str], answers: list[str], special: int = 0) -> dict[str, Any]:
    return {
        semconv.INPUT_TOKEN_IDS: [token for text in prompts for token in [*([1] * special), *letters(text)]],
        semconv.INPUT_LENGTHS: [len(text) + special for text in prompts],
        semconv.OUTPUT_TOKEN_IDS: letters("".join(answers)),
        semconv.OUTPUT_LENGTHS: [len(text) for text in answers],
        semconv.IDS_SOURCE: "retokenized",
        semconv.TOKENIZER_HASH: "h4sh",
    }


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"town": "rome"}'}}]


@pytest.mark.parametrize(
    ("route", "request_", "response", "prompts", "answers", "special"),
    [
        (CHAT, {"messages": MESSAGES}, answered("yes", "no"), ["<user>say rome<assistant>"], ["yes", "no"], 0),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "tools": TOOLS},
            answered("c", tool_calls=None),
            ["[1 tools]<user>ab<assistant>"],
            ["c"],
            0,
        ),
        (
            CHAT,
            {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "7"}]},
            {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": CALLS}}]},
            ["<user>say rome<assistant>f(rome)<tool>7<assistant>"],
            ["f(rome)"],
            0,
        ),
        (COMPLETIONS, {"prompt": "ab"}, {"choices": [{"text": "c"}]}, ["ab"], ["c"], 1),
        (COMPLETIONS, {"prompt": ["a", "bc"]}, {"choices": [{"text": "d"}, {"text": "ef"}]}, ["a", "bc"], ["d", "ef"], 1),
        (
            ANTHROPIC,
            {"system": [{"type": "text", "text": "be kind"}], "messages": MESSAGES},
            {"content": [{"type": "text", "text": "yes"}, {"type": "text", "text": "!"}]},
            ["<system>be kind<user>say rome<assistant>"],
            ["yes!"],
            0,
        ),
    ],
)
def test_retokenizer_fills_ids_from_text(
    route: str, request_: dict[str, Any], response: dict[str, Any], prompts: list[str], answers: list[str], special: int
) -> None:
    # Of several choices without ids the recorder says how long each is: nothing.
    assert fill(route, request_, response, **{semconv.OUTPUT_LENGTHS: [0, 0]}) == marked(prompts, answers, special)


@pytest.mark.parametrize(
    "attributes",
    [
        {semconv.INPUT_TOKEN_IDS: b"\1\0\0\0"},
        {semconv.TOKENIZER_HASH: "engine's"},
        {semconv.REDACTED: True},
        {semconv.ERROR_TYPE: "500"},
        {semconv.ABORTED: True},
    ],
)
def test_retokenizer_leaves_spans_with_ids_or_redaction_unchanged(attributes: dict[str, Any]) -> None:
    recorded = span(CHAT, {"messages": MESSAGES}, answered("yes"), **attributes)
    assert Retokenizer(Letters(), "h4sh")([recorded]) == [recorded]


@pytest.mark.parametrize(
    ("route", "request_", "response"),
    [
        ("/v1/responses", {"input": "a"}, {"output": []}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, answered("yes")),
        (CHAT, {"messages": MESSAGES}, {"choices": 3}),
        (CHAT, {"messages": MESSAGES}, "no object"),
        (COMPLETIONS, {"prompt": [1, 2]}, {"choices": [{"text": "c"}]}),
        (ANTHROPIC, {"messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}]}, {"content": [{"type": "text", "text": "yes"}]}),
    ],
)
def test_retokenizer_leaves_unreadable_spans_without_ids(
    route: str, request_: object, response: object, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = span(route, request_, response)
    assert Retokenizer(Letters(), "h4sh")([recorded]) == [recorded]
    assert "say rome" not in caplog.text


def test_retokenizer_load_uses_tokenizer_and_chat_template_of_directory(tiny_model: Path) -> None:
    (filled,) = load(tiny_model)([span(CHAT, {"messages": MESSAGES}, answered(ANSWER_TEXT))])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    facts = attributes_of(filled)
    assert tokenizer.decode(facts[semconv.INPUT_TOKEN_IDS]) == PROMPT
    assert tokenizer.decode(facts[semconv.OUTPUT_TOKEN_IDS]) == ANSWER_TEXT
    assert facts[semconv.TOKENIZER_HASH] == tokenizer_hash(tiny_model)


def test_retokenizer_load_of_unusable_directory_raises(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GatewayError, match=r"gateway.retokenize = '.*' holds no tokenizer that can be used: .* no tokenizer.json"):
        load(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    with pytest.raises(GatewayError, match="holds no chat template"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(GatewayError, match="the extra `trainer`"):
        load(tiny_model)


async def test_retokenizer_runs_after_answer_and_marks_every_call(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen upstream beside the engine: its calls are filled after their answers, the engine's are left alone."""
    hold, loop_thread, threads = threading.Event(), threading.get_ident(), set[int]()
    loaded = load(tiny_model)

    def slow(spans: list[bytes]) -> list[bytes]:
        threads.add(threading.get_ident())
        assert hold.wait(20)
        return loaded(spans)

    monkeypatch.setattr("gateway.server.load", lambda directory: slow)
    frozen = FakeEngine(policy="judge", ids_missing=True)
    backends = [{"url": f"http://127.0.0.1:{frozen.port}", "policy": "judge", "kind": "openai"}]
    # A plain server knows nothing of our field.
    monkeypatch.setattr(frozen, "whole", lambda asked: _plain_answer(FakeEngine.whole(frozen, asked)))
    async with frozen.running(), staged(retokenize=str(tiny_model), backends=backends) as stage:
        await stage.readiness("serving")
        for model in ("judge", "policy", "judge"):
            status, _ = await stage.chat(model=model)
            assert status == 200
        assert stage.store.spans == []
        hold.set()
        first, second, third = await stage.spans(3)
    assert loop_thread not in threads
    for judged in (first, third):
        assert judged.attributes[semconv.IDS_SOURCE] == "retokenized"
        assert judged.attributes[semconv.TOKENIZER_HASH] == tokenizer_hash(tiny_model)
        assert len(uint32s(judged.attributes[semconv.OUTPUT_TOKEN_IDS])) == 2  # type: ignore[arg-type]
        assert semconv.OUTPUT_LOGPROBS not in judged.attributes
        assert semconv.POLICY_VERSIONS not in judged.attributes
    assert uint32s(second.attributes[semconv.OUTPUT_TOKEN_IDS]) == [9, 12, 2]  # type: ignore[arg-type]
    assert semconv.IDS_SOURCE not in second.attributes


def _plain_answer(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "spangrad"}
