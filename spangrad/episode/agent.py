"""The agent without code: plays an episode in the environment that it is given, with the policy (`spangrad run --environment`).

In: a task's input, and the attempt's environment and endpoint. Out: spans, with the rewards of the steps.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from spangrad.episode.endpoint_model import EndpointModel
from spangrad.episode.environment import EnvironmentCalls
from spangrad.episode.episode import Episode, EpisodeLimits

REFERENCE = "spangrad.episode.agent:play"
VARIABLE = "SPANGRAD_EPISODE"
"""Environment variable with the settings `runner.episode`, as JSON."""


async def play(task: Any, environment: EnvironmentCalls, endpoint: str) -> None:
    """Play one episode of an attempt."""
    settings: dict[str, Any] = json.loads(os.environ[VARIABLE])
    limits = EpisodeLimits(**{each.name: settings.pop(each.name) for each in fields(EpisodeLimits)})
    model = EndpointModel(endpoint, os.environ["OPENAI_API_KEY"], settings.pop("model"), sampling=settings)
    await Episode(environment, model, limits).run(task)
