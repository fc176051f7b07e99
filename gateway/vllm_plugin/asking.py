"""What is asked of vLLM beyond what the client asked: the token ids it read and sampled, and their logprobs.

In: a request's JSON object. Out: the request that vLLM gets. Invariant: a request that vLLM would refuse is still
refused, in vLLM's own words; and what is sampled does not change.
"""

from __future__ import annotations

from typing import Any

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


def asks_ids(request: dict[str, Any]) -> bool:
    """Whether the client itself wants token ids."""
    return request.get("return_token_ids") not in (None, False)


def asks_logprobs(request: dict[str, Any]) -> bool:
    """Whether the client itself wants logprobs (of a chat, where 0 means no)."""
    return request.get("logprobs") not in (None, False)


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Add what was not asked for."""
    asked = {**request, "return_token_ids": request["return_token_ids"] if asks_ids(request) else True}
    if request.get("use_beam_search"):
        return asked  # searched, not sampled: its logprobs are of no sampling distribution
    if path == COMPLETIONS_PATH:
        if request.get("logprobs") in (None, False):
            asked["logprobs"] = 0  # the sampled token's alone
    elif not asks_logprobs(request) and not request.get("top_logprobs"):
        # top_logprobs without logprobs is an error of the client's, which vLLM must see to report it.
        asked["logprobs"] = True
    return asked
