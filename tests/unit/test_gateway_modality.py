"""Calls with content that is not text are marked, in every dialect, prompt or answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import DIALECTS
from gateway.proxy.modality import modality
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import MESSAGES, staged

CHAT, COMPLETIONS, RESPONSES, MESSAGES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
URL = {"url": "data:image/png;base64,AAAA"}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
DOCUMENT_BLOCK = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
TEXT = {"type": "text", "text": 'an "image" of type "image_url": {"type": "image"}'}


def asked(path: str, answer: object = None, **fields: Any) -> str:
    request = DIALECTS[path].parse(json.dumps(fields).encode())
    return modality(request, None if answer is None else json.dumps(answer).encode())


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "look"}, {"role": "user", "content": [TEXT, *parts]}]}


@pytest.mark.parametrize(
    ("path", "fields", "kinds"),
    [
        (CHAT, chat({"type": "image_url", "image_url": URL}), "image"),
        (CHAT, chat({"image_url": URL}), "image"),  # vLLM takes parts that name no type
        (CHAT, chat({"type": "image_embeds", "image_embeds": "AAAA"}), "image"),
        (CHAT, chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "audio"),
        (CHAT, chat({"type": "video_url", "video_url": URL}), "video"),
        (CHAT, chat({"type": "file", "file": {"file_id": "f"}}), "file"),
        (CHAT, chat({"type": "image_url", "image_url": URL}, {"type": "audio_url", "audio_url": URL}), "audio,image"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": URL}]}]}, "image"),
        (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "audio"),
        (COMPLETIONS, {"prompt": "say rome", "prompt_embeds": "AAAA"}, "embeddings"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "image"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "file"),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "file_id": "f"}]}]}, "image"),
        (RESPONSES, {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "file_id": "f"}}]}, "image"),
        (RESPONSES, {"input": [{"type": "image_generation_call", "result": "AAAA"}]}, "image"),
        (MESSAGES_PATH, {"messages": [{"role": "user", "content": [TEXT, IMAGE_BLOCK]}]}, "image"),
        (MESSAGES_PATH, {"messages": [{"role": "user", "content": [DOCUMENT_BLOCK]}]}, "file"),
        (MESSAGES_PATH, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE_BLOCK]}]}]}, "image"),
        (MESSAGES_PATH, {"system": [IMAGE_BLOCK], "messages": []}, "image"),
    ],
)
def test_modality_of_prompt_names_content_that_is_not_text(path: str, fields: dict[str, Any], kinds: str) -> None:
    assert asked(path, **fields) == kinds


@pytest.mark.parametrize(
    ("path", "answer", "kinds"),
    [
        (CHAT, {"choices": [{"message": {"role": "assistant", "content": None, "audio": {"id": "a", "data": "AAAA"}}}]}, "audio"),
        (CHAT, {"choices": [{"message": {"content": "", "images": [{"type": "image_url", "image_url": URL}]}}]}, "image"),
        (CHAT, {"choices": [{"message": {"content": "rome", "audio": None}}]}, ""),
        (RESPONSES, {"output": [{"type": "image_generation_call", "result": "AAAA"}]}, "image"),
        (RESPONSES, {"output": [{"type": "message", "content": [{"type": "output_audio", "data": "AAAA"}]}]}, "audio"),
        (RESPONSES, {"output": [{"type": "code_interpreter_call", "outputs": [{"type": "image", "url": "u"}]}]}, "image"),
        (MESSAGES_PATH, {"content": [IMAGE_BLOCK]}, "image"),
        (MESSAGES_PATH, {"content": [TEXT, {"type": "tool_use", "input": IMAGE_BLOCK}]}, ""),
    ],
)
def test_modality_of_answer_names_content_that_is_not_text(path: str, answer: dict[str, Any], kinds: str) -> None:
    assert asked(path, answer, messages=[], input="say rome") == kinds


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, chat()),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "image", "arguments": json.dumps(IMAGE_BLOCK)}}]}]},
        ),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "image", "function": {"parameters": IMAGE_BLOCK}}]}),
        (CHAT, {"messages": [{"role": "tool", "content": json.dumps([IMAGE_BLOCK])}]}),
        (RESPONSES, {"input": 'a "file" and an "image"', "tools": [{"type": "image_generation"}]}),
        (MESSAGES_PATH, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": IMAGE_BLOCK}]}]}),
        (COMPLETIONS, {"prompt": json.dumps(IMAGE_BLOCK)}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
    ],
)
def test_modality_of_text_about_images_is_empty(path: str, fields: dict[str, Any]) -> None:
    assert asked(path, {"choices": [{"message": {"content": 'the "image"'}}]}, **fields) == ""


def test_modality_of_escaped_json_is_found() -> None:
    raw = json.dumps(chat({"type": "image_url", "image_url": URL})).replace('"image_url"', '"\\u0069mage\\u005furl"').encode()
    assert modality(DIALECTS[CHAT].parse(raw), None) == "image"


_JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["image", "image_url", "text", "audio"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "content", "image_url", "output", "message"]), inner),
)


@given(_JSON, _JSON | st.binary())
def test_modality_of_any_json_never_fails(content: Any, answer: Any) -> None:
    request = DIALECTS[CHAT].parse(json.dumps({"messages": content}).encode())
    assert isinstance(modality(request, answer if isinstance(answer, bytes) else json.dumps(answer).encode()), str)


def test_modality_of_too_deeply_nested_content_is_empty() -> None:
    assert modality(DIALECTS[CHAT].parse(b'{"messages": []}'), b'{"content": ' + b'[{"type": "image", "content": ' * 5000) == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_modality_of_image_call_is_on_its_span_only(stream: bool) -> None:
    async with staged(FakeEngine()) as stage:
        await stage.chat(stream=stream)
        await stage.chat(stream=stream, **chat({"type": "image_url", "image_url": URL}))
        text, image = await stage.spans(2)
    assert "spangrad.modality" not in text.attributes
    assert image.attributes["spangrad.modality"] == "image"
