"""Answers of vLLM with token ids, as agents' own spans hold them."""

from __future__ import annotations

from typing import Any

SAMPLING = {
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 3,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "constrained": True,
}
FIELD: dict[str, Any] = {"policy": "p", "versions": [[[0, 3], [1, 4]], [[0, 4]]], "tokenizer_hash": "tok", "sampling": SAMPLING}
CHOICE: dict[str, Any] = {
    "index": 0,
    "finish_reason": "stop",
    "token_ids": [4, 2**32 - 1],
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.25}]},
}
COMPLETION = {
    "index": 0,
    "finish_reason": "length",
    "prompt_token_ids": [7],
    "token_ids": [8, 9],
    "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]},
}
GENERATIONS = [
    {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5], "finish_reason": "stop"},
    {"prompt_token_ids": [1, 2, 3], "token_ids": [9], "logprobs": [-0.25], "finish_reason": None},
]
