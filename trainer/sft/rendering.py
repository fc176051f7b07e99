"""Messages and texts as token ids, by the policy's own tokenizer and chat template, for rows that hold no ids.

In: a model directory; conversations that say which replies are trained. Out: token ids with a mask. Invariant: the mask is 1 on what the
model itself would have said: from the end of the template's generation prompt to the token that ends the reply, and on nothing else. What
stands before a reply is what an engine would have been asked with: where a template writes earlier turns otherwise than it wrote them when
they were last (reasoning left out, say), the reply begins a sequence of its own.

A reply and what stands before it are tokenised apart, as an engine does it: the seam is where sampling began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spangrad.errors import TrainerError

Message = Mapping[str, Any]


class UnfitRowError(Exception):
    """A row that cannot be trained; the text is the reason by which it is counted."""


@dataclass(slots=True)
class Tokens:
    """One sequence."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    """1 on tokens that are trained."""

    def extend(self, ids: Sequence[int], trained: int) -> None:
        """Add tokens that all are, or are not, trained."""
        self.ids += ids
        self.mask += [trained] * len(ids)


@dataclass(slots=True)
class _Spoken:
    """A sequence, and the text that it stands for."""

    tokens: Tokens = field(default_factory=Tokens)
    text: str = ""


class Renderer:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, model: Path) -> None:
        """Load nothing yet: rows with ids need no tokenizer."""
        self._model = model

    def conversation(self, messages: Sequence[Message], trained: Sequence[bool], tools: Sequence[Any] | None) -> list[Tokens]:
        """Messages as sequences; what follows the last trained reply is left out.

        Args:
            messages: as OpenAI writes them.
            trained: one a message, whether it is a reply that is trained.
            tools: what the model was offered.

        Raises:
            UnfitRowError: the template refuses the messages, or writes a reply otherwise than a model would have said it.
        """
        made: list[_Spoken] = []
        plain = [_plain(one) for one in messages]
        for at in (at for at, one in enumerate(trained) if one):
            asked = self._text(plain[:at], tools, generation=True)
            answered = self._text(plain[: at + 1], tools, generation=False)
            if not answered.startswith(asked) or answered == asked:
                raise UnfitRowError("reply_not_after_generation_prompt")
            if not made or not asked.startswith(made[-1].text):
                made.append(_Spoken())
            spoken = made[-1]
            spoken.tokens.extend(self._ids(asked[len(spoken.text) :]), 0)
            self._reply(spoken.tokens, self._ids(answered[len(asked) :]))
            spoken.text = answered
        return [one.tokens for one in made]

    def completion(self, prompt: str, reply: str) -> Tokens:
        """A text that goes on where another ends, as /v1/completions has it; its end is trained."""
        made = Tokens()
        made.extend(self._tokenizer(prompt)["input_ids"], 0)
        end = self._tokenizer.eos_token_id
        made.extend([*self._ids(reply), *([] if end is None else [end])], 1)
        return made

    def _reply(self, tokens: Tokens, ids: list[int]) -> None:
        """Add a reply; what the template writes after its end (a line break, mostly) no model says."""
        ends = [at for at, one in enumerate(ids) if one in self._ends]
        said = ends[-1] + 1 if ends else len(ids)
        tokens.extend(ids[:said], 1)
        tokens.extend(ids[said:], 0)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, KeyError, TypeError, AttributeError, IndexError) as error:  # whatever a template does with odd messages
            raise UnfitRowError("refused_by_chat_template") from error

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)

    def require_template(self) -> None:
        """See that messages can be rendered.

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
        """Ids that end a reply: the tokenizer's, and those at which engines stop (generation_config.json)."""
        ends = {self._tokenizer.eos_token_id}
        file = self._model / "generation_config.json"
        named = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        ends |= set(named) if isinstance(named, list) else {named}
        return frozenset(one for one in ends if one is not None)


def _plain(message: Message) -> dict[str, Any]:
    """A message as vLLM hands it to templates: text in one piece, arguments of tool calls as objects, no weight."""
    plain = {name: value for name, value in message.items() if name != "weight"}
    plain["content"] = _text_of(message.get("content"))
    if message.get("tool_calls"):
        plain["tool_calls"] = [_parsed(one) for one in message["tool_calls"]]
    return plain


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        return "\n".join(one["text"] for one in content)
    raise UnfitRowError("not_text")


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
