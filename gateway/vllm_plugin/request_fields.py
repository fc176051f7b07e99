"""Additions to a client's request to vLLM: the token ids that it read and sampled, and their logprobs.

In: a request's JSON object. Out: the request that vLLM gets. Invariant: a request that vLLM would refuse is still
refused, in vLLM's own words; and neither the sampled tokens nor their logprobs change.
"""

from __future__ import annotations

from typing import Any

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"

TAPPED_PATHS = frozenset({RESPONSES_PATH, MESSAGES_PATH})
"""Routes that return no ids on request, or not all: their ids are read where vLLM's own code gets them (`tap`)."""


def requests_ids(request: dict[str, Any]) -> bool:
    """Return whether the client itself asks for token ids."""
    return request.get("return_token_ids") not in (None, False)


def requests_logprobs(path: str, request: dict[str, Any]) -> bool:
    """Return whether the client itself asks for logprobs: for a chat, 0 means no; for a completion, the sampled token's alone."""
    logprobs = request.get("logprobs")
    return logprobs is not None if path == COMPLETIONS_PATH else logprobs not in (None, False)


def is_passed_unchanged(path: str, request: dict[str, Any]) -> bool:
    """Return whether nothing is added: vLLM has no field for ids, or would leave out the echo of a prompt if asked for them."""
    return path in TAPPED_PATHS or (path == COMPLETIONS_PATH and bool(request.get("echo")))


def with_ids(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request that also asks for ids and logprobs; the request itself where nothing is added."""
    if is_passed_unchanged(path, request):
        return request
    extended = {**request, "return_token_ids": request["return_token_ids"] if requests_ids(request) else True}
    if request.get("use_beam_search"):
        return extended  # searched, not sampled: its logprobs are of no sampling distribution
    if path == COMPLETIONS_PATH:
        if not requests_logprobs(path, request):
            extended["logprobs"] = 0  # the sampled token's alone
    elif not requests_logprobs(path, request) and not request.get("top_logprobs"):
        # top_logprobs without logprobs is an error of the client's, which vLLM must see to report it.
        extended["logprobs"] = True
    return extended
