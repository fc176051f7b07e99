"""Requests of an agent and responses of vLLM, as bytes: the same for every route, except for the response ids.

In: a seed. Out: `Bodies`. Invariant: an answer without what was not asked for is byte by byte the answer with it, less those fields' values
(null, as vLLM writes them), so that what a client gets through the gateway can be compared with what it gets straight from the upstream.

What is realistic: a question of a multi-turn conversation with one tool, 7.7 KB; 300 tokens of answer with ids and logprobs, 43.9 KB whole,
117 KB as a stream of a chunk a token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

POLICY = "policy"
VERSION = 3
TOKENIZER_HASH = "5d41402abc4b2a76b9719d911017c592"
ANSWER_TOKENS = 300
PROMPT_TOKENS = 2000
TURNS = 6
CREATED = 1_760_000_000
ID_PREFIX = "chatcmpl-"
NO_ID = f"{ID_PREFIX}{0:032x}"
"""Stands where the upstream writes an answer's own id, of as many bytes."""
ENGINE_FACTS = {"policy": POLICY, "tokenizer_hash": TOKENIZER_HASH}
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "constrained": False,
}
COMPLETE_FACTS = {**ENGINE_FACTS, "versions": [[[0, VERSION]]], "sampling": SAMPLING}


def answer_id(number: int) -> str:
    """The id of the upstream's answer with this number."""
    return f"{ID_PREFIX}{number:032x}"


@dataclass(frozen=True)
class Bodies:
    """Everything that one seed gives."""

    seed: int = 0

    @cached_property
    def tokens(self) -> list[str]:
        """Texts of the answer's tokens."""
        draw = random.Random(f"{self.seed} tokens")
        return ["".join(draw.choices(" etaoinshrdlu", k=draw.choice((2, 3, 4, 5, 6)))) for _ in range(ANSWER_TOKENS)]

    @cached_property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return random.Random(f"{self.seed} prompt").choices(range(150_000), k=PROMPT_TOKENS)

    @cached_property
    def response_ids(self) -> list[int]:
        """Token ids of the answer."""
        return random.Random(f"{self.seed} response").choices(range(150_000), k=ANSWER_TOKENS)

    @cached_property
    def logprobs(self) -> list[float]:
        """Logprobs of the answer's tokens."""
        draw = random.Random(f"{self.seed} logprobs")
        return [-draw.expovariate(2) for _ in range(ANSWER_TOKENS)]

    @property
    def text(self) -> str:
        """Text of the whole answer."""
        return "".join(self.tokens)

    def request(self, *, stream: bool) -> bytes:
        """Return the agent's request: a few turns of a conversation, and a tool."""
        draw = random.Random(f"{self.seed} request")
        texts = [" ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(185)) for _ in range(TURNS)]
        roles = ["system", *(("user", "assistant") * TURNS)[: TURNS - 1]]
        parameters = {"type": "object", "properties": {"query": {"type": "string", "description": "what to look for"}}}
        function = {"name": "search", "description": "Searches the shop's catalogue.", "parameters": parameters}
        asked: dict[str, Any] = {
            "model": POLICY,
            "messages": [{"role": role, "content": content} for role, content in zip(roles, texts, strict=True)],
            "temperature": 0.8,
            "max_tokens": ANSWER_TOKENS,
            "tools": [{"type": "function", "function": function}],
        }
        return _json(asked | {"stream": True} if stream else asked)

    def whole(self, *, ids: bool, logprobs: bool) -> bytes:
        """Return a response that is not streamed."""
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": self.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": {"content": [self._logprob(place) for place in range(ANSWER_TOKENS)]} if logprobs else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self.response_ids if ids else None,
        }
        return _json(
            {
                "id": NO_ID,
                "object": "chat.completion",
                "created": CREATED,
                "model": POLICY,
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": {
                    "prompt_tokens": PROMPT_TOKENS,
                    "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
                    "completion_tokens": ANSWER_TOKENS,
                    "prompt_tokens_details": None,
                },
                "prompt_logprobs": None,
                "prompt_token_ids": self.prompt_ids if ids else None,
                "kv_transfer_params": None,
                **({"spangrad": COMPLETE_FACTS} if ids else {}),
            }
        )

    def events(self, *, ids: bool, logprobs: bool) -> list[bytes]:
        """The events of a stream, each as vLLM writes it."""
        first = _chunk({"role": "assistant", "content": ""}, None, None, None) | {"prompt_token_ids": self.prompt_ids if ids else None}
        chunks = [first | ({"spangrad": ENGINE_FACTS} if ids else {})]
        chunks += [
            _chunk({"content": token}, place, self.response_ids if ids else None, self._logprob(place) if logprobs else None)
            for place, token in enumerate(self.tokens)
        ]
        if ids:
            chunks[-1]["spangrad"] = COMPLETE_FACTS
        return [b"data: " + _json(chunk) + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]

    def _logprob(self, place: int) -> dict[str, Any]:
        token = self.tokens[place]
        return {"token": token, "logprob": self.logprobs[place], "bytes": list(token.encode()), "top_logprobs": []}


def text_of(events: bytes) -> str:
    """The text that a stream's events say."""
    return "".join(choice["delta"].get("content") or "" for event in _payloads(events) for choice in event["choices"])


def _payloads(events: bytes) -> Iterator[dict[str, Any]]:
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            yield json.loads(event[6:])


def _chunk(delta: dict[str, Any], place: int | None, ids: list[int] | None, logprob: dict[str, Any] | None) -> dict[str, Any]:
    last = place == ANSWER_TOKENS - 1
    choice: dict[str, Any] = {
        "index": 0,
        "delta": delta,
        "logprobs": {"content": [logprob]} if logprob else None,
        "finish_reason": "stop" if last else None,
        **({"stop_reason": None} if last else {}),
        "token_ids": [ids[place]] if ids is not None and place is not None else None,
    }
    return {"id": NO_ID, "object": "chat.completion.chunk", "created": CREATED, "model": POLICY, "choices": [choice]}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
