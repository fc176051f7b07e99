"""Records what vLLM answers in each dialect, with our middleware and without it, for tests/unit/test_gateway_dialects.py.

In: vLLM's environment. Out: tests/fixtures/gateway/*.json, one a request: the request, the answer of a vLLM that knows
nothing of us, and the answer of one with our middleware, asked as the gateway asks it. To be run again, and its changes
read, when vLLM's version changes: `python tests/support/capture_dialects.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from running_engine import engine_settings, running_bare_vllm, running_engine  # noqa: E402
from spelling_model import build_spelling_model  # noqa: E402

from gateway.dialects import DIALECTS  # noqa: E402

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["rome", "lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY, "strict": True}}
FLAT_TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": CITY, "strict": True}
ANTHROPIC_TOOL = {"name": "weather", "description": "d", "input_schema": CITY, "strict": True}
MESSAGES = [{"role": "user", "content": "say rome"}]
CHAT = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
TEXT = {"model": "policy", "prompt": "say rome", "temperature": 0, "max_tokens": 6}
RESPONSE = {"model": "policy", "input": "say rome", "temperature": 0, "max_output_tokens": 12}
MESSAGE = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
SCHEMA = {"name": "city", "schema": CITY}
DRAWN = {"temperature": 1, "top_k": 1}
"""Greedy, but several choices are allowed."""
ROOM = 100
"""Tokens enough for a tool's call."""

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat-two": ("/v1/chat/completions", {**CHAT, **DRAWN, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat-ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    "chat-tool": ("/v1/chat/completions", {**CHAT, "max_tokens": ROOM, "tools": [CHAT_TOOL], "tool_choice": "required"}),
    "chat-named": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": ROOM, "tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "chat-schema": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": ROOM, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "completions": ("/v1/completions", TEXT),
    "completions-many": ("/v1/completions", {**TEXT, **DRAWN, "prompt": ["say rome", "say lima", "tell"], "n": 2}),
    "completions-tokens": ("/v1/completions", {**TEXT, "prompt": [[20, 21, 22], [40, 41]], "logprobs": 2}),
    "completions-ids": ("/v1/completions", {**TEXT, "return_token_ids": True}),
    "completions-echo": ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1}),
    "completions-wrong": ("/v1/completions", {**TEXT, "temperature": -1}),
    "responses": ("/v1/responses", {**RESPONSE, "instructions": "be short"}),
    "responses-logprobs": ("/v1/responses", {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "responses-messages": ("/v1/responses", {**RESPONSE, "enable_response_messages": True}),
    "responses-tool": ("/v1/responses", {**RESPONSE, "max_output_tokens": ROOM, "tools": [FLAT_TOOL], "tool_choice": "required"}),
    "responses-named": (
        "/v1/responses",
        {**RESPONSE, "max_output_tokens": ROOM, "tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    ),
    "responses-schema": (
        "/v1/responses",
        {**RESPONSE, "max_output_tokens": ROOM, "text": {"format": {"type": "json_schema", **SCHEMA}}},
    ),
    "responses-wrong": ("/v1/responses", {**RESPONSE, "model": "nobody"}),
    "messages": ("/v1/messages", {**MESSAGE, "system": "be short"}),
    "messages-tool": ("/v1/messages", {**MESSAGE, "max_tokens": ROOM, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
    "messages-named": (
        "/v1/messages",
        {**MESSAGE, "max_tokens": ROOM, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    ),
    "messages-cut-tool": ("/v1/messages", {**MESSAGE, "max_tokens": 20, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
    "messages-schema": (
        "/v1/messages",
        {**MESSAGE, "max_tokens": ROOM, "output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    ),
    "messages-system": ("/v1/messages", {**MESSAGE, "messages": [*MESSAGES, {"role": "system", "content": "now"}, *MESSAGES]}),
    "messages-wrong": ("/v1/messages", {"model": "policy", "messages": MESSAGES}),
    "messages-long": ("/v1/messages", {**MESSAGE, "max_tokens": 4096}),
}


def ask(url: str, body: bytes) -> dict[str, Any]:
    """Status, content type and text of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60) as answer:
            return {"status": answer.status, "type": answer.headers["content-type"], "body": answer.read().decode()}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "type": error.headers["content-type"], "body": error.read().decode()}


def main() -> None:
    """Start two engines, and ask both."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        home = Path(directory)
        build_spelling_model(home / "model")
        tools: dict[str, object] = {"max_model_len": 512, "extra_args": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}
        plugged = engine_settings(home / "model", home / "cache", **tools)
        running.enter_context(running_engine(plugged, home / "engine.log"))
        bare = engine_settings(home / "model", home / "cache", **tools)
        running.enter_context(running_bare_vllm(bare, home / "bare.log"))
        for name, (path, request) in REQUESTS.items():
            for suffix, asked in (("", request), ("-stream", {**request, "stream": True})):
                raw = json.dumps(asked).encode()
                for_engine = DIALECTS[path].parse(raw).for_engine()
                golden = {
                    "path": path,
                    "request": asked,
                    "bare": ask(bare.gateway.engine_url + path, raw),
                    "plugged": ask(plugged.gateway.engine_url + path, for_engine),
                }
                (ROOT / f"tests/fixtures/gateway/{name}{suffix}.json").write_text(json.dumps(golden, indent=1) + "\n")
                print(name + suffix, golden["bare"]["status"], golden["plugged"]["status"])


if __name__ == "__main__":
    main()
