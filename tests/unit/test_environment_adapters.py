"""Environments of other libraries and their references, as environments with reset and step."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from commands.training.agents import agent_spec
from runner.workers.agents import CallableAgent, initialises
from spangrad.agent.failures import failure_of
from spangrad.episode.adapters import openenv_server, server_choice
from spangrad.episode.adapters.gymnasium_class import GymnasiumEnvironment, plain
from spangrad.episode.adapters.openenv_class import OpenEnvEnvironment, action_class_of
from spangrad.episode.adapters.references import adapted, by_openenv, factory_of, is_factory, names_environment
from spangrad.episode.adapters.schema_actions import UnusableReply, fields_of_text, instruction
from spangrad.episode.agent import REFERENCE
from spangrad.episode.environment import EnvironmentCalls, StepResult
from spangrad.errors import EnvironmentsError
from spangrad.settings import RunnerSettings
from spangrad.settings.runner import HandlerSettings
from spangrad.types import AttemptFailure


class Action(BaseModel, extra="forbid"):
    message: str
    metadata: dict[str, Any] = {}


class Observation(BaseModel):
    echoed: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class OpenEnvBase:
    """Methods that OpenEnv's `Environment` gives its subclasses."""

    async def reset_async(self) -> Any:
        raise AssertionError

    async def step_async(self, action: Any) -> Any:
        raise AssertionError


OpenEnvBase.__module__ = "openenv.core.env_server.interfaces"


class Echo(OpenEnvBase):
    """Echoes a message."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self.count = 0
        return Observation(echoed=f"ready {seed}", reward=0.0)

    def step(self, action: Action) -> Observation:
        self.count += 1
        return Observation(echoed=action.message, reward=len(action.message) / 10, done=self.count == 2, metadata={"count": self.count})

    @property
    def state(self) -> dict[str, int]:
        return {"count": self.count}


class AsyncEcho(Echo):
    async def reset_async(self, **values: Any) -> Observation:
        return super().reset(**values)

    async def step_async(self, action: Action) -> Observation:
        return super().step(action)


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
async def test_openenv_class_is_an_environment_unmodified(kind: type) -> None:
    calls = await EnvironmentCalls.create(adapted(kind))
    assert calls.system_prompt is not None
    assert "Reply with message: text." in calls.system_prompt
    assert await calls.reset({"seed": 3, "unknown": 1} if kind is Echo else {"seed": 3}) == {"echoed": "ready 3"}
    assert await calls.step(await calls.parse("hello")) == StepResult({"echoed": "hello"}, 0.5, False, {"count": 1})
    assert await calls.step(await calls.parse('{"message": "a"}')) == StepResult({"echoed": "a"}, 0.1, True, {"count": 2})
    await calls.aclose()


def test_openenv_class_refuses_fields_that_are_no_action() -> None:
    environment = OpenEnvEnvironment(Echo())
    environment.reset(None)
    assert (environment.decode({"message": "a"}), environment.state) == (Action(message="a"), {"count": 0})
    with pytest.raises(ValidationError):
        environment.decode({"text": "a"})


@pytest.mark.parametrize("reply", ["{}", '{"message": 3}'])
def test_openenv_class_reply_of_no_action_is_answered_with_instruction(reply: str) -> None:
    environment = OpenEnvEnvironment(Echo())
    environment.reset(None)
    assert environment.step(environment.parse(reply)) == StepResult("Reply with message: text. Only that.")


def test_openenv_class_without_a_class_of_actions_is_named() -> None:
    class Bare(OpenEnvBase):
        def reset(self) -> None: ...

        def step(self, action: Any) -> None: ...

    with pytest.raises(EnvironmentsError, match=r"Bare\.step names no class of actions"):
        adapted(Bare)()


Kind = TypeVar("Kind")


class GenericBase(OpenEnvBase, Generic[Kind]): ...


GenericBase.__module__ = OpenEnvBase.__module__


def test_openenv_class_of_actions_is_not_that_of_the_observations_that_step_returns() -> None:
    class Returning(GenericBase[Action]):
        def reset(self) -> None: ...

        def step(self, action: Any) -> Observation: ...  # pyright: ignore[reportReturnType]

    del Returning.step.__annotations__["action"]
    assert action_class_of(Returning) is Action


@pytest.mark.parametrize(
    ("properties", "text", "fields"),
    [
        ({"move": {"type": "integer"}}, " 4 ", {"move": 4}),
        ({"move": {"type": "integer"}, "metadata": {}}, '{"move": 4}', {"move": 4}),
        ({"move": {"type": "integer"}}, "four", None),
        ({"bet": {"type": "number"}}, "0.5", {"bet": 0.5}),
        ({"code": {"type": "string"}}, "{not json", {"code": "{not json"}),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, '```json\n{"x": 1, "y": 2}\n```', {"x": 1, "y": 2}),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, "1, 2", None),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, '{"z": 1}', None),
        pytest.param({"x": {"type": "integer"}, "y": {"type": "integer"}}, "[" * 100_000, None, id="deep"),
    ],
)
def test_fields_of_text_are_an_action_or_else_a_remedy(properties: dict[str, Any], text: str, fields: dict[str, Any] | None) -> None:
    schema = {"properties": properties}
    assert fields_of_text(schema, text) == (fields if fields is not None else UnusableReply(instruction(schema)))


class Discrete:
    shape = ()
    dtype = "int64"

    def contains(self, value: Any) -> bool:
        """Return what Gymnasium's does: numbers of Python are converted, arrays of whole numbers count."""
        import numpy

        if isinstance(value, int):
            value = numpy.int64(value)
        elif not isinstance(value, (numpy.generic, numpy.ndarray)) or value.dtype.kind != "i" or value.shape != ():
            return False
        return bool(0 <= value < 2)

    def __repr__(self) -> str:
        return "Discrete(2)"


class Corridor:
    """A corridor of three places, by Gymnasium's interface."""

    action_space = Discrete()

    def __init__(self) -> None:
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[tuple[int, int | None], dict[str, Any]]:
        self.place = 0
        return (0, seed), {}

    def step(self, action: int) -> tuple[tuple[int, None], int, bool, bool, dict[str, Any]]:
        self.place += action
        return (self.place, None), action, self.place == 2, False, {"at": self.place}

    def close(self) -> None:
        self.closed = True


def test_gymnasium_class_gives_results_of_five_values() -> None:
    environment = GymnasiumEnvironment(Corridor())
    assert "Discrete(2)" in environment.system_prompt
    assert environment.reset({"seed": 7}) == [0, 7]
    assert environment.step(environment.parse("1")) == StepResult([1, None], 1.0, False, {"at": 1, "truncated": False})
    assert environment.parse("[" * 100_000) == environment.parse("5")
    refused = environment.step(environment.parse("5"))
    assert (refused.reward, refused.done) == (None, False)
    assert "Discrete(2)" in refused.observation
    assert environment.step(environment.decode({"value": 1})).done
    with pytest.raises(ValueError, match=r"Discrete\(2\)"):
        environment.decode({"value": 9})


@pytest.mark.parametrize("text", ["1.9", "9" * 30, "[1, [0]]", '["left"]', "[null]", "1e999"])
def test_gymnasium_reply_of_no_action_is_answered_with_instruction(text: str) -> None:
    environment = GymnasiumEnvironment(Corridor())
    assert environment.parse(text) == UnusableReply("Reply with an action as JSON, of the space Discrete(2).")


@pytest.mark.parametrize(("text", "action"), [("[1, 0]", [1, 0]), ("[1.0, 0]", [1, 0]), ("[0.9, 0]", None)])
def test_gymnasium_list_of_whole_numbers_is_an_action_and_any_other_is_not(text: str, action: list[int] | None) -> None:
    class MultiDiscrete:
        shape = (2,)
        dtype = "int64"

        def contains(self, value: Any) -> bool:
            """Return what Gymnasium's does: lists are compared as they are, whole numbers or not."""
            import numpy

            array = numpy.array(value)
            return array.shape == self.shape and array.dtype.kind in "if" and bool(((array >= 0) & (array < 2)).all())

    class Board(Corridor):
        action_space: Any = MultiDiscrete()

    parsed = GymnasiumEnvironment(Board()).parse(text)
    if action is None:
        assert isinstance(parsed, UnusableReply)
    else:
        assert (parsed.dtype, parsed.tolist()) == ("int64", action)


def test_plain_values_are_json() -> None:
    import numpy

    value = {"a": numpy.float32(0.5), "b": (numpy.arange(2), None), 3: {1}}
    assert plain(value) == {"a": 0.5, "b": [[0, 1], None], "3": "{1}"}


@pytest.fixture
def gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("gymnasium")
    module.error = types.SimpleNamespace(Error=KeyError)
    module.make = lambda name: {"Corridor-v0": Corridor}[name]()
    monkeypatch.setitem(sys.modules, "gymnasium", module)


@pytest.mark.usefixtures("gymnasium")
def test_factory_of_gymnasium_id_makes_it() -> None:
    factory = factory_of("gymnasium:Corridor-v0", lambda reference: pytest.fail("it was imported"))
    assert is_factory(factory)
    assert isinstance(factory(), GymnasiumEnvironment)
    with pytest.raises(EnvironmentsError, match="gymnasium:Castle-v0 cannot be made"):
        factory_of("gymnasium:Castle-v0", lambda reference: None)()


def test_factory_of_a_class_is_the_class_and_of_a_function_the_function() -> None:
    assert factory_of("m:Corridor", lambda reference: Corridor) is Corridor
    assert not is_factory(factory_of("m:len", lambda reference: len))


def test_factory_of_urls_of_several_protocols_is_refused() -> None:
    with pytest.raises(EnvironmentsError, match="mixes protocols"):
        factory_of("openenv+http://a:1,ors+http://b:2", lambda reference: None)


def test_agent_spec_of_urls_alone_is_the_agent_without_code(tmp_path: Any) -> None:
    spec = agent_spec(HandlerSettings(directory=tmp_path, environment="http://a:1,http://b:2"), RunnerSettings())
    assert isinstance(spec, CallableAgent)
    assert (spec.agent, spec.environment) == (REFERENCE, "openenv+http://a:1,openenv+http://b:2")
    assert initialises(spec)
    leased = agent_spec(HandlerSettings(agent="m:agent", directory=tmp_path, environment="http://a:1"), RunnerSettings())
    assert (leased.environment, initialises(leased)) == ("http://a:1", False)
    assert names_environment("gymnasium:CartPole-v1")
    assert not names_environment("http://a:1")
    assert by_openenv("m:Game") == "m:Game"


def test_choice_prefers_reported_load_then_own_sessions() -> None:
    assert server_choice.choose({"http://a": 0.5, "http://b": 0.25, "http://c": float("inf")}) == "http://b"
    server_choice.note_open("http://a", 1)
    try:
        assert server_choice.choose({"http://a": None, "http://b": None}) == "http://b"
    finally:
        server_choice.note_open("http://a", -1)


class Link:
    """A connection to a server that opens each session."""

    def __init__(self, url: str, *_: object) -> None:
        assert "/ws?session_id=" in url, "the session has no name"

    def receive(self) -> str:
        return '{"type": "state", "data": {}}'

    def send(self, text: str) -> None: ...

    def wait_at_most(self, seconds: float) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("status", [None, 503])
def test_openenv_server_without_load_at_first_is_asked_again(
    status: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = EnvironmentsError("away")
    away.http_status = status
    loads: list[Any] = [away, {"sessions": 0, "capacity": 1}]

    def ask(service: object, method: str, path: str, **_: object) -> Any:
        answer = loads.pop(0) if path == "/v1/load" else {"system_prompt": "ours", "action": {}}
        if answer is away:
            raise answer
        return answer

    monkeypatch.setattr(openenv_server, "ask", ask)
    monkeypatch.setattr(openenv_server, "WebSocket", Link)
    server = openenv_server.OpenEnvServer(["http://127.0.0.1:1"])
    assert (server.system_prompt, loads, caplog.messages) == ("ours", [], []), "a short outage is not logged"


def test_openenv_server_that_stays_away_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(openenv_server, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(openenv_server, "_PAUSES", (1.0, 1.0))
    with pytest.raises(EnvironmentsError, match="does not answer"):
        openenv_server.OpenEnvServer(["http://127.0.0.1:1"], wait_seconds=6.0)
    (message,) = caplog.messages
    assert message.startswith("the environment at http://127.0.0.1:1 does not answer (")
    assert message.endswith("Start it, or fix the URL. Trying again for 2.0 s.")


def test_openenv_server_that_refuses_the_token_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = EnvironmentsError("the environment refuses GET /v1/load (401): send the token")
    refusal.http_status = 401

    def ask(*_: object, **__: object) -> Any:
        raise refusal

    monkeypatch.setattr(openenv_server, "ask", ask)
    monkeypatch.setattr(openenv_server, "WebSocket", lambda *_: pytest.fail("it was asked for a session"))
    with pytest.raises(EnvironmentsError, match="send the token"):
        openenv_server.OpenEnvServer(["http://127.0.0.1:1"], "wrong")


def test_failure_of_a_lost_environment_is_not_the_policys() -> None:
    assert failure_of(EnvironmentsError("lost")) is AttemptFailure.ENVIRONMENT
    assert failure_of(ValueError("bad")) is AttemptFailure.EXCEPTION


async def test_environment_calls_close_an_environment_that_comes_too_late() -> None:
    begun, open_gate, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Corridor):
        def __init__(self) -> None:
            begun.set()
            open_gate.wait(20)

        def close(self) -> None:
            closed.set()

    creating = asyncio.create_task(EnvironmentCalls.create(Slow))  # pyright: ignore[reportArgumentType]
    await asyncio.to_thread(begun.wait, 20)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not closed.is_set()
    open_gate.set()
    assert await asyncio.to_thread(closed.wait, 20)


def test_environment_calls_create_in_the_context_of_their_caller() -> None:
    from contextvars import ContextVar

    variable = ContextVar[str]("variable", default="")
    seen: list[str] = []

    class Seeing(Corridor):
        def __init__(self) -> None:
            seen.append(variable.get())

    async def create() -> None:
        variable.set("given")
        await (await EnvironmentCalls.create(Seeing)).aclose()  # pyright: ignore[reportArgumentType]

    with pytest.raises(AttributeError):
        Seeing().closed  # noqa: B018
    asyncio.run(create())
    assert seen == ["", "given"]
