"""The laws of a pool of environments, whatever happens in whatever order; and the service's answers over HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pydantic import SecretStr

from runner.environments import server
from runner.environments.client import EnvironmentClient, NoInstanceError
from runner.environments.instance import Instance, UnhealthyError
from runner.environments.pool import InstancePool, PreparationError
from runner.environments.wire import InstanceRequest, InstanceState, Leased
from spangrad.episode.environment import StepResult
from spangrad.errors import EnvironmentsError, SpangradError
from spangrad.settings import EnvironmentServiceSettings
from tests.support.runners import environment_service_settings, until

LEASE_SECONDS = 30.0


class World:
    """Record of a pool's environments, which share it."""

    def __init__(self) -> None:
        self.ill: list[str] = []
        """Methods that fail at their next call: begin, reset, health."""
        self.wrong: list[str] = []
        self.made: list[Env] = []

    async def make(self) -> Env:
        self.made.append(Env(self))
        return self.made[-1]

    def fails(self, what: str) -> bool:
        if what in self.ill:
            self.ill.remove(what)
            return True
        return False


class Env:
    """An environment that notes what must never be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.user: object = None
        self.clean = True
        self.used = False
        self.discarded = False

    async def begin(self, given: object) -> object:
        if self.user is not None:
            self.world.wrong.append(f"{given} got what was {self.user}'s")
        if not self.clean:
            self.world.wrong.append(f"{given} got it dirty")
        if self.discarded:
            self.world.wrong.append(f"{given} got what was discarded")
        self.user, self.clean, self.used = given, False, True
        if self.world.fails("begin"):
            raise RuntimeError("no such task")
        return given

    async def reset(self) -> None:
        if self.world.fails("reset"):
            raise RuntimeError("cannot be cleaned")
        self.user, self.clean = None, True

    async def health(self) -> bool:
        return not (self.used and self.world.fails("health"))

    async def close(self) -> None:
        self.discarded = True


class Story(RuleBasedStateMachine):
    """Users come, beat, leave, die and are given what cannot be cleaned."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.world = World()
        self.count = count
        self.asked: dict[str, asyncio.Task[Leased]] = {}
        self.held: set[str] = set()
        """Names of the granted leases that have not ended."""
        self.beaten: dict[str, float] = {}
        self.pool = self.do(self.started_pool)

    async def started_pool(self) -> InstancePool:
        pool = InstancePool(self.world.make, self.count, lease_seconds=LEASE_SECONDS, seconds=5, clock=lambda: self.now)
        await pool.start()
        return pool

    def do(self, work: Callable[[], Any]) -> Any:
        """Do something in the loop, and let everything follow that follows at once."""

        async def settled() -> Any:
            result = await work()
            for _ in range(40):
                await asyncio.sleep(0)
            return result

        result = self.loop.run_until_complete(settled())
        for name, task in list(self.asked.items()):
            if task.done():
                del self.asked[name]
                if not task.cancelled() and task.exception() is None:
                    self.held.add(name)
                    self.beaten[name] = self.now
        return result

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.loop.run_until_complete(self.ended())
            self.loop.close()

    async def ended(self) -> None:
        await self.pool.close()
        for task in self.asked.values():
            task.cancel()
        await asyncio.gather(*self.asked.values(), return_exceptions=True)

    @rule(number=st.integers(0, 9))
    def ask(self, number: int) -> None:
        name = f"user {number}"
        if name in self.asked or name in self.held:
            return

        async def ask() -> None:
            ask = InstanceRequest(lease=name, rollout_id=name, attempt=0, input=name, wait_seconds=60)
            self.asked[name] = asyncio.create_task(self.pool.lease(ask))

        self.do(ask)

    @rule(data=st.data())
    def ask_twice(self, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(sorted(self.held)))
            again = self.do(lambda: self.pool.lease(InstanceRequest(lease=name, rollout_id=name, attempt=0, input="other")))
            assert again.environment == name
            self.beaten[name] = self.now

    @rule(data=st.data())
    def leave_the_line(self, data: st.DataObject) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))

            async def leave() -> None:
                self.asked[name].cancel()

            self.do(leave)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(sorted(self.held)))
            self.held.discard(name)

            async def release() -> None:
                assert self.pool.release(name)
                assert not self.pool.release(name), "once is enough"

            self.do(release)

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0]), data=st.data())
    def time_goes_by(self, seconds: float, data: st.DataObject) -> None:
        alive = data.draw(st.sets(st.sampled_from(sorted(self.held)))) if self.held else set()

        async def go() -> None:
            assert self.pool.beat(alive) == []
            self.beaten.update(dict.fromkeys(alive, self.now))
            self.now += seconds
            self.pool.sweep()
            over = {name for name in self.held if self.beaten[name] + LEASE_SECONDS <= self.now}
            assert set(self.pool.beat(sorted(self.held))) == over, "whoever is late is told, and nobody else"
            self.held -= over
            self.beaten.update(dict.fromkeys(self.held, self.now))

        self.do(go)

    @rule(what=st.sampled_from(["begin", "reset", "health"]))
    def something_fails_next(self, what: str) -> None:
        self.world.ill.append(what)

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.world.wrong == []
        states = [one.state for one in self.pool.statuses()]
        assert len(states) == self.count
        assert states.count(InstanceState.LEASED) == len(self.held), "each lease has one instance, each instance one lease"
        users = sorted(str(env.user) for env in self.world.made if env.user is not None and not env.discarded)
        assert users == sorted(self.held)
        assert not (InstanceState.FREE in states and self.pool.waiting), "nobody waits while something is free"
        assert len(self.world.made) - sum(env.discarded for env in self.world.made) == self.count, "what is discarded is replaced"


Story.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestStory = Story.TestCase


class Plain:
    """Environment with plain methods, as users write them."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def begin(self, given: object) -> object:
        if given == "bad":
            raise ValueError("no such task")
        self.given.append(given)
        return {"url": "http://127.0.0.1:1/", "seen": list(self.given)}

    def reset(self) -> None:
        if "poison" in self.given:
            raise RuntimeError("cannot be cleaned")
        self.given.clear()


@asynccontextmanager
async def service(settings: EnvironmentServiceSettings, count: int = 1) -> AsyncGenerator[tuple[str, aiohttp.ClientSession]]:
    async with server.running(settings.model_copy(update={"port": 0}), Plain, count) as url, aiohttp.ClientSession() as session:
        yield url, session


async def asked(session: aiohttp.ClientSession, method: str, url: str, body: object = None) -> tuple[int, Any]:
    async with session.request(method, url, json=body) as answer:
        return answer.status, await answer.json()


async def test_environments_service_routes_answer() -> None:
    async with service(environment_service_settings(lease_seconds=20)) as (url, http):
        leases = f"{url}/v1/leases"
        ask = {"lease": "a", "rollout_id": "r0", "attempt": 0, "input": "poison"}
        status, leased = await asked(http, "POST", leases, ask)
        environment = {"url": "http://127.0.0.1:1/", "seen": ["poison"]}
        assert (status, leased) == (200, {"lease": "a", "instance": "0.0", "environment": environment, "lease_seconds": 20.0})
        assert await asked(http, "POST", leases, ask) == (200, leased), "asked again, the same"
        other = {**ask, "lease": "b", "rollout_id": "r1", "input": "next"}
        async with http.post(leases, json=other) as full:
            assert (full.status, full.headers["Retry-After"], await full.json()) == (503, "1", {"error": "all 1 instances are taken"})
        waits = asyncio.create_task(asked(http, "POST", leases, {**other, "wait_seconds": 20}))
        assert await asked(http, "POST", f"{leases}/heartbeat", {"leases": ["a", "x"]}) == (200, {"over": ["x"]})
        held = [{"instance": "0", "state": "leased", "users": 1, "rollout_id": "r0"}]
        await until(lambda: _is(asked(http, "GET", f"{url}/v1/instances"), (200, {"instances": held, "waiting": 1})))
        assert await asked(http, "DELETE", f"{leases}/a") == (200, {"released": True})
        assert await asked(http, "DELETE", f"{leases}/a") == (200, {"released": False})
        # What cannot be cleaned is discarded: the next user has another instance, which has seen nobody.
        status, leased = await waits
        assert (status, leased["instance"], leased["environment"]["seen"]) == (200, "0.1", ["next"])
        assert (await asked(http, "POST", f"{leases}/heartbeat", {"leases": ["b"]}))[1] == {"over": []}
        await asked(http, "DELETE", f"{leases}/b")
        bad = await asked(http, "POST", leases, {**ask, "lease": "c", "input": "bad", "wait_seconds": 20})
        assert bad == (500, {"error": "instance 0.1: ValueError: no such task"})
        status, leased = await asked(http, "POST", leases, {**ask, "lease": "d", "input": "fine", "wait_seconds": 20})
        assert (leased["instance"], leased["environment"]["seen"]) == ("0.1", ["fine"])
        unknown = await asked(http, "POST", leases, {**ask, "color": "red"})
        assert unknown[0] == 400
        async with http.get(f"{url}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#") and not line.endswith(" 0.0")]
        assert lines == [
            'spangrad_environments_instances{state="leased"} 1.0',
            'spangrad_environments_leases_total{event="leased"} 3.0',
            'spangrad_environments_leases_total{event="released"} 2.0',
            'spangrad_environments_leases_total{event="refused"} 1.0',
            'spangrad_environments_leases_total{event="unbegun"} 1.0',
            'spangrad_environments_instances_changed_total{event="made"} 2.0',
            'spangrad_environments_instances_changed_total{event="discarded"} 1.0',
        ]


async def _is(asking: Any, expected: object) -> bool:
    return await asking == expected


async def test_environments_lease_request_of_disconnected_client_is_skipped() -> None:
    async with service(environment_service_settings()) as (url, http):
        ask = {"lease": "a", "rollout_id": "r", "attempt": 0, "input": 1}
        await asked(http, "POST", f"{url}/v1/leases", ask)
        leaves = asyncio.create_task(asked(http, "POST", f"{url}/v1/leases", {**ask, "lease": "b", "wait_seconds": 60}))

        async def waiting() -> int:
            return (await asked(http, "GET", f"{url}/v1/instances"))[1]["waiting"]

        await until(lambda: _is(waiting(), 1))
        leaves.cancel()
        await until(lambda: _is(waiting(), 0))
        await asked(http, "DELETE", f"{url}/v1/leases/a")
        status, leased = await asked(http, "POST", f"{url}/v1/leases", {**ask, "lease": "c", "wait_seconds": 60})
        assert (status, leased["environment"]["seen"]) == (200, [1])


async def test_environments_beyond_loopback_require_token() -> None:
    with pytest.raises(SpangradError, match=r"Set environments.token, or bind 127\.0\.0\.1"):
        server.serve(environment_service_settings(host="0.0.0.0"), Plain, 1)
    async with service(environment_service_settings(token=SecretStr("secret"))) as (url, http):
        assert (await asked(http, "GET", f"{url}/v1/instances"))[0] == 401
        with pytest.raises(EnvironmentsError, match=r"refuses GET /readyz \(401\): this service asks for its token"):
            await EnvironmentClient(url, "wrong").__aenter__()
        async with EnvironmentClient(url, "secret") as client:
            instance = await client.lease("r", 0, "x", 10)
            assert instance.environment["seen"] == ["x"]


async def test_environment_client_releases_leases_and_learns_of_lost_leases() -> None:
    settings = environment_service_settings(lease_seconds=2)
    async with service(settings) as (url, http):

        async def states() -> list[str]:
            return [one["state"] for one in (await asked(http, "GET", f"{url}/v1/instances"))[1]["instances"]]

        async with EnvironmentClient(url, None) as client:
            held = await client.lease("r", 0, "x", 10)
            with pytest.raises(NoInstanceError, match=r"no environment after 1 s; .* says: HTTP 503.*all 1 instances are taken"):
                await client.lease("other", 0, "y", 1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(held.lost), 3.5)  # almost twice as long as it holds unrenewed
            assert await states() == ["leased"]
            await asked(http, "DELETE", f"{url}/v1/leases/{held.lease}")
            assert await asyncio.wait_for(held.lost, 10) == f"instance 0.0 of {url} is not leased to this attempt any more"
            await client.lease("r", 1, "x", 10)
        await until(lambda: _is(states(), ["free"]))
        async with EnvironmentClient(url, None) as client:
            with pytest.raises(NoInstanceError, match=r"HTTP 500.*no such task"):
                await client.lease("r", 0, "bad", 10)
    with pytest.raises(EnvironmentsError, match="Start it with `spangrad environments`"):
        await EnvironmentClient(url, None).__aenter__()


@pytest.mark.slow
async def test_environment_client_without_service_loses_lease_before_its_end() -> None:
    settings = environment_service_settings(lease_seconds=8)
    async with service(settings) as (url, _):
        client = await EnvironmentClient(url, None).__aenter__()
        held = await client.lease("r", 0, "x", 10)
    stopped = asyncio.get_running_loop().time()
    try:
        message = await asyncio.wait_for(held.lost, 20)
        assert message.startswith(f"the environments at {url} have not answered for ")
        assert asyncio.get_running_loop().time() - stopped < 8
    finally:
        await client.__aexit__(None, None, None)


async def test_instance_pool_replaces_hung_instance() -> None:
    release = threading.Event()

    class Hangs(Plain):
        def reset(self) -> None:
            release.wait(60)

    pool = InstancePool(Hangs, 1, lease_seconds=30, seconds=2)
    await pool.start()
    try:
        first = await pool.lease(InstanceRequest(lease="a", rollout_id="r", attempt=0, input=1))
        pool.release("a")
        second = await pool.lease(InstanceRequest(lease="b", rollout_id="r", attempt=1, input=2, wait_seconds=20))
        assert (first.instance, second.instance, second.environment["seen"]) == ("0.0", "0.1", [2])
    finally:
        release.set()
        await pool.close()


async def test_instance_whose_call_returns_late_is_closed_in_its_thread() -> None:
    release, closed = threading.Event(), threading.Event()

    class Late(Plain):
        def reset(self) -> None:
            release.wait(60)

        def close(self) -> None:
            closed.set()

    instance = Instance("late", 20)
    await instance.make(Late)
    instance._seconds = 0.1
    with pytest.raises(UnhealthyError):
        await instance.reset()
    assert await instance.close() == "its thread hangs, and is abandoned"
    assert not closed.is_set()
    release.set()
    assert await asyncio.to_thread(closed.wait, 10)
    await until(
        lambda: _is(asyncio.to_thread(lambda: [thread.name for thread in threading.enumerate() if thread.name == "environment late"]), [])
    )


async def test_instance_whose_creation_returns_late_is_closed() -> None:
    release, closed = threading.Event(), threading.Event()

    class Late(Plain):
        def __init__(self) -> None:
            super().__init__()
            release.wait(60)

        def close(self) -> None:
            closed.set()

    instance = Instance("late", 0.1)
    with pytest.raises(TimeoutError):
        await instance.make(Late)
    assert await instance.close() == "its thread hangs, and is abandoned"
    release.set()
    assert await asyncio.to_thread(closed.wait, 10)


def exits() -> None:
    sys.exit(3)


def ends() -> None:
    """Raise StopIteration."""
    next(iter([]))


async def exits_in_loop() -> None:
    exits()


async def cancels_own_task() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


FAULTS = {
    "exit": (exits, "SystemExit: 3"),
    "end": (ends, r"RuntimeError: \S+ raised StopIteration"),
    "exit in loop": (exits_in_loop, "SystemExit: 3"),
    "own task": (cancels_own_task, "RuntimeError: cancelled by the user's code itself, in a task of its own"),
}


class Faulty(Plain):
    """Environment whose `begin` raises what is no `Exception`, or what futures refuse."""

    def begin(self, given: object) -> Any:
        return FAULTS[given][0]() if isinstance(given, str) else super().begin(given)


@pytest.mark.parametrize("fault", FAULTS)
async def test_instance_pool_begin_that_exits_or_cancels_names_the_cause(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = InstancePool(Faulty, 1, lease_seconds=30, seconds=5)
    await pool.start()
    try:
        with pytest.raises(PreparationError, match=f"^instance 0.0: {FAULTS[fault][1]}$"):
            await pool.lease(InstanceRequest(lease="a", rollout_id="r", attempt=0, input=fault))
        assert re.search(rf"environment 0\.0 cannot begin: {FAULTS[fault][1]}", caplog.text)
        assert "in begin\n" in caplog.text, "the log says where"
        leased = await pool.lease(InstanceRequest(lease="b", rollout_id="r", attempt=1, input=1, wait_seconds=20))
        assert (leased.instance, leased.environment["seen"]) == ("0.0", [1])
    finally:
        await pool.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["reset", "health", "close"])
async def test_instance_pool_method_that_exits_or_cancels_discards_instance(
    method: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Callable[[], Any]] = []

    def fail_once(self: Plain) -> Any:
        return faults.pop()() if faults else None

    def cannot_reset(self: Plain) -> None:
        raise RuntimeError("used up")

    kind = type("Failing", (Plain,), {method: fail_once} | ({"reset": cannot_reset} if method == "close" else {}))
    pool = InstancePool(kind, 1, lease_seconds=30, seconds=5)
    await pool.start()
    try:
        await pool.lease(InstanceRequest(lease="a", rollout_id="r", attempt=0, input=1))
        faults.append(FAULTS[fault][0])
        pool.release("a")
        await until(lambda: asyncio.sleep(0, re.search(f"{method}: {FAULTS[fault][1]}", caplog.text) is not None))
        leased = await pool.lease(InstanceRequest(lease="b", rollout_id="r", attempt=1, input=2, wait_seconds=20))
        assert (leased.instance, leased.environment["seen"]) == ("0.1", [2])
    finally:
        await pool.close()


class NoBegin:
    pass


class Steps(NoBegin):
    """An environment of episodes, which another command serves."""

    def reset(self, task: object) -> str:
        return ""

    def step(self, action: object) -> StepResult:
        return StepResult("")


async def test_environments_service_with_invalid_factory_raises_at_start() -> None:
    for kind, remedy in ((NoBegin, "Write one"), (Steps, "Serve it with `spangrad env serve`")):
        with pytest.raises(EnvironmentsError, match=rf"the factory gave {kind.__name__}, which has no method begin\(input\)\. {remedy}\.$"):
            async with service_of(kind):
                pass
    with pytest.raises(EnvironmentsError, match="no environment can be made: ZeroDivisionError"):
        async with service_of(lambda: 1 // 0):
            pass


def service_of(factory: Callable[[], object]) -> Any:
    return server.running(environment_service_settings(), factory, 1)
