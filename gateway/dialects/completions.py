"""`/v1/completions`: p prompts with n choices each; ids in fields of vLLM's, asked for in the request.

In: choices of answers and chunks. Out: their prompts' and their own ids, logprobs and finish reasons, and a stream's
texts assembled. Invariant: that of `gateway.dialects.choices`; an answer that echoes its prompt has no record of
ids, since vLLM leaves the echo out where ids are asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.answer import Alternative, Choice, EngineAnswer, Logprob, TokenAlternatives, TokenId
from gateway.dialects.base import ClientRequest, append_text
from gateway.dialects.choices import ChoicesDialect, KnownAnswer, ReadAnswer, ReadChoice
from gateway.vllm_plugin.request_fields import COMPLETIONS_PATH

CHOICES_FORESEEN = 1024
"""Largest number of choices for which a stream's answer is prepared before it begins; a call may ask for more than the store can number."""


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[Logprob | None] | None = None


class _LogprobsWithAlternatives(msgspec.Struct, gc=False):
    tokens: list[str]
    token_logprobs: list[Logprob]
    top_logprobs: list[dict[str, Logprob]]


class _TextChoice(ReadChoice, gc=False):
    prompt_token_ids: list[TokenId] | UnsetType | None = UNSET
    text: str | UnsetType | None = UNSET


class _Choice(_TextChoice, gc=False):
    logprobs: _Logprobs | UnsetType | None = UNSET


class _ChoiceWithAlternatives(_TextChoice, gc=False):
    """A choice of an answer to a client that asked for alternatives."""

    logprobs: _LogprobsWithAlternatives | UnsetType | None = UNSET


class _KnownChoice(_Choice, forbid_unknown_fields=True, gc=False):
    stop_reason: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    routed_experts: Raw | UnsetType = UNSET


class CompletionsDialect(ChoicesDialect[_Choice | _ChoiceWithAlternatives]):
    """OpenAI's completions."""

    path = COMPLETIONS_PATH
    operation = "text_completion"
    object_type = "text_completion"
    length_fields = ("max_tokens",)
    default_length = 16
    conversation = frozenset({"prompt"})
    read_answer: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ReadAnswer[_Choice])
    read_alternatives = msgspec.json.Decoder(ReadAnswer[_ChoiceWithAlternatives])
    known_answer = msgspec.json.Decoder(KnownAnswer[_KnownChoice])
    choice_in_order = (
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
        *("prompt_logprobs", "prompt_token_ids", "routed_experts"),
    )

    def choices_of(self, request: ClientRequest) -> int:
        """See `Dialect`."""
        return _prompts(request) * super().choices_of(request)

    def wants_alternatives(self, request: ClientRequest) -> bool:
        """See `ChoicesDialect`. Of a completion 0 asks for the sampled token's logprob alone; an echo's would be the prompt's too."""
        return bool(request.fields.get("logprobs")) and not request.fields.get("echo")

    def begin(self, request: ClientRequest) -> EngineAnswer:
        """See `ChoicesDialect`. No choice of a cut stream may be missing, or others would be taken for its prompt's."""
        prompts = _prompts(request)
        choices = prompts * super().choices_of(request)
        if 1 < choices <= CHOICES_FORESEEN and not request.fields.get("echo"):
            return EngineAnswer(prompts=[[] for _ in range(prompts)], choices={index: Choice() for index in range(choices)})
        return EngineAnswer()

    def read_choice(self, answer: EngineAnswer, choice: _Choice | _ChoiceWithAlternatives, request: ClientRequest) -> bool:
        """See `ChoicesDialect`."""
        kept = answer.choices.setdefault(choice.index, Choice())
        append_text(kept.message, "text", choice.text or "")
        kept.finish_reason = choice.finish_reason or kept.finish_reason
        if not request.fields.get("echo"):
            kept.token_ids += choice.token_ids or []
            if isinstance(choice, _ChoiceWithAlternatives) and choice.logprobs:
                answer.add_alternatives(kept, _alternatives(choice.logprobs))
            token_logprobs = (choice.logprobs and choice.logprobs.token_logprobs) or []
            kept.logprobs += [logprob for logprob in token_logprobs if logprob is not None]
            if choice.prompt_token_ids:
                prompt_index = choice.index // super().choices_of(request)
                answer.prompts += [[] for _ in range(prompt_index + 1 - len(answer.prompts))]
                answer.prompts[prompt_index] = choice.prompt_token_ids
        return True

    def content(self, choice: Choice) -> dict[str, Any]:
        """See `ChoicesDialect`."""
        return {"text": choice.message.get("text", "")}


def _alternatives(logprobs: _LogprobsWithAlternatives) -> list[TokenAlternatives]:
    """Return the tokens of a choice with their alternatives, in the form of a chat's; of lists of different lengths, the shortest's."""
    return [
        TokenAlternatives(token, logprob, [Alternative(*other) for other in top.items()])
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=False)
    ]


def _prompts(request: ClientRequest) -> int:
    """Return the number of prompts: 1 for a text or a list of token ids, else the length of the list of such."""
    prompt = bytes(request.fields.get("prompt", b""))
    if not prompt.startswith(b"["):
        return 1
    parts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return len(parts) if parts and bytes(parts[0])[:1] in (b'"', b"[") else 1
