"""Token ids for calls whose upstream gives none: computed from their text, and marked as such.

In: serialized spans on their way to the store, the tokenizer directory `gateway.retokenize`. Out: the same spans; those of complete calls
that an upstream without ids answered hold ids of this tokenizer and its chat template, its hash, and `spangrad.ids.source` = `retokenized`.
Invariant: a span that holds an engine's ids, or that was redacted, stays as it is; no call waits for any of this.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.vllm_plugin.request_fields import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH
from spangrad import semconv
from spangrad.encoding import otlp
from spangrad.errors import CheckpointError, GatewayError
from spangrad.weights.checksums import tokenizer_hash

log = logging.getLogger(__name__)

RETOKENIZED = "retokenized"
"""Value of `spangrad.ids.source` for retokenized ids; the engine's own ids lack the attribute."""
_ENGINE_ONLY = (semconv.INPUT_TOKEN_IDS, semconv.OUTPUT_TOKEN_IDS, semconv.TOKENIZER_HASH)
"""Attributes that only an engine with our plugin sets. They are searched for in a span's bytes: a text that quotes them gets no ids."""
_REPLACED = {semconv.INPUT_LENGTHS, semconv.OUTPUT_LENGTHS}

_Json = dict[str, Any]


class Tokenizer(Protocol):
    """Interface of transformers' tokenizers, as far as it is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[_Json], *, tools: Sequence[_Json] | None, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Return the text of a conversation, as the model reads it."""
        ...


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of a call: its prompts and answers."""

    prompts: list[str]
    answers: list[str]
    """The text of each choice."""
    special_tokens: bool
    """True if the tokenizer adds its special tokens to a prompt; false where a chat template has written them already."""


class Retokenizer:
    """Adds token ids to spans that came without them."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """Wrap a loaded tokenizer; `name` is the hash of its directory."""
        self._tokenizer = tokenizer
        self._name = name
        self._readers: Mapping[str, Callable[[_Json, _Json], _Texts]] = {
            CHAT_PATH: self._chat,
            COMPLETIONS_PATH: _completions,
            MESSAGES_PATH: self._messages,
        }

    def __call__(self, spans: Sequence[bytes]) -> list[bytes]:
        """Return the spans, with ids added to those that need them; takes milliseconds for each."""
        return [self._fill(span) for span in spans]

    def _fill(self, serialized: bytes) -> bytes:
        if any(name.encode() in serialized for name in _ENGINE_ONLY):
            return serialized
        span = Span.FromString(serialized)
        attributes = {attribute.key: attribute.value for attribute in span.attributes}
        reader = self._readers.get(attributes[semconv.HTTP_ROUTE].string_value) if semconv.HTTP_ROUTE in attributes else None
        whole = semconv.RESPONSE_JSON in attributes and semconv.REQUEST_JSON in attributes
        if reader is None or not whole or {semconv.REDACTED, semconv.ERROR_TYPE, semconv.ABORTED} & attributes.keys():
            return serialized
        try:
            request, response = (
                msgspec.json.decode(attributes[name].string_value, type=_Json) for name in (semconv.REQUEST_JSON, semconv.RESPONSE_JSON)
            )
            ids = self._ids(reader(request, response))
        except Exception as error:  # templates raise any error, and an upstream's answer may hold anything
            log.warning("a call of %s could not be retokenised (%s): it is stored without ids", span.name, type(error).__name__)
            return serialized
        kept = [attribute for attribute in span.attributes if attribute.key not in _REPLACED]
        del span.attributes[:]
        span.attributes.extend(kept)
        # Fields that are repeated may follow one another in any order.
        return span.SerializeToString() + b"".join(otlp.message(9, otlp.attribute(key, value)) for key, value in ids.items())

    def _ids(self, texts: _Texts) -> dict[str, otlp.Value]:
        prompts = [self._tokenizer.encode(text, add_special_tokens=texts.special_tokens) for text in texts.prompts]
        answers = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts.answers]
        return {
            semconv.INPUT_TOKEN_IDS: _packed(prompts),
            semconv.INPUT_LENGTHS: [len(prompt) for prompt in prompts],
            semconv.OUTPUT_TOKEN_IDS: _packed(answers),
            semconv.OUTPUT_LENGTHS: [len(answer) for answer in answers],
            semconv.IDS_SOURCE: RETOKENIZED,
            semconv.TOKENIZER_HASH: self._name,
        }

    def _chat(self, request: _Json, response: _Json) -> _Texts:
        return self._templated(request["messages"], [choice["message"] for choice in response["choices"]], request.get("tools"))

    def _messages(self, request: _Json, response: _Json) -> _Texts:
        if request.get("tools"):
            raise ValueError("chat templates do not read tools in Anthropic's form")
        system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
        return self._templated([*system, *request["messages"]], [{"role": "assistant", "content": response["content"]}], None)

    def _templated(self, messages: Sequence[_Json], answers: Sequence[_Json], tools: Sequence[_Json] | None) -> _Texts:
        conversation = [_plain(message) for message in messages]
        prompt = self._render(conversation, tools, prompting=True)
        return _Texts([prompt], [self._answer(conversation, _plain(answer), tools, prompt) for answer in answers], special_tokens=False)

    def _answer(self, conversation: list[_Json], answer: _Json, tools: Sequence[_Json] | None, prompt: str) -> str:
        """Return the text of an answer; tool calls as the template writes them after the prompt."""
        if not answer.get("tool_calls"):
            return answer["content"]
        whole = self._render([*conversation, answer], tools, prompting=False)
        if not whole.startswith(prompt):
            raise ValueError("the template writes the prompt differently below an answer")
        return whole[len(prompt) :]

    def _render(self, messages: list[_Json], tools: Sequence[_Json] | None, *, prompting: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompting, tokenize=False)


def load(directory: Path) -> Retokenizer:
    """Load the tokenizer of a model directory; takes seconds.

    Raises:
        GatewayError: transformers is not installed, or the directory holds no tokenizer with a chat template.
    """
    unusable = f"gateway.retokenize = {str(directory)!r} holds no tokenizer that can be used"
    try:
        name = tokenizer_hash(directory)
    except CheckpointError as error:
        raise GatewayError(f"{unusable}: {error}") from None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise GatewayError(
            "gateway.retokenize needs transformers, which the extra `trainer` brings: pip install 'spangrad-server[trainer]'."
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise GatewayError(f"{unusable}: {error}") from None
    if not tokenizer.chat_template:
        raise GatewayError(f"gateway.retokenize = {str(directory)!r} holds no chat template. Put its chat_template.jinja there.")
    return Retokenizer(cast("Tokenizer", tokenizer), name)


def _completions(request: _Json, response: _Json) -> _Texts:
    prompts = request["prompt"] if isinstance(request["prompt"], list) else [request["prompt"]]
    return _Texts([_text(prompt) for prompt in prompts], [_text(choice["text"]) for choice in response["choices"]], special_tokens=True)


def _plain(message: _Json) -> _Json:
    """Return a message as chat templates read it: its content one text, the arguments of its tools decoded.

    Raises:
        ValueError: it holds something else than text and tool calls.
    """
    plain = {name: value for name, value in message.items() if value is not None} | {"content": _content(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_decoded(call) for call in message["tool_calls"]]
    return plain


def _content(content: object) -> str:
    if not isinstance(content, list):
        return _text("" if content is None else content)
    parts = cast("list[_Json]", content)
    if any(part["type"] != "text" for part in parts):
        raise ValueError("a part is no text")
    return "".join(_text(part["text"]) for part in parts)


def _decoded(call: _Json) -> _Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"] or "{}")}}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is none")
    return value


def _packed(ids: list[list[int]]) -> bytes:
    flat = [token for sequence in ids for token in sequence]
    return struct.pack(f"<{len(flat)}I", *flat)
