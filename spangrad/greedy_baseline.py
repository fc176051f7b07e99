"""Decision whether a task's rollouts are compared with a greedy baseline, a rollout at temperature 0.

In: settings, a mode. Out: True or False. Invariant: never True without the gateway, which alone makes an agent's calls greedy.
"""

from __future__ import annotations

from spangrad.errors import SettingsError
from spangrad.settings import Settings
from spangrad.types import Mode


def wants_greedy(settings: Settings, mode: Mode) -> bool:
    """Return whether a group of that mode has a greedy rollout: runner.greedy_rollouts, else as trainer.credit.estimator needs it.

    Raises:
        SettingsError: without the gateway an agent cannot be made to sample at temperature 0.
    """
    configured = settings.runner.greedy_rollouts
    greedy = mode is Mode.TRAIN and (settings.trainer.credit.estimator == "remax" if configured is None else configured)
    if greedy and not settings.runner.gateway:
        raise SettingsError(
            "runner.greedy_rollouts needs the gateway, which alone makes an agent's calls greedy. Set runner.gateway = true, or "
            "runner.greedy_rollouts = false and trainer.credit.estimator to another than 'remax'."
        )
    return greedy
