"""One session's environment with several players: a request has the actions of those whose turn it is, a response what each player gets.

In: requests as those of a session with one player, but `{"actions": {ROLE: ACTION}}` or `{"forfeit": ROLE}` as a step's action.
Out: responses with `{"acting": [ROLE], "players": {ROLE: {"observation", "reward", "done", "content"?}}}` as observation; a role to which
nothing happened is left out. Invariant: the environment gets the actions of exactly the roles that it named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.sessions.instance import Call, Played, SessionInstance
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening
from runner.sessions.step_spans import PlayedSpans
from spangrad.episode.environment import (
    Environment,
    StepResult,
    acting_of,
    as_text,
    checked_by_role,
    checked_observations,
    checked_turn,
    member,
    rendered,
)
from spangrad.episode.openenv_fields import ACTING, ACTIONS, CONTENT, FORFEIT, PLAYERS, observation_fields
from spangrad.errors import EnvironmentsError


@dataclass(frozen=True, slots=True)
class Forfeit:
    """Action of a role that gives none."""

    role: str


class PlayersInstance(SessionInstance):
    """Environment of a session with roles."""

    def __init__(self, environment: Environment, opening: SessionOpening, spans: PlayedSpans, call: Call, number: int) -> None:
        super().__init__(environment, opening, spans, call, number)
        self._roles: Sequence[str] = tuple(member(environment, "roles"))
        self._acting: Sequence[str] = ()
        self._over = set[str]()
        """Roles for which the episode has ended."""

    async def _action(self, data: Mapping[str, Any]) -> Any:
        match data:
            case {"forfeit": str(role)} if len(data) == 1 and role in self._acting:
                return Forfeit(role)
            case {"actions": dict(actions)} if len(data) == 1 and set(actions) == set(self._acting):
                return {role: await self._action_of(role, actions[role]) for role in self._acting}
            case _:
                pass
        acting = ", ".join(self._acting) or "nobody"
        sentence = f"the turn is that of {acting}. "
        sentence += f"Send {{{ACTIONS!r}: ...}} with an action of each, or {{{FORFEIT!r}: ...}} with such a role"
        raise SessionError(ErrorCode.VALIDATION_ERROR, sentence)

    async def _action_of(self, role: str, fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"Invalid action: that of {role} is no object. Send {{'text': ...}}", role=role)
        try:
            return await super()._action(fields)
        except SessionError as error:
            raise SessionError(error.code, str(error), role=role) from error

    async def _played_reset(self, task: Any, *, traced: bool) -> Played:
        observations = checked_observations(self._name, await self._call(lambda: self._environment.reset(task)), self._roles)
        self._over = set()
        return await self._for_all({role: StepResult(observation) for role, observation in observations.items()})

    async def _played_step(self, action: Any, *, traced: bool) -> Played:
        if isinstance(action, Forfeit):
            forfeit = getattr(self._environment, FORFEIT, None)
            if forfeit is None:
                raise EnvironmentsError(f"{self._name} has no method forfeit(role), so that {action.role} cannot forfeit. Write one.")
            results = checked_by_role(f"{self._name}.forfeit", await self._call(lambda: forfeit(action.role)), self._roles)
        else:
            results = checked_by_role(f"{self._name}.step", await self._call(lambda: self._environment.step(action)), self._roles)
        self._over |= {role for role, result in results.items() if result.done}
        return await self._for_all(results)

    async def _for_all(self, results: Mapping[str, StepResult]) -> Played:
        """Return what the roles get as one result."""
        players: dict[str, dict[str, Any]] = {}
        shown: dict[str, str] = {}
        for role, result in results.items():
            player: dict[str, Any] = {"observation": None, "reward": result.reward, "done": result.done}
            if result.observation is not None:
                content, metadata = await self._shown(result.observation, traced=False)
                player |= {"observation": observation_fields(result.observation), **metadata}
                shown[role] = as_text(content if CONTENT in metadata else rendered(result.observation))
            players[role] = player
        is_over = self._over >= set(self._roles)
        self._acting = () if is_over else checked_turn(self._name, await self._call(acting_of(self._environment)), self._roles)
        if ended := [role for role in self._acting if role in self._over]:
            raise EnvironmentsError(f"{self._name}.acting named {ended[0]}, for whom the episode has ended. Leave it out.")
        return Played(StepResult({ACTING: list(self._acting), PLAYERS: players}, None, is_over), as_text(rendered(shown)), {})
