"""Laws of matches for random games and faults: returns of zero-sum games, order of turns, ends; whatever dies, and when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad import semconv
from spangrad.episode.environment import EnvironmentCalls, StepResult
from spangrad.episode.match import Match, MatchOutcome, PlayerState
from spangrad.episode.player import EpisodeEnd, EpisodeLimits, ModelReply, ReplyRequest
from spangrad.errors import EngineError, EnvironmentsError
from tests.support.virtual_time import run_in_virtual_time

ROLES = ("a", "b", "c")
ATTEMPTS = 2
"""Attempts of an episode, as a runner makes them."""


class Fault(Enum):
    """Behaviour of a player in place of a reply."""

    SILENT = "silent"
    DIES = "dies"
    OVERFLOWS = "overflows"


@dataclass(frozen=True)
class Turn:
    """A turn that was drawn beforehand."""

    acting: frozenset[str]
    rewards: tuple[float | None, ...]
    """Reward of each role; those that are not None add up to 0."""
    leaving: frozenset[str] = frozenset()
    """Roles for which the episode ends with this turn."""
    crashes: str = ""
    """`before` or `after` the environment has applied it, its process dies."""


@dataclass
class Voice:
    """Model of a player, which replies with its name, after some turns of the event loop; or fails."""

    name: str
    plan: Sequence[int | Fault]
    contexts: list[tuple[Mapping[str, object], ...]] = field(default_factory=list[tuple[Mapping[str, object], ...]])
    is_asked: bool = False

    async def reply(self, request: ReplyRequest) -> ModelReply:
        assert not self.is_asked, "asked twice at once"
        self.contexts.append(tuple(request.messages))
        number = len(self.contexts) - 1
        action = self.plan[number] if number < len(self.plan) else 0
        self.is_asked = True
        try:
            if action is Fault.SILENT:
                await asyncio.Event().wait()
            if isinstance(action, int):
                for _ in range(action):
                    await asyncio.sleep(0)
            if action is Fault.DIES:
                raise EngineError("the model's endpoint does not answer.")
            if action is Fault.OVERFLOWS:
                raise EngineError("400: This model's maximum context length is 64 tokens.")
        finally:
            self.is_asked = False
        return ModelReply({"role": "assistant", "content": self.name}, "stop", f"{self.name} {number}", 1)


class Market:
    """A zero-sum game whose turns are drawn beforehand, and which checks what it is asked for."""

    roles = ROLES

    def __init__(self, name: str, turns: Sequence[Turn], *, has_forfeits: bool = True) -> None:
        self.name, self.turns, self.at = name, turns, 0
        self.applied: list[int] = []
        self.match: Match | None = None
        if not has_forfeits:
            self.forfeit = None

    async def reset(self, task: object) -> dict[str, str]:
        return {role: f"{self.name} for {role}" for role in ROLES}

    async def acting(self) -> tuple[str, ...]:
        return tuple(sorted(self.turns[self.at].acting))

    async def step(self, actions: Mapping[str, str]) -> dict[str, StepResult]:
        assert actions == {role: f"{self.name} {role}" for role in self.turns[self.at].acting}, "acted out of turn"
        return self._apply()

    async def forfeit(self, role: str) -> dict[str, StepResult]:
        assert role in self.turns[self.at].acting
        return self._apply()

    def _apply(self) -> dict[str, StepResult]:
        assert self.match is not None
        assert PlayerState.RUNNING not in self.match.states.values(), "stepped while a player runs"
        number, turn = self.at, self.turns[self.at]
        if turn.crashes == "before":
            raise EnvironmentsError("the process of the environment has ended.")
        self.at += 1
        self.applied.append(number)
        if turn.crashes == "after":
            raise EnvironmentsError("the process of the environment has ended.")
        is_last = self.at == len(self.turns)
        return {
            role: StepResult(f"{self.name} for {role}", reward, is_last or role in turn.leaving)
            for role, reward in zip(ROLES, turn.rewards, strict=True)
        }


SUBSETS = [frozenset(role for place, role in enumerate(ROLES) if number >> place & 1) for number in range(1, 2 ** len(ROLES))]
VALUES = st.sampled_from([(0.0, 0.0), (1.0, -1.0), (-0.25, 0.0), (0.5, 0.75), (0.0, -1.0), (0.25, -0.5)])
"""Rewards of the first two roles, in quarters."""


@st.composite
def games(draw: st.DrawFn, crashes: Sequence[str]) -> list[Turn]:
    """Draw the turns of a game in which roles may leave early."""
    turns: list[Turn] = []
    playing = frozenset(ROLES)
    for _ in range(draw(st.integers(1, 6))):
        acting = draw(st.sampled_from([subset for subset in SUBSETS if subset <= playing]))
        first, second = draw(VALUES)
        leaving = draw(st.sampled_from([frozenset[str](), frozenset(sorted(playing)[:1])])) if len(playing) > 1 else frozenset[str]()
        rewards = tuple(value or None for value in (first, second, -first - second))
        turns.append(Turn(acting, rewards, leaving, draw(st.sampled_from(crashes))))
        playing -= leaving
    return turns


LIMITS = st.builds(
    EpisodeLimits,
    turns=st.none() | st.integers(1, 4),
    tokens=st.none() | st.integers(1, 6),
    turn_seconds=st.just(10.0),
)


def plans(*faults: Fault) -> st.SearchStrategy[list[int | Fault]]:
    """Draw what a player does, reply by reply; most are replies."""
    return st.lists(st.sampled_from([*range(6), *range(6), *faults]), max_size=5)


def set_up(name: str, turns: Sequence[Turn], players: Sequence[Sequence[int | Fault]], limits: EpisodeLimits, **facts: bool) -> Market:
    """A match of a market, which is its `match`."""
    market = Market(name, turns, **facts)
    voices = {role: Voice(f"{name} {role}", plan) for role, plan in zip(ROLES, players, strict=True)}
    market.match = Match(EnvironmentCalls(market), voices, limits)  # pyright: ignore[reportArgumentType]
    return market


def recorded(exporter: InMemorySpanExporter) -> Counter[str]:
    """Returns by role, as the spans have them."""
    sums = Counter[str]()
    for span in exporter.get_finished_spans():
        for event in span.events:
            if event.name != semconv.EVALUATION_EVENT:
                continue  # the exception of a player that dies
            attributes = dict(event.attributes or {})
            sums[str(attributes[semconv.REWARD_ROLE])] += float(str(attributes[semconv.EVALUATION_SCORE]))
    return sums


@settings(max_examples=200, deadline=None)
@given(games([""]), st.tuples(*[plans(*Fault)] * 3), LIMITS, st.booleans())
def test_match_recorded_returns_of_zero_sum_games_add_to_zero(
    turns: list[Turn], players: tuple[list[int | Fault], ...], limits: EpisodeLimits, has_forfeits: bool
) -> None:
    """Shaped rewards, those before a role's first reply, forfeits, ends by limits, and players that die."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
        market = set_up("m", turns, players, limits, has_forfeits=has_forfeits)
        assert market.match is not None
        try:
            outcome = run_in_virtual_time(market.match.run(None))
        except EngineError:
            outcome = None
    returns = recorded(exporter)
    assert sum(returns.values()) == 0
    if outcome is not None:
        assert returns == Counter(outcome.returns)
    rewards = [turn.rewards[: len(ROLES)] for turn in turns[: market.at]]
    assert returns == Counter({role: sum(of[at] or 0.0 for of in rewards) for at, role in enumerate(ROLES)})


Attempt = tuple[list[Turn], tuple[list[int | Fault], ...], int | None]
"""Turns, what each player does, and the turn of the event loop in which the coordinator is killed."""
ATTEMPT = st.tuples(
    games(["", "", "", "", "before", "after"]),
    st.tuples(*[plans(Fault.SILENT, Fault.DIES)] * 3),
    st.none() | st.integers(0, 40),
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.lists(ATTEMPT, min_size=1, max_size=ATTEMPTS), min_size=1, max_size=2))
def test_match_no_interleaving_of_kills_acts_out_of_turn_or_deadlocks(episodes: list[list[Attempt]]) -> None:
    """Episodes side by side, whose players, environments and coordinators die; what dies is tried again, as a runner does."""
    markets: list[Market] = []

    async def episode(number: int, attempts: Sequence[Attempt]) -> MatchOutcome | None:
        for attempt, (turns, players, killed_at) in enumerate(attempts):
            market = set_up(f"{number}.{attempt}", turns, players, EpisodeLimits(turn_seconds=10))
            markets.append(market)
            assert market.match is not None
            task = asyncio.create_task(market.match.run(None))
            if killed_at is not None:
                for _ in range(killed_at):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                return await task
            except (EngineError, EnvironmentsError):
                continue
            except asyncio.CancelledError:
                assert killed_at is not None
        return None

    async def play() -> list[MatchOutcome | None]:
        outcomes = await asyncio.gather(*(episode(number, attempts) for number, attempts in enumerate(episodes)))
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a player goes on after its match"
        return outcomes

    outcomes = run_in_virtual_time(play())
    for outcome in outcomes:
        if outcome is not None:
            assert outcome.end is EpisodeEnd.DONE
            assert sum(outcome.returns.values()) == 0
    for market in markets:
        assert market.match is not None
        assert market.applied == list(range(market.at)), "a step is played once, in its order"
        assert PlayerState.RUNNING not in market.match.states.values()
        for role, player in market.match._players.items():
            voice = player._model
            assert isinstance(voice, Voice)
            assert not voice.is_asked
            users = [line for message in player.messages if message["role"] == "user" for line in message["content"].split("\n")]
            assert set(users) <= {f"{market.name} for {role}"}, "it observes its own episode and role alone"
            replies = {message["content"] for message in player.messages if message["role"] == "assistant"}
            assert replies <= {voice.name}
            for earlier, later in zip(voice.contexts, voice.contexts[1:], strict=False):
                assert later[: len(earlier)] == earlier
