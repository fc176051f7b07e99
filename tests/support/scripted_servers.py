"""Servers that answer by a script: the gateway's administration, and a policy whose words are read as calls of the request's tools."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.support.otlp import HttpServer

PARSER = Path(__file__).parents[2] / "examples" / "learning" / "word_calls.py"


@dataclass
class _Function:
    name: str
    arguments: str


@dataclass
class _Call:
    type: str
    function: _Function
    id: str = "call"


@dataclass
class _Extracted:
    tools_called: bool
    tool_calls: list[_Call] = field(default_factory=list)
    content: str | None = None


def word_calls() -> types.ModuleType:
    """The parser's module."""
    protocol, abstract = (
        types.ModuleType("vllm.entrypoints.generate.base.protocol"),
        types.ModuleType("vllm.tool_parsers.abstract_tool_parser"),
    )
    vars(protocol).update(ExtractedToolCallInformation=_Extracted, FunctionCall=_Function, ToolCall=_Call)
    vars(abstract).update(ToolParser=object, ToolParserManager=SimpleNamespace(register_module=lambda name: lambda parser: parser))
    spec = importlib.util.spec_from_file_location("word_calls", PARSER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {protocol.__name__: protocol, abstract.__name__: abstract}):
        spec.loader.exec_module(module)
    return module


def as_said(message: dict[str, Any]) -> str:
    """A message's words, as the examples' chat template writes it."""
    calls = (call["function"] for call in message.get("tool_calls") or [])
    words = (f"{call['name']} {' '.join(str(value) for value in json.loads(call['arguments']).values())}" for call in calls)
    return " ".join([message.get("content") or "", *words]).strip()


class WordPolicy(HttpServer):
    """Answers each chat with what `reply` says to its messages, (role, words) each; a text begins with a space, as vLLM's does."""

    def __init__(self, reply: Callable[[list[tuple[str, str]]], str]) -> None:
        self.reply = reply
        self.chats: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._parser = word_calls().WordCalls()
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        chat = json.loads(body)
        self.chats.append(chat)
        self.paths.append(path)
        tools = [SimpleNamespace(function=SimpleNamespace(**tool["function"])) for tool in chat.get("tools", [])]
        extracted = self._parser.extract_tool_calls(
            self.reply([(message["role"], as_said(message)) for message in chat["messages"]]), SimpleNamespace(tools=tools)
        )
        message: dict[str, Any] = {"role": "assistant", "content": f" {extracted.content}" if extracted.content else extracted.content}
        if extracted.tools_called:
            message["tool_calls"] = [{**asdict(call), "id": f"call-{len(self.chats)}"} for call in extracted.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if extracted.tools_called else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": chat["model"], "choices": [choice], "usage": usage}
        return 200, {"content-type": "application/json"}, json.dumps(whole).encode()


class AdminGateway(HttpServer):
    """Publications that it was sent, by path and body (`tests/unit/test_gateway_admin_api.py` has the real server)."""

    def __init__(self) -> None:
        super().__init__()
        self.publications: list[tuple[str, dict[str, object]]] = []

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        del method, headers
        self.publications.append((path, json.loads(body)))
        return 200, {}, b'{"seconds": 0.25}'
