"""Settings of the runner of agents."""

from __future__ import annotations

from pydantic import Field

from spangrad.settings.section import Section


class RunnerSettings(Section):
    """The runner of agents."""

    run_id: str = "default"
    group_size: int = Field(default=8, ge=1)
    """Rollouts a task."""
    workers: int = Field(default=1, ge=1)
    """Agent processes."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once in each process."""
    max_attempts: int = Field(default=2, ge=1)
    timeout_seconds: float = 300
    gateway: bool = True
    """Agents call the policy through the gateway. False: they call `gateway.engine_url` itself, nobody counts their calls, and a
    rollout is complete when nothing new of it has come for `builder.quiet_seconds`."""
