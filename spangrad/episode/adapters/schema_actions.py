"""Actions that a JSON schema describes, written as text by a model.

In: a schema of an action's fields, a reply. Out: the fields. Invariant: a reply that fits no action is answered with what would fit, and
does not reach the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from spangrad.episode.environment import StepResult
from spangrad.errors import JSON_ERRORS

_OURS = frozenset({"metadata"})
"""Field of OpenEnv's actions that no model writes."""


@dataclass(frozen=True, slots=True)
class UnusableReply:
    """Action of a reply that fits none."""

    remedy: str
    """Sentence for the model."""

    def result(self) -> StepResult:
        """Return the result of the step: the remedy as the observation."""
        return StepResult(self.remedy)


def fields_of_text(schema: Mapping[str, Any], text: str) -> dict[str, Any] | UnusableReply:
    """Return the fields that a reply means: a JSON object, or the value of the only field."""
    properties = properties_of(schema)
    try:
        value = json.loads(_without_fence(text))
    except JSON_ERRORS:
        value = None
    if isinstance(value, dict) and cast("dict[str, Any]", value).keys() <= properties.keys():
        return cast("dict[str, Any]", value)
    if len(properties) == 1:
        ((name, kind),) = properties.items()
        if kind.get("type") == "string":
            return {name: text}
        number = _number(text, kind.get("type"))
        if number is not None:
            return {name: number}
    return UnusableReply(instruction(schema))


def instruction(schema: Mapping[str, Any]) -> str:
    """Return the sentence by which a model knows its actions."""
    properties = properties_of(schema)
    if len(properties) == 1:
        ((name, kind),) = properties.items()
        if kind.get("type") in ("string", "integer", "number"):
            noun = {"string": "text", "integer": "an integer", "number": "a number"}[kind["type"]]
            return f"Reply with {name}: {kind.get('description') or noun}. Only that."
    fields = {name: {key: kind[key] for key in ("type", "enum", "description") if key in kind} for name, kind in properties.items()}
    return f"Reply with a JSON object of these fields: {json.dumps(fields, ensure_ascii=False)}"


def properties_of(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields that a model writes."""
    return {name: kind for name, kind in schema.get("properties", {}).items() if name not in _OURS}


def described(description: str, schema: Mapping[str, Any]) -> str:
    """Return a system prompt of an environment's description and its actions."""
    return "\n\n".join(text for text in (description.strip(), instruction(schema)) if text)


def _without_fence(text: str) -> str:
    """Return the text of a fenced block, where a reply is one."""
    lines = text.strip().splitlines()
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1] == "```"
    return "\n".join(lines[1:-1]) if fenced else text


def _number(text: str, kind: object) -> float | int | None:
    try:
        return int(text) if kind == "integer" else float(text) if kind == "number" else None
    except ValueError:
        return None
