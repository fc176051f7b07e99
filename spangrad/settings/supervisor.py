"""Settings of `spangrad up`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from spangrad.settings.section import Section


class UpSettings(Section):
    """Settings of the supervisor that `spangrad up` runs."""

    directory: Path = Path("data/up")
    """Directory of the services' logs and of the supervisor's status. One supervisor owns it."""
    agent: tuple[str, ...] = ()
    """Arguments of the agent that runs on rollouts: those of `spangrad run --follow-demand` if they name `--tasks`, else those of
    `spangrad worker`. Empty: `spangrad up` runs no agent."""
    engines: int = Field(default=1, ge=1)
    """Number of engines that `spangrad up --ray` places, each on its own GPUs; they register themselves with the gateway."""
    workers: int = Field(default=1, ge=1)
    """Number of `spangrad worker` processes that run the agent."""
