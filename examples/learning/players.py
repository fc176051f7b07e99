"""Runners of the same environment with other players in its roles.

In: settings of a run, players by role. Out: settings of a runner. Invariant: each runner has files of its own, and all write to one run.
"""

from __future__ import annotations

from collections.abc import Mapping

from spangrad.settings import Settings


def with_players(settings: Settings, name: str, players: Mapping[str, object]) -> Settings:
    """Return the settings of a runner whose roles have these players.

    Args:
        settings: of the run.
        name: of the runner, in the directory of its files.
        players: `runner.episode.players`.
    """
    episode = settings.runner.episode.model_validate({**settings.runner.episode.model_dump(), "players": players})
    runner = settings.runner.model_copy(update={"episode": episode, "directory": settings.runner.directory / name})
    return settings.model_copy(update={"runner": runner})
