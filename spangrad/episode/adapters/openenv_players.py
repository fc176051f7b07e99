"""Environment with several players on a server of `spangrad env serve`: one session for all of them.

In: a session with roles, actions by role. Out: observations and results by role. Invariant: whose turn it is, is what the server said last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spangrad.episode.adapters.openenv_server import OpenEnvServer
from spangrad.episode.environment import StepResult
from spangrad.episode.openenv_fields import ACTING, ACTIONS, CONTENT, FORFEIT, PLAYERS, ROLES, action_fields, observation_of


class PlayersOfServer:
    """A session whose environment has roles."""

    def __init__(self, server: OpenEnvServer) -> None:
        self.roles: Sequence[str] = tuple(server.about[ROLES])
        self.forfeit: Callable[[str], Mapping[str, StepResult]] | None = self._forfeit if server.about.get("forfeits") else None
        """Has a role forfeit; None: the environment has no rule for that."""
        self._server = server
        self._acting: Sequence[str] = ()

    def system_prompt(self, role: str) -> str | None:
        """Return the text of a role's system message."""
        return self._server.about["system_prompts"].get(role)

    def reset(self, task: Any) -> dict[str, Any]:
        """Begin an episode; return what each role observes."""
        return {role: result.observation for role, result in self._by_role(self._server.reset(task)).items()}

    def acting(self) -> Sequence[str]:
        """Return the roles whose turn it is."""
        return self._acting

    def step(self, action: Mapping[str, Any]) -> dict[str, StepResult]:
        """Apply the actions of the acting roles."""
        return self._by_role(self._server.step({ACTIONS: {role: action_fields(own) for role, own in action.items()}}).observation)

    def close(self) -> None:
        """End the session."""
        self._server.close()

    def _forfeit(self, role: str) -> dict[str, StepResult]:
        return self._by_role(self._server.step({FORFEIT: role}).observation)

    def _by_role(self, observation: Mapping[str, Any]) -> dict[str, StepResult]:
        self._acting = observation[ACTING]
        return {role: _result(player) for role, player in observation[PLAYERS].items()}


def _result(player: Mapping[str, Any]) -> StepResult:
    fields = player["observation"]
    observation = player[CONTENT] if CONTENT in player else None if fields is None else observation_of(fields)
    return StepResult(observation, player["reward"], player["done"])
