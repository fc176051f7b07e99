"""A tool parser for vLLM: a reply that is a tool's name and its arguments, word by word, is a call of that tool.

In: `calc 12 + 7`, and the tools of the request. Out: a call of `calc` with `{"a": 12, "operator": "+", "b": 7}`. A tool that takes one text
takes all words: `search mayor siniton`. Invariant: a reply that fits no tool is left as it is, for the agent to judge.

vLLM loads this file into its own environment (`--tool-parser-plugin`), so that agents speak OpenAI's tool calls to a model whose whole
vocabulary is words. Streams are not served: no example asks for one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


def arguments_of(words: Sequence[str], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The words as arguments of a tool with this JSON schema of parameters, in its order; None where they do not fit."""
    properties = list(schema.get("properties", {}).items())
    if len(properties) == 1 and words:
        words = [" ".join(words)]
    if len(words) != len(properties):
        return None
    arguments: dict[str, Any] = {}
    for word, (name, kind) in zip(words, properties, strict=True):
        number = kind.get("type") == "integer"
        if (number and not word.isdigit()) or word not in map(str, kind.get("enum", [word])):
            return None
        arguments[name] = int(word) if number else word
    return arguments


@ToolParserManager.register_module("words")
class WordCalls(ToolParser):
    """The parser, as vLLM wants it."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read a whole reply."""
        name, *words = model_output.split() or [""]
        for tool in request.tools or []:
            if tool.function.name == name and (arguments := arguments_of(words, tool.function.parameters or {})) is not None:
                call = ToolCall(type="function", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
                return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=None)
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
