"""Sampling constraints of a request to an OpenAI-compatible server.

In: a request's fields, in any dialect, from the gateway or from a span of the agent's own. Out: whether tokens were masked, forced or
shifted. Invariant: the gateway and direct mode use the same test; what vLLM treats as a constraint is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

CONSTRAINTS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "use_beam_search")
"""Fields that, where set, keep tokens from being sampled, shift their logits, or search instead of sampling."""
_UNLIMITED = (None, -1)
"""Values of a thinking budget that mean no budget."""


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Return whether a request masks or forces tokens: a grammar, a forced tool, banned tokens, a thinking budget."""
    # Fields of chat and completions, of responses, and of messages.
    inner = (as_object(request.get(name)).get("format") for name in ("text", "output_config"))
    forms = (request.get("response_format"), *inner)
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        choice = as_object(cast("object", choice)).get("type", "function")
    return (
        any(as_object(form).get("type", "text") != "text" for form in forms)
        or (isinstance(choice, str) and choice not in ("auto", "none"))
        or (choice != "none" and any(_is_strict(tool) for tool in as_list(request.get("tools"))))
        or any(request.get(name) for name in CONSTRAINTS)
        or any(name.startswith("guided_") and value for name, value in request.items())
        # The tokens that end the thinking are not sampled. Messages name a budget so, which vLLM obeys.
        or request.get("thinking_token_budget") not in _UNLIMITED
        or as_object(request.get("thinking")).get("type") == "enabled"
    )


def _is_strict(tool: object) -> bool:
    """Return whether the engine holds a tool's arguments to their schema."""
    return bool(as_object(tool).get("strict") or as_object(as_object(tool).get("function")).get("strict"))


def as_list(value: object) -> list[Any]:
    """Return a list of the request, or an empty one where the field is no list (vLLM refuses such a request)."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_object(value: object) -> dict[str, Any]:
    """Return an object of the request, or an empty one where the field is no object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
