"""Observations and actions as OpenEnv's protocol has them: JSON objects, which its messages call fields.

In: observations and actions of environments. Out: fields, and back. Invariant: an observation that comes back is equal to that which was
sent, so that the model's context is the same beside a local environment and a remote one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from spangrad.episode.environment import Environment, ToolAction

TEXT, VALUE = "text", "value"
"""Sole field of what is text, and of what is neither text nor an object."""
CONTENT = "content"
"""Key of a result's metadata: content of the message that shows the observation, of environments that render theirs."""
EPISODE_ID = "episode_id"
"""Key of a reset's metadata and request: name of the episode."""
ROLES = "roles"
"""Key of the metadata of an environment with several players: their roles."""
ACTING, PLAYERS = "acting", "players"
"""Keys of an observation of several players: roles whose turn it is, and what each role gets."""
ACTIONS, FORFEIT = "actions", "forfeit"
"""Sole key of an action of several players: their actions by role, or the role that forfeits."""
REWARDS_HEADER = "Spangrad-Rewards"
"""Header of a session's first request; `client`: the client records the rewards, and the server's spans carry none."""


def observation_fields(observation: object) -> dict[str, Any]:
    """Return an observation as fields."""
    if isinstance(observation, str):
        return {TEXT: observation}
    if isinstance(observation, dict):
        fields = cast("dict[str, Any]", observation)
        return {VALUE: fields} if _sole(fields) else fields
    return {VALUE: observation}


def observation_of(fields: Mapping[str, Any]) -> Any:
    """Return the observation that fields hold."""
    name = _sole(fields)
    return fields[name] if name else fields


def action_fields(action: object) -> dict[str, Any]:
    """Return an action as fields; text is for the environment to parse."""
    if isinstance(action, ToolAction):
        return {"type": "call_tool", "tool_name": action.name, "arguments": dict(action.arguments)}
    if isinstance(action, str):
        return {TEXT: action}
    return cast("dict[str, Any]", action) if isinstance(action, dict) else {VALUE: action}


def is_text(fields: Mapping[str, Any]) -> bool:
    """Return whether an action is text, which the environment parses."""
    return _sole(fields) == TEXT and isinstance(fields[TEXT], str)


def action_of(environment: Environment, fields: Mapping[str, Any]) -> Any:
    """Return the action that fields mean, other than text: an environment's own `decode(fields)` comes first."""
    if (decode := getattr(environment, "decode", None)) is not None:
        return decode(fields)
    if fields.get("type") == "call_tool" and isinstance(fields.get("arguments"), dict):
        return ToolAction(str(fields.get("tool_name")), fields["arguments"])
    return fields[VALUE] if _sole(fields) == VALUE else fields


def _sole(fields: Mapping[str, Any]) -> str:
    """Return the name of the sole field, if it is one of ours."""
    name = next(iter(fields)) if len(fields) == 1 else ""
    return name if name in (TEXT, VALUE) else ""
