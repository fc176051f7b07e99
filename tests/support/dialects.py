"""Golden files of the dialects: what is read in recorded spans, and what a real vLLM answers with our middleware and without it.

`python -m tests.support.dialects golden` writes what is read anew; `python -m tests.support.dialects capture` records the answers, when
vLLM changes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl

from gateway.dialects import DIALECTS
from tests.support.engines import engine_settings, running_bare_vllm, running_engine
from tests.support.policies import build_spelling_model
from tests.support.registry_spans import REGISTRY, Made
from tests.support.spans import SpanFactory
from transition_builder import dialects
from transition_builder.schemas import NODES, SPANS

# What the dialects read in the golden spans.

FILES = Path(__file__).parents[1] / "golden" / "dialects"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "spans"
RECORDED = {
    "openinference_openai_agents": "openai_agents+gateway",
    "openinference_langgraph": "langgraph_tool_error",
    "openinference_autogen": "autogen",
    "openinference_litellm": "litellm",
    "openinference_anthropic": "anthropic",
    "gen_ai_openai_v2": "genai_openai_v2",
    "traceloop_openai": "traceloop",
    "http_only": "http_only_httpx",
}
"""Golden files by the fixtures that their spans were recorded in."""
_ALWAYS = ["ScopeName", "SpanName", "Convention"]
_SAID = [name for name in (*NODES, "ResponseId", "Model", "InputTokens", "OutputTokens") if name not in {*SPANS, *_ALWAYS, "RolloutId"}]


def made(spans: tuple[Made, ...]) -> pl.DataFrame:
    """SPANS and RolloutId of made spans."""
    factory = SpanFactory()
    for one in spans:
        factory.span(one.name, "", scope=one.scope, status=one.status, Attributes=one.attributes)
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def recorded(fixture: str) -> pl.DataFrame:
    """SPANS and RolloutId of a fixture."""
    factory = SpanFactory()
    for line in (FIXTURES / f"{fixture}.jsonl").read_text().splitlines():
        factory.load_otlp(json.loads(line))
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def shown(spans: pl.DataFrame) -> list[dict[str, Any]]:
    """What the dialects say of spans: each kind of span once, with what it says, and how many there were."""
    found: dict[str, dict[str, Any]] = {}
    for node in dialects.describe(spans).select(*_ALWAYS, *dict.fromkeys(_SAID)).iter_rows(named=True):
        said = {name: value for name, value in node.items() if name in _ALWAYS or value not in (None, False, "", [])}
        found.setdefault(json.dumps(said, sort_keys=True), {"spans": 0, **said})["spans"] += 1
    return list(found.values())


def golden() -> dict[str, dict[str, Any]]:
    """Every golden file's content, by name."""
    files: dict[str, dict[str, Any]] = {
        name: {"source": f"tests/fixtures/spans/{fixture}.jsonl", "described": shown(recorded(fixture))}
        for name, fixture in RECORDED.items()
    }
    files |= {name: {"source": one.source, "described": shown(made(one.spans))} for name, one in REGISTRY.items()}
    return files


def write_golden() -> None:
    """Write the files; look at the difference before you keep it."""
    FILES.mkdir(exist_ok=True)
    for name, content in golden().items():
        (FILES / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# Answers of the dialects, made comparable: without ids and times, and however many tokens came at a time.

VOLATILE = {"id", "item_id", "call_id", "created", "created_at", "signature", "sequence_number"}
"""Fields that are drawn, counted or read from a clock for each answer."""
_LENGTHENED = ("delta", "content", "text", "thinking", "partial_json", "arguments", "reasoning")
_ENDS = (".finish_reason", ".stop_reason", ".system_fingerprint")
_END = "<|im_end|>"
_MIXED = ("choices", "tool_calls")
"""Lists of one part each, or of several that vLLM mixes as they come."""


def comparable(body: bytes) -> Any:
    """What an answer says, of whatever dialect."""
    return _Stream(body).told() if body.startswith((b"data:", b"event:")) else _steady(json.loads(body))


class _Stream:
    """What a stream's events say, a list for each choice, and the fields that there were."""

    def __init__(self, body: bytes) -> None:
        self.fields: set[str] = set()
        self.said: dict[str, list[Any]] = {}
        """Changes of fields as (path, value), and between two of them the texts and lists that went on meanwhile, by path."""
        self._state: dict[tuple[str, str], Any] = {}
        *events, end = body.split(b"\n\n")
        assert end == b""
        for event in events:
            name, _, data = event.decode().partition("data: ")
            values: dict[str, Any] = {"data": data} if data == "[DONE]" else json.loads(data)
            if str(values.get("type")).startswith("response."):
                values = _without_end(values)
            choices = values.get("choices") or [{}]
            for path, value in sorted(_leaves("", {"event": name, **values}), key=_place):
                self.fields.add(path)
                self._say(f"choice {choices[0].get('index')}", path, value)

    def told(self) -> dict[str, Any]:
        return {"said": self.said, "fields": sorted(self.fields)}

    def _say(self, choice: str, path: str, value: Any) -> None:
        said = self.said.setdefault(choice, [])
        if isinstance(value, list) or path.endswith(_LENGTHENED):
            if value:
                if not said or not isinstance(said[-1], dict):
                    said.append({})
                said[-1][path] = said[-1][path] + value if path in said[-1] else value
        elif value is not None and self._state.get((choice, path)) != value:
            self._state[choice, path] = value
            if path.endswith(_ENDS):
                self.said.setdefault(f"end of {choice}", []).append((path, value))
            else:
                said.append((path, value))


def _place(leaf: tuple[str, Any]) -> int:
    """What an event is of comes first, then what it goes on with; a choice's end comes with its last tokens, or after them."""
    path, value = leaf
    return 2 if path.endswith(_ENDS) else int(isinstance(value, list) or path.endswith(_LENGTHENED))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of an event, each with its path."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{path}.{name}", "…" if name in VOLATILE and one else one)
    elif isinstance(value, list) and path.endswith(_MIXED):
        for one in value:
            yield from _leaves(f"{path}[]", one)
    else:
        yield path, _steady(value)


def _without_end(value: Any) -> Any:
    """Without logprobs of the token that ends an answer: vLLM's Responses tell them when it came together with a token that has text."""
    if isinstance(value, dict):
        return {key: _without_end(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_end(one) for one in value if not (isinstance(one, dict) and "logprob" in one and one.get("token") == _END)]
    return value


def _steady(value: Any) -> Any:
    """Without what is drawn or read from a clock, and numbers as exact as two processes agree on."""
    if isinstance(value, dict):
        return {key: "…" if key in VOLATILE and one else _steady(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_steady(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


# Records what vLLM answers in each dialect, with our middleware and without it, for tests/unit/test_gateway_dialects.py.

ROOT = Path(__file__).resolve().parents[2]


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


def capture() -> None:
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
    {"golden": write_golden, "capture": capture}[sys.argv[1]]()
