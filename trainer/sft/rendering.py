"""Messages and texts as token ids, by the policy's own tokenizer and chat template, for rows that hold no ids.

In: a model directory; conversations with a mark on each trained reply. Out: token ids with a mask. Invariant: the mask is 1 on the tokens
that the model itself would have sampled: from the end of the template's generation prompt to the token that ends the reply, and on no
other. The text before a reply is the prompt that an engine would have got: where a template renders earlier turns differently than when
they were last (without reasoning, for instance), the reply begins a sequence of its own.

A reply and its prompt are tokenised separately, as in an engine: the seam is where sampling began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spangrad.errors import JSON_ERRORS, TrainerError

Message = Mapping[str, Any]


class UnfitRowError(Exception):
    """Row that cannot be trained; the text is the reason by which it is counted."""


@dataclass(slots=True)
class TokenSequence:
    """Token sequence with its loss mask."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    """1 on tokens that are trained."""

    def extend(self, ids: Sequence[int], trained: int) -> None:
        """Add tokens of which all are trained (1) or none is (0)."""
        self.ids += ids
        self.mask += [trained] * len(ids)


@dataclass(slots=True)
class _RenderedSequence:
    """Sequence, with the text that it encodes."""

    tokens: TokenSequence = field(default_factory=TokenSequence)
    text: str = ""


class Renderer:
    """Tokenizer and chat template of a model directory."""

    def __init__(self, model: Path) -> None:
        """Load nothing yet: rows with ids need no tokenizer."""
        self._model = model

    def conversation(self, messages: Sequence[Message], trained: Sequence[bool], tools: Sequence[Any] | None) -> list[TokenSequence]:
        """Return messages in OpenAI's format as sequences; messages after the last trained reply, which `trained` marks, are left out.

        Raises:
            UnfitRowError: the template refuses the messages, or renders a reply differently than a model would have sampled it.
        """
        sequences: list[_RenderedSequence] = []
        plain = [_plain(message) for message in messages]
        for at in (at for at, is_trained in enumerate(trained) if is_trained):
            prompt = self._text(plain[:at], tools, generation=True)
            rendered = self._text(plain[: at + 1], tools, generation=False)
            if not rendered.startswith(prompt) or rendered == prompt:
                raise UnfitRowError("reply_not_after_generation_prompt")
            if not sequences or not prompt.startswith(sequences[-1].text):
                sequences.append(_RenderedSequence())
            sequence = sequences[-1]
            sequence.tokens.extend(self._ids(prompt[len(sequence.text) :]), 0)
            self._reply(sequence.tokens, self._ids(rendered[len(prompt) :]))
            sequence.text = rendered
        return [sequence.tokens for sequence in sequences]

    def completion(self, prompt: str, reply: str) -> TokenSequence:
        """Return a prompt with its completion, as in /v1/completions; the end-of-sequence token is trained."""
        tokens = TokenSequence()
        tokens.extend(self._ids(prompt, special=True), 0)
        end = self._tokenizer.eos_token_id
        tokens.extend([*self._ids(reply), *([] if end is None else [end])], 1)
        return tokens

    def _reply(self, tokens: TokenSequence, ids: list[int]) -> None:
        """Add a reply; text of the template after its end (mostly a line break) is not trained, as no model samples it."""
        ends = [at for at, token in enumerate(ids) if token in self._ends]
        length = ends[-1] + 1 if ends else len(ids)
        tokens.extend(ids[:length], 1)
        tokens.extend(ids[length:], 0)

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write and no tokenizer reads
            raise UnfitRowError("not_text") from error
        return self._tokenizer(text, add_special_tokens=special)["input_ids"] if text or special else []

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, LookupError, TypeError, AttributeError, ValueError) as error:  # any error of a template with odd messages
            raise UnfitRowError("refused_by_chat_template") from error

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)

    def require_template(self) -> None:
        """Check that messages can be rendered.

        Raises:
            TrainerError: the tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise TrainerError(
                f"{self._model} has no chat template, and the rows hold messages. Put chat_template.jinja there, or train on rows with "
                "token ids (`spangrad export sft-tokens`)."
            )

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Return the ids that end a reply: the tokenizer's, and those at which engines stop (generation_config.json)."""
        ends = {self._tokenizer.eos_token_id}
        file = self._model / "generation_config.json"
        named = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        ends |= set(named) if isinstance(named, list) else {named}
        return frozenset(token for token in ends if token is not None)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as vLLM passes it to templates: text in one piece, arguments of tool calls as objects, no weight."""
    plain = {name: value for name, value in message.items() if name != "weight"}
    plain["content"] = _text_of(message.get("content"))
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise UnfitRowError("unknown_messages")
        plain["tool_calls"] = [_parsed(call) for call in calls]
    return plain


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "\n".join(part["text"] for part in content)
    raise UnfitRowError("not_text")


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except JSON_ERRORS:
        return call
