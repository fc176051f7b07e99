"""Relaxation of the requests of train rollouts: removes what masks or reshapes the token distribution (`gateway.relax`).

In: a client's request, in any dialect, and the names of relaxations. Out: the request that the engine gets, and the names of those that
changed it. Invariant: a value that vLLM would refuse is left for vLLM to refuse, and a request that no relaxation concerns stays the same
object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from gateway.dialects.base import ClientRequest
from spangrad.sampling import as_list, as_object
from spangrad.settings.gateway import Relaxation

_Fields = Mapping[str, Any]

_UNIT = TypeAdapter(Annotated[float, Field(gt=0, le=1)])
_SHIFT = TypeAdapter(Annotated[float, Field(ge=-2, le=2)])
_NEUTRAL: Mapping[str, tuple[float, TypeAdapter[Any]]] = {
    "top_p": (1.0, _UNIT),
    "top_k": (0, TypeAdapter(Annotated[int, Field(gt=0)])),
    "min_p": (0.0, _UNIT),
    "presence_penalty": (0.0, _SHIFT),
    "frequency_penalty": (0.0, _SHIFT),
    "repetition_penalty": (1.0, TypeAdapter(Annotated[float, Field(gt=0)])),
}
"""Request field -> the value that leaves the distribution as it is, and the type of the values that vLLM accepts and that reshape it."""
_FORCED = ("function", "custom")
"""Types of a tool choice that names a tool, in chat and Responses."""
_FORCED_IN_MESSAGES = ("any", "tool")


def relax(request: ClientRequest, names: Iterable[Relaxation]) -> tuple[ClientRequest, tuple[Relaxation, ...]]:
    """Relax a client's request.

    Returns:
        The request for the engine, which keeps the client's own bytes in `client_raw`, and those of `names` that changed something, in
        their order.
    """
    fields, applied = request.fields, list[Relaxation]()
    for name in names:
        changes = _RELAXATIONS[name](fields)
        if changes:
            fields = {**fields, **changes}
            applied.append(name)
    if not applied:
        return request, ()
    client_raw = request.raw if request.client_raw is None else request.client_raw
    return replace(request.changed(fields), client_raw=client_raw), tuple(applied)


def _strict_tools(fields: _Fields) -> dict[str, Any]:
    """Return the tools, with arguments that need not follow their schema; empty: no change.

    `strict` becomes false and is not removed, since Responses clients send the field always and have it repeated in the answer.
    """
    tools = as_list(fields.get("tools"))
    relaxed = [_without_strict(tool) for tool in tools]
    return {"tools": relaxed} if relaxed != tools else {}


def _without_strict(tool: Any) -> Any:
    fields = as_object(tool)
    function = as_object(fields.get("function"))
    changes: dict[str, Any] = {"strict": False} if fields.get("strict") else {}
    if function.get("strict"):
        changes["function"] = {**function, "strict": False}
    return {**fields, **changes} if changes else tool


def _schemas(fields: _Fields) -> dict[str, Any]:
    """Return fields for plain text in place of JSON: `response_format`, `text.format` (Responses), `output_config.format` (Messages)."""
    changes: dict[str, Any] = {}
    if _is_schema(fields.get("response_format")):
        changes["response_format"] = {"type": "text"}
    text, config = as_object(fields.get("text")), as_object(fields.get("output_config"))
    if _is_schema(text.get("format")):
        changes["text"] = {**text, "format": {"type": "text"}}
    if _is_schema(config.get("format")):
        changes["output_config"] = {name: value for name, value in config.items() if name != "format"}
    return changes


def _is_schema(form: Any) -> bool:
    return as_object(form).get("type") in ("json_schema", "json_object")


def _neutral(*names: str) -> Callable[[_Fields], dict[str, Any]]:
    """Return the relaxation that gives sampling parameters their neutral values."""

    def relaxation(fields: _Fields) -> dict[str, Any]:
        return {name: _NEUTRAL[name][0] for name in names if _reshapes(name, fields.get(name))}

    return relaxation


def _reshapes(name: str, value: object) -> bool:
    neutral, accepted = _NEUTRAL[name]
    if value is None:
        return False
    try:
        return bool(accepted.validate_python(value) != neutral)
    except ValidationError:
        return False


def _tool_choice(fields: _Fields) -> dict[str, Any]:
    """Return the tool choice `auto` in place of `required` and of a named tool, in the form of the request's dialect."""
    choice = fields.get("tool_choice")
    named = as_object(choice)
    if choice == "required" or named.get("type") in _FORCED:
        return {"tool_choice": "auto"}
    if named.get("type") in _FORCED_IN_MESSAGES:
        return {"tool_choice": {**{name: value for name, value in named.items() if name != "name"}, "type": "auto"}}
    return {}


_RELAXATIONS: Mapping[Relaxation, Callable[[_Fields], dict[str, Any]]] = {
    "strict_tools": _strict_tools,
    "schemas": _schemas,
    "top_p": _neutral("top_p", "top_k", "min_p"),
    "penalties": _neutral("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "tool_choice": _tool_choice,
}
