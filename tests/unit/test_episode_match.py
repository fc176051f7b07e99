"""Episodes of several players: order of turns, contexts and rewards by role, forfeits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad import semconv
from spangrad.episode.agent import models_of
from spangrad.episode.endpoint_model import EndpointModel
from spangrad.episode.environment import EnvironmentCalls, StepResult
from spangrad.episode.match import Match, MatchOutcome
from spangrad.episode.player import EpisodeEnd, EpisodeLimits, ModelReply, ReplyRequest
from spangrad.episode.script import ScriptModel
from spangrad.errors import EnvironmentsError, SettingsError
from spangrad.settings import Settings

ROLES = ("white", "black")
UNLIMITED = EpisodeLimits()


class Race:
    """White and black count in turns; who says the last number wins, and the other one loses as much."""

    roles = ROLES

    def __init__(self, numbers: int = 3) -> None:
        self.numbers, self.counted = numbers, 0

    def system_prompt(self, role: str) -> str:
        return f"you are {role}"

    def reset(self, task: object) -> dict[str, str]:
        return {"white": "begin", "black": "wait"}

    def acting(self) -> str:
        return ROLES[self.counted % 2]

    def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        ((role, action),) = actions.items()
        self.counted += 1
        return self._told(role, f"{role} said {action}", done=self.counted == self.numbers)

    def _told(self, winner: str, text: str, *, done: bool) -> dict[str, StepResult]:
        values = {role: (1.0 if role == winner else -1.0) for role in ROLES}
        return {role: StepResult(text if role != winner else None, values[role] if done else None, done) for role in ROLES}


class LenientRace(Race):
    """The other one wins where one forfeits."""

    def forfeit(self, role: str) -> dict[str, StepResult]:
        return self._told(ROLES[1 - ROLES.index(role)], f"{role} is late", done=True)


@dataclass
class Voice:
    """Model that says its number of replies, after some turns of the event loop; None: it never replies."""

    name: str
    delays: Sequence[int | None] = ()
    contexts: list[tuple[Mapping[str, Any], ...]] = field(default_factory=list[tuple[Mapping[str, Any], ...]])

    async def reply(self, request: ReplyRequest) -> ModelReply:
        self.contexts.append(tuple(request.messages))
        number = len(self.contexts) - 1
        delay = self.delays[number] if number < len(self.delays) else 0
        if delay is None:
            await asyncio.Event().wait()
        for _ in range(delay or 0):
            await asyncio.sleep(0)
        return ModelReply({"role": "assistant", "content": str(number)}, "stop", f"{self.name}-{number}", 1)


def match(environment: object, voices: Mapping[str, Voice], limits: EpisodeLimits = UNLIMITED) -> Match:
    return Match(EnvironmentCalls(environment), voices, limits)  # pyright: ignore[reportArgumentType]


async def play(environment: object, limits: EpisodeLimits = UNLIMITED, **delays: Sequence[int | None]) -> MatchOutcome:
    return await match(environment, {role: Voice(role, delays.get(role, ())) for role in ROLES}, limits).run(None)


async def test_match_players_act_in_turns_and_see_their_roles_observations() -> None:
    outcome = await play(Race())
    contexts = {role: [(message["role"], message["content"]) for message in messages] for role, messages in outcome.messages.items()}
    assert contexts == {
        "white": [("system", "you are white"), ("user", "begin"), ("assistant", "0"), ("user", "black said 0"), ("assistant", "1")],
        "black": [("system", "you are black"), ("user", "wait\nwhite said 0"), ("assistant", "0"), ("user", "white said 1")],
    }
    assert (outcome.end, outcome.returns) == (EpisodeEnd.DONE, {"white": 1.0, "black": -1.0})
    assert [list(step.actions) for step in outcome.steps] == [["white"], ["black"], ["white"]]


async def test_match_system_prompts_are_awaited_and_come_from_the_environments_thread() -> None:
    class Asking(Race):
        async def system_prompt(self, role: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            return f"you are {role}"

    class Threaded(Race):
        def system_prompt(self, role: str) -> str:
            return f"you are {role}" if threading.current_thread() is not threading.main_thread() else "wrong thread"

    for environment in (Asking(), Threaded()):
        outcome = await play(environment)
        assert [outcome.messages[role][0]["content"] for role in ROLES] == ["you are white", "you are black"]


async def test_match_rewards_are_evaluations_of_their_own_roles_last_replies(episode_spans: InMemorySpanExporter) -> None:
    await play(Race())
    steps = [span for span in episode_spans.get_finished_spans() if span.name == "execute_tool step"]
    rewards = [dict(event.attributes or {}) for span in steps for event in span.events]
    assert rewards == [
        {
            semconv.EVALUATION_NAME: semconv.REWARD_NAME,
            semconv.EVALUATION_SCORE: value,
            semconv.GEN_AI_RESPONSE_ID: response,
            semconv.REWARD_ROLE: role,
        }
        for role, value, response in (("white", 1.0, "white-1"), ("black", -1.0, "black-0"))
    ]
    agents = [
        span.attributes[semconv.GEN_AI_AGENT_NAME] for span in episode_spans.get_finished_spans() if span.name.startswith("invoke_agent")
    ]  # pyright: ignore[reportOptionalSubscript]
    assert agents == ["white", "black", "white"]


async def test_match_late_player_forfeits_by_the_environments_rule() -> None:
    outcome = await play(LenientRace(), EpisodeLimits(turn_seconds=0.05), black=[None])
    assert (outcome.end, outcome.returns) == (EpisodeEnd.DONE, {"white": 1.0, "black": -1.0})
    assert outcome.steps[-1].actions == {"black": None}
    assert outcome.messages["black"][-1]["content"] == "black is late"


async def test_match_late_player_ends_an_environment_without_a_rule() -> None:
    outcome = await play(Race(), EpisodeLimits(turn_seconds=0.05), black=[None])
    assert (outcome.end, outcome.returns, len(outcome.steps)) == (EpisodeEnd.FORFEIT, {}, 1)


@pytest.mark.parametrize("limits", [UNLIMITED, EpisodeLimits(turn_seconds=60)])
async def test_match_script_with_a_timeout_of_its_own_forfeits_nothing(limits: EpisodeLimits) -> None:
    def opponent(messages: Sequence[Mapping[str, Any]]) -> str:
        raise TimeoutError("its server was slow")

    models = {"white": Voice("white"), "black": ScriptModel(opponent)}
    with pytest.raises(TimeoutError, match="its server was slow"):
        await Match(EnvironmentCalls(LenientRace()), models, limits).run(None)  # pyright: ignore[reportArgumentType]


async def test_match_limit_of_turns_is_each_players_own() -> None:
    outcome = await play(Race(9), EpisodeLimits(turns=2))
    assert (outcome.end, {role: len(replies) for role, replies in outcome.replies.items()}) == (EpisodeEnd.TURNS, {"white": 2, "black": 2})


class Wrong(Race):
    """Names a role that does not exist, no role, or one that has ended."""

    def __init__(self, acting: object) -> None:
        super().__init__()
        self._acting = acting

    def acting(self) -> Any:
        return self._acting


@pytest.mark.parametrize(("acting", "message"), [("red", "'red'"), ((), r"\(\)"), (None, "None"), (1, "1")])
async def test_match_roles_that_may_not_act_are_an_error(acting: object, message: str) -> None:
    with pytest.raises(EnvironmentsError, match=rf"Wrong\.acting returned {message}\. Return one or several of white, black"):
        await play(Wrong(acting))


async def test_match_role_that_has_ended_may_not_act() -> None:
    class Lopsided(Race):
        def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
            return {"white": StepResult("over", done=True)}

        def acting(self) -> str:
            return "white"

    with pytest.raises(EnvironmentsError, match="names white, for whom the episode has ended"):
        await play(Lopsided())


@pytest.mark.parametrize("result", [None, {"red": StepResult("")}, {"white": 1}])
async def test_match_step_that_returns_no_results_by_role_is_an_error(result: Any) -> None:
    class Odd(Race):
        def step(self, actions: Mapping[str, str]) -> Any:
            return result

    with pytest.raises(EnvironmentsError, match=r"Odd\.step returned"):
        await play(Odd())


@pytest.mark.parametrize(("observations", "what"), [("begin", "str"), ({"white": "begin", "red": "begin"}, "values of white, red")])
async def test_match_reset_that_returns_no_observations_by_role_is_an_error(observations: Any, what: str) -> None:
    class Odd(Race):
        def reset(self, task: object) -> Any:
            return observations

    with pytest.raises(EnvironmentsError, match=rf"reset returned {what}\. Return what each role observes, by role, of white, black\."):
        await play(Odd())


def test_match_needs_a_player_for_each_role_and_no_tools() -> None:
    with pytest.raises(EnvironmentsError, match="roles white, black, and there are players for white"):
        match(Race(), {"white": Voice("white")})
    tooled = Race()
    setattr(tooled, "tools", [{}])  # noqa: B010 - environments have it as an optional member
    with pytest.raises(EnvironmentsError, match="roles and tools"):
        match(tooled, {role: Voice(role) for role in ROLES})


def test_match_players_are_those_of_the_settings() -> None:
    given_settings = Settings.model_validate(
        {"runner": {"episode": {"players": {"black": {"script": "json:dumps"}, "white": {"model": "old", "temperature": 0.5}}}}}
    )
    episode = json.loads(given_settings.runner.episode.model_dump_json())
    assert models_of(ROLES, episode, "http://gateway/v1", "key") == {
        "white": EndpointModel("http://gateway/v1", "key", "old", {"temperature": 0.5}),
        "black": ScriptModel(json.dumps),
    }
    with pytest.raises(SettingsError, match="has 'white', and the environment's roles are first, black"):
        models_of(("first", "black"), episode, "http://gateway/v1", "key")


async def test_script_writes_replies_from_the_messages() -> None:
    reply = await ScriptModel(lambda messages: len(messages)).reply(ReplyRequest([{}, {}]))
    assert reply == ModelReply({"role": "assistant", "content": "2"}, "stop")


async def test_script_that_raises_stop_iteration_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await asyncio.wait_for(ScriptModel(lambda messages: next(iter(messages))).reply(ReplyRequest([])), 30)


@pytest.mark.parametrize("reference", ["no_such_module:f", "json:no_such_function", "json"])
def test_script_that_cannot_be_imported_is_named(reference: str) -> None:
    with pytest.raises(SettingsError, match=f"the script '{reference}' cannot be imported"):
        ScriptModel.load(reference)
