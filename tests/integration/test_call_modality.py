"""Calls that are not text only, and requests that were relaxed, through the store: columns of `calls`, and drops of the builder."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from spangrad.settings import StoreSettings
from tests.support.built_rollouts import outcome, post, rows, settings_of
from tests.support.fake_engine import SAMPLING
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

ANSWER: dict[str, Any] = {
    "model": "policy",
    "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "finish_reason": "stop", "token_ids": [4], "logprobs": {"content": [{"logprob": -0.5}]}}],
    "spangrad": {"policy": "policy", "versions": [[[0, 7]]], "tokenizer_hash": "tok", "sampling": SAMPLING},
}
SPOKEN = 'of {"type": "image_url"} and "file"'
TOOL_USE = {"type": "tool_use", "id": "t", "name": "open", "input": {"type": "file", "modality": "image"}}
PART = "llm.input_messages.1.message.contents.0.message_content.type"


def request(*parts: dict[str, Any]) -> str:
    return json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": SPOKEN}, *parts]}]})


def test_gateway_calls_with_images_drop_and_relaxed_calls_are_kept(store: StoreSettings) -> None:
    spans = SpanFactory(run="modality")
    root = spans.root(calls=2)
    spans.evaluation(root)
    kept, image = spans.call(root, Relaxed=["strict_tools", "top_p"]), spans.call(root, Modality="image")
    post(store, spans.otlp())
    build_once(settings_of(store, "modality"))
    assert outcome(store, "modality") == (
        [("r", 0, kept, 0, [1, 2, 3], [4, 5], 3, [1.0])],
        [("r", 0, image, "other_modality", "image")],
    )
    asked = "SELECT SpanId, Relaxed, Modality FROM spangrad.calls WHERE RunId = 'modality' ORDER BY SpanId"
    assert rows(store, asked) == [(kept, ["strict_tools", "top_p"], ""), (image, [], "image")]


@pytest.mark.parametrize(
    ("relaxed", "modality", "stored"),
    [
        ("no JSON", "image", ([], "image")),
        ("[3, null, {}]", "\x00" * 9, (["3", "", "{}"], "\x00" * 9)),
        ('["a"', "x" * 70_000, ([], "x" * 70_000)),
        ("[" * 2000, "", ([], "")),
        (7, 7, ([], "7")),
        (True, True, ([], "true")),
    ],
)
def test_calls_insert_accepts_any_relaxed_and_modality_attribute(
    store: StoreSettings, relaxed: object, modality: object, stored: tuple[list[str], str]
) -> None:
    run = uuid.uuid4().hex
    spans = SpanFactory(run=run)
    spans.call(spans.root(calls=1), Relaxed=relaxed, Modality=modality)
    post(store, spans.otlp())
    assert rows(store, f"SELECT Relaxed, Modality FROM spangrad.calls WHERE RunId = '{run}'") == [stored]


@pytest.mark.parametrize(
    ("attributes", "modality"),
    [
        ({PART: "text"}, ""),
        ({PART: "tool_use"}, ""),
        ({PART: "image"}, "image"),
        ({"input.value": request()}, ""),
        ({"input.value": request({"type": "image_url", "image_url": {"url": "data:"}})}, "image"),
        ({"input.value": request({"type": "input_audio", "input_audio": {}}), PART: "image"}, "audio,image"),
        ({"input.value": json.dumps({"input": [{"content": [{"type": "input_file", "file_id": "f"}]}]})}, "file"),
        ({"input.value": request({"type": "image_url"})[:-3]}, "image"),  # an attribute that was cut
        ({"input.value": request({"type": "image_embeds", "image_embeds": "A" * 100})}, "image"),
        ({"input.value": request({"image_url": {"url": "data:\n" + "A" * 100}})}, "image"),  # vLLM takes parts that name no type
        ({"input.value": request({"type": "image"}).replace('"image"', '"\\u0069mage"')}, "image"),
        ({"input.value": json.dumps({"prompt": "say", "prompt_embeds": "AAAA"})}, "embeddings"),
        ({"input.value": json.dumps({"model": "policy", "prompt_embeds": "A" * 200})}, "embeddings"),
        ({"input.value": json.dumps({"messages": [{"role": "assistant", "content": [TOOL_USE]}]})}, ""),
        ({"input.value": json.dumps({"messages": [{"content": [TOOL_USE, {"type": "text", "text": 'é\n"' * 99}]}]})}, ""),
        ({"input.value": json.dumps({"messages": [], "audio": {"voice": "alloy"}})}, ""),
        ({"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "uri", "modality": "video", "uri": "u"}]}])}, "video"),
        ({"input.value": '"type": "' * 10_000}, ""),
        ({"input.value": json.dumps({"tools": [{"type": "image_generation"}], "messages": []})}, ""),
    ],
)
def test_direct_mode_calls_with_images_have_modality_and_drop(store: StoreSettings, attributes: dict[str, str], modality: str) -> None:
    run = uuid.uuid4().hex
    spans = SpanFactory(run=run)
    root = spans.root()
    spans.evaluation(root)
    call = spans.client(root, Attributes={"output.value": json.dumps({"id": "a", **ANSWER}), **attributes})
    post(store, spans.otlp())
    build_once(settings_of(store, run, quiet_seconds=0))
    kept, dropped = outcome(store, run)
    if modality:
        assert (kept, dropped) == ([], [("r", 0, call, "other_modality", modality)])
    else:
        assert ([row[2] for row in kept], dropped) == ([call], [])
