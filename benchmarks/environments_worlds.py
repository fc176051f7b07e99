"""Environments of the benchmark of served environments: each counts its steps, so that none can be lost or played again unseen."""

from __future__ import annotations

from typing import Any

from spangrad.episode.environment import StepResult


class CountingWorld:
    """World with plain methods."""

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin with no steps."""
        self.name, self.count = task["name"], 0
        return {"name": self.name, "count": 0}

    def step(self, action: dict[str, Any]) -> StepResult:
        """Count a step."""
        self.count += 1
        return StepResult({"name": self.name, "count": self.count, "message": action["message"]}, 1.0)


class AsyncCountingWorld(CountingWorld):
    """World with async methods."""

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Begin with no steps."""
        return super().reset(task)

    async def step(self, action: dict[str, Any]) -> StepResult:  # type: ignore[override]
        """Count a step."""
        return super().step(action)
