"""The agent without code: plays an episode in the environment that it is given, with the policy (`spangrad run --environment`).

In: a task's input, and the attempt's environment and endpoint. Out: spans, with the rewards of the steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from spangrad.episode.endpoint_model import EndpointModel
from spangrad.episode.environment import EnvironmentCalls
from spangrad.episode.episode import Episode
from spangrad.episode.match import Match
from spangrad.episode.player import EpisodeLimits, ReplyModel
from spangrad.episode.script import ScriptModel
from spangrad.errors import SettingsError

REFERENCE = "spangrad.episode.agent:play"
VARIABLE = "SPANGRAD_EPISODE"
"""Environment variable with the settings `runner.episode`, as JSON."""


async def play(task: Any, environment: EnvironmentCalls, endpoint: str) -> None:
    """Play one episode of an attempt."""
    settings: dict[str, Any] = json.loads(os.environ[VARIABLE])
    key = os.environ["OPENAI_API_KEY"]
    if environment.roles:
        await Match(environment, models_of(environment.roles, settings, endpoint, key), limits_of(settings)).run(task)
    else:
        await Episode(environment, policy_of(settings, endpoint, key), limits_of(settings)).run(task)


def policy_of(settings: Mapping[str, Any], url: str, key: str) -> EndpointModel:
    """Return the model behind an endpoint, as the settings `runner.episode` say."""
    return EndpointModel(url, key, settings["model"], {"temperature": settings["temperature"]})


def models_of(roles: Sequence[str], settings: Mapping[str, Any], url: str, key: str) -> dict[str, ReplyModel]:
    """Return the model or script of each role's player, as the settings `runner.episode` say.

    Raises:
        SettingsError: a script cannot be imported, or a player has no role of the environment.
    """
    unknown = [role for role in settings["players"] if role not in roles]
    if unknown:
        raise SettingsError(
            f"runner.episode.players has {unknown[0]!r}, and the environment's roles are {', '.join(roles)}. Name one of them."
        )

    def model_of(role: str) -> ReplyModel:
        own = {name: value for name, value in settings["players"].get(role, {}).items() if value is not None}
        return ScriptModel.load(own["script"]) if "script" in own else policy_of({**settings, **own}, url, key)

    return {role: model_of(role) for role in roles}


def limits_of(settings: Mapping[str, Any]) -> EpisodeLimits:
    """Return the limits in the settings `runner.episode`."""
    return EpisodeLimits(**{limit.name: settings[limit.name] for limit in fields(EpisodeLimits)})
