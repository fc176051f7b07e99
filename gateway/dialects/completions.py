"""`/v1/completions`: p prompts with n choices each; ids in fields of vLLM's, asked for in the request.

In: choices of answers and chunks. Out: their prompts' and their own ids, logprobs and finish reasons, and a stream's
texts assembled. Invariant: that of `gateway.dialects.choices`; an answer that echoes its prompt has no record of
ids, since vLLM leaves the echo out where ids are asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.answer import Choice, EngineAnswer, Index, Logprob, TokenId
from gateway.dialects.base import NULL, ClientRequest, Fields
from gateway.dialects.choices import ChoicesDialect
from gateway.vllm_plugin.request_fields import COMPLETIONS_PATH

CHOICES_FORESEEN = 1024
"""Largest number of choices for which a stream's answer is prepared before it begins; a call may ask for more than the store can number."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[Logprob | None] | None = None


class CompletionsDialect(ChoicesDialect):
    """OpenAI's completions."""

    path = COMPLETIONS_PATH
    operation = "text_completion"
    conversation = frozenset({"prompt"})

    def begin(self, request: ClientRequest) -> EngineAnswer:
        """See `ChoicesDialect`. No choice of a cut stream may be missing, or others would be taken for its prompt's."""
        prompts = _prompts(request)
        choices = prompts * _choices_each(request)
        if 1 < choices <= CHOICES_FORESEEN and not request.fields.get("echo"):
            return EngineAnswer(prompts=[[] for _ in range(prompts)], choices={index: Choice() for index in range(choices)})
        return EngineAnswer()

    def read_choice(self, answer: EngineAnswer, fields: Fields, request: ClientRequest) -> bool:
        """See `ChoicesDialect`."""
        # All of it is read before anything is kept: what is no choice leaves no trace.
        index = msgspec.json.decode(fields["index"], type=Index)
        text = msgspec.json.decode(fields.get("text", NULL), type=str | None)
        reason = msgspec.json.decode(fields.get("finish_reason", NULL), type=str | None)
        token_ids = msgspec.json.decode(fields.get("token_ids", NULL), type=list[TokenId] | None)
        logprobs = msgspec.json.decode(fields.get("logprobs", NULL), type=_Logprobs | None)
        prompt_ids = msgspec.json.decode(fields.get("prompt_token_ids", NULL), type=list[TokenId] | None)
        choice = answer.choices.setdefault(index, Choice())
        choice.message["text"] = choice.message.get("text", "") + (text or "")
        choice.finish_reason = reason or choice.finish_reason
        if not request.fields.get("echo"):
            choice.token_ids += token_ids or []
            choice.logprobs += [value for value in (logprobs.token_logprobs if logprobs else None) or [] if value is not None]
            if prompt_ids:
                prompt_index = index // _choices_each(request)
                answer.prompts += [[] for _ in range(prompt_index + 1 - len(answer.prompts))]
                answer.prompts[prompt_index] = prompt_ids
        return True

    def whole(self, answer: EngineAnswer) -> dict[str, Any]:
        """See `ChoicesDialect`."""
        choices = [
            {"index": index, "text": choice.message.get("text", ""), "finish_reason": choice.finish_reason}
            for index, choice in sorted(answer.choices.items())
        ]
        return {"id": answer.id, "object": "text_completion", "model": answer.model, "choices": choices, "usage": answer.usage}


def _choices_each(request: ClientRequest) -> int:
    """Return the number of choices that each prompt gets."""
    asked = request.fields.get("n")
    return asked if isinstance(asked, int) and asked > 0 else 1


def _prompts(request: ClientRequest) -> int:
    """Return the number of prompts: 1 for a text or a list of token ids, else the length of the list of such."""
    prompt = bytes(request.fields.get("prompt", b""))
    if not prompt.startswith(b"["):
        return 1
    parts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return len(parts) if parts and bytes(parts[0])[:1] in (b'"', b"[") else 1
