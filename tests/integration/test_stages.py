"""Init, run, evaluate: each stage has places of its own, and what an attempt holds in one is freed when it leaves it, however it does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.environments import server
from runner.queue.wire import RolloutSelector
from runner.runner import Outcome, Runner
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent
from runner.workers.slots import Slots
from spangrad import semconv
from spangrad.settings.sources import load_settings
from spangrad.types import AttemptFailure, Mode, Task
from tests.support.otlp import HttpServer
from tests.support.runners import RunnerServices, environment_service_settings, queue_settings, runner_services, serving, until

pytestmark = pytest.mark.usefixtures("quick_agents")

AGENT = """
    import asyncio, json, os, pathlib, signal, time
    here = pathlib.Path(__file__).parent
    opened, closed, ahead, most = [], [], 0, 0
    happened = {}

    def event(name):
        return happened.setdefault(name, asyncio.Event())

    def tell(what):
        with (here / "told").open("a") as file:
            file.write(what + chr(10))

    class Made:
        def __init__(self, given):
            self.given = given
            opened.append(given)

        def close(self):
            closed.append(self.given)
            tell(f"closed {self.given}")

    async def crossing(given):
        # Nobody could go on if a stage held a place of another one.
        if given == "b":
            await event("a is judged").wait()
            await event("c ran").wait()
        return Made(given)

    async def ran(given, environment):
        assert environment.given == given
        event(f"{given} ran").set()
        return given

    async def judge(given, output, environment):
        assert environment.given == output == given and given not in closed
        event(f"{given} is judged").set()
        if given == "a":
            await event("b ran").wait()
        return 1.0

    async def counted(given):
        global ahead, most
        ahead += 1
        most = max(most, ahead)
        event(f"{ahead} ahead").set()
        return given

    async def one_of_many(given):
        global ahead
        ahead -= 1
        await event("2 ahead").wait()
        return float(most)

    async def blocks(given, stage):
        if given == stage:
            tell(f"in {stage}")
            await asyncio.Event().wait()
        if given == f"thread of {stage}":
            tell(f"in {stage}")
            await asyncio.to_thread(print)
        return given

    class Blocked:
        def __init__(self, given):
            self.given = given

        async def __aenter__(self):
            tell(f"opened {self.given}")
            await blocks(self.given, "init")
            return self

        async def __aexit__(self, *error):
            tell(f"closed {self.given}")

    def blocking(given):
        if given == "init thread":
            time.sleep(600)
        if given == "init raises":
            raise LookupError("no such world")
        return Blocked(given)

    async def blocks_running(given, environment):
        assert environment.given == given
        await blocks(given, "run")
        return 1.0

    def blocks_judging(given, output):
        if given == "evaluate thread":
            time.sleep(600)
        return blocks_on(given, output)

    async def blocks_on(given, output):
        await blocks(given, "evaluate")
        return output

    def leased(given, environment, endpoint):
        attempt = int(endpoint.split("/")[-2])
        tell(f"{given} {attempt} has {environment['seen']}")
        if given == "kill" and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if given == "wait" and attempt == 0:
            time.sleep(600)
        if given == "hold":
            while not (here / "go").exists():
                time.sleep(0.01)
        return {"given": given}
"""


@asynccontextmanager
async def runner(directory: Path, agent: AgentSpec, **changes: object) -> AsyncGenerator[tuple[Runner, RunnerServices]]:
    (directory / "mine.py").write_text(textwrap.dedent(AGENT))
    with runner_services(directory, **changes) as services:
        async with Runner(services.settings, agent) as started:
            yield started, services


async def outcomes(started: Runner, given: Sequence[str]) -> list[Outcome]:
    return await started.run([Task(name, name) for name in given], mode=Mode.TRAIN, group_size=1)


def recorded(directory: Path) -> list[str]:
    file = directory / "told"
    return file.read_text().splitlines() if file.exists() else []


async def test_stages_hold_no_slot_of_another_stage(tmp_path: Path) -> None:
    agent = CallableAgent("mine:ran", evaluator="mine:judge", directory=tmp_path, environment="mine:crossing")
    async with runner(tmp_path, agent, concurrency=1, initialisations=2, initialised_ahead=2, evaluations=1, max_attempts=1) as (
        started,
        services,
    ):
        results = await outcomes(started, ["a", "b", "c"])
        assert [(outcome.reward, outcome.detail) for outcome in results] == [({"reward": 1.0}, "")] * 3
        assert sorted(recorded(tmp_path)) == ["closed a", "closed b", "closed c"]
        roots = {span.span_id: span for span in services.sink.named("rollout")}
        children = [span for stage in ("init", "run", "evaluate") for span in services.sink.named(stage)]
        assert Counter((span.parent_id, span.name) for span in children) == Counter(
            {(root, stage): 1 for root in roots for stage in ("init", "run", "evaluate")}
        )
        for span in children:
            root = roots[span.parent_id]
            assert (span.trace_id, span.status) == (root.trace_id, "UNSET")
            assert {key: span.attributes[key] for key in semconv.CONTEXT_KEYS[:4]} == {
                key: root.attributes[key] for key in semconv.CONTEXT_KEYS[:4]
            }
        assert services.sink.spans.index(children[0]) < min(services.sink.spans.index(root) for root in roots.values()), "before the root"


CLOSED = """

async def ran_alone(given):
    event(f"{given} ran").set()
    return given

async def judge_closed(given, output, environment):
    return float(environment.given in closed)

async def judge_together(given, output):
    await asyncio.gather(event("a ran").wait(), event("b ran").wait())
    return 1.0
"""


async def test_close_after_run_closes_environments_before_evaluation(tmp_path: Path) -> None:
    settings = environment_service_settings()
    local = CallableAgent("mine:ran", evaluator="mine:judge_closed", directory=tmp_path, environment="mine:Made")
    leased = CallableAgent(
        "mine:ran_alone", evaluator="mine:judge_together", directory=tmp_path, environment=server.address_of(settings).url
    )
    limits: dict[str, Any] = {"workers": 1, "concurrency": 2, "evaluations": 2, "max_attempts": 1, "close_after_run": True}
    with runner_services(tmp_path, **limits) as services:
        (tmp_path / "mine.py").write_text(textwrap.dedent(AGENT) + CLOSED)
        async with Runner(services.settings, local) as started:
            assert [outcome.reward for outcome in await outcomes(started, ["a"])] == [{"reward": 1.0}]
        assert recorded(tmp_path) == ["closed a"], "once"
        # Each is evaluated once both have run, and there is one instance.
        async with server.running(settings, Env, 1), Runner(services.settings, leased) as started:
            assert [(outcome.reward, outcome.detail) for outcome in await outcomes(started, ["a", "b"])] == [({"reward": 1.0}, "")] * 2


async def test_initialised_ahead_bounds_environments(tmp_path: Path) -> None:
    agent = CallableAgent("mine:one_of_many", directory=tmp_path, environment="mine:counted")
    async with runner(tmp_path, agent, concurrency=1, initialisations=8, initialised_ahead=2, max_attempts=1) as (started, _):
        results = await outcomes(started, [str(number) for number in range(8)])
        assert max(outcome.reward["reward"] for outcome in results if outcome.reward) == 2
        assert [outcome.detail for outcome in results] == [""] * 8


async def test_cancelled_attempt_frees_slot_of_each_stage(tmp_path: Path) -> None:
    queue = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    agent = CallableAgent("mine:blocks_running", evaluator="mine:blocks_judging", directory=tmp_path, environment="mine:blocking")
    one_each = {"concurrency": 1, "initialisations": 1, "initialised_ahead": 1, "evaluations": 1, "workers": 1}
    async with serving(queue), runner(tmp_path, agent, queue__url=queue.queue.url, **one_each) as (started, services):
        for stage in ("init", "run", "evaluate"):
            run = asyncio.create_task(outcomes(started, [stage]))
            await until(lambda stage=stage: _true(f"in {stage}" in recorded(tmp_path)), 60)
            (waiting,) = [rollout for rollout in (await started.queue.rollouts(run_id="run")).rollouts if rollout.task_id == stage]
            await started.queue.cancel(RolloutSelector(rollout_ids=[waiting.rollout_id]))
            assert [outcome.failure for outcome in await run] == [AttemptFailure.CANCELLED]
            (well,) = await outcomes(started, [f"after {stage}"])
            assert well.reward == {"reward": 1.0}
        assert Counter(recorded(tmp_path)) == Counter(
            [f"in {stage}" for stage in ("init", "run", "evaluate")]
            + [f"opened {which}{stage}" for stage in ("init", "run", "evaluate") for which in ("", "after ")]
            # What was not entered is not left.
            + [f"closed {which}{stage}" for stage in ("init", "run", "evaluate") for which in ("", "after ") if which + stage != "init"]
        )
        assert {root[semconv.ROLLOUT_FINAL] for root in services.roots().values()} == {True}


async def _true(value: object) -> bool:
    return bool(value)


async def test_stage_timeouts_are_separate_and_named_in_detail(tmp_path: Path) -> None:
    agent = CallableAgent("mine:blocks_running", evaluator="mine:blocks_judging", directory=tmp_path, environment="mine:blocking")
    times = {"init_timeout_seconds": 4, "timeout_seconds": 4.5, "evaluation_timeout_seconds": 5}
    async with runner(tmp_path, agent, concurrency=4, max_attempts=1, **times) as (started, services):
        results = await outcomes(started, ["init", "init raises", "run", "evaluate", "init thread", "evaluate thread"])
        assert [(outcome.failure, outcome.detail) for outcome in results[:4]] == [
            (AttemptFailure.ENVIRONMENT, "init: not done after 4 s"),
            (AttemptFailure.ENVIRONMENT, "LookupError: no such world"),
            (AttemptFailure.TIMEOUT, "run: not done after 4.5 s"),
            (AttemptFailure.EVALUATION, "evaluate: not done after 5 s"),
        ]
        # A thread that hangs is its process's end; what it took along does not matter here.
        assert {outcome.failure for outcome in results[4:]} <= {AttemptFailure.ENVIRONMENT, AttemptFailure.EVALUATION, AttemptFailure.CRASH}
        assert [outcome.reward for outcome in results[:4]] == [None, None, {"reward": 0.0}, None], "the agent's time alone is the policy's"
        (well,) = await outcomes(started, ["well"])
        assert (well.reward, well.failure) == ({"reward": 1.0}, None)
        (root,) = [span for span in services.sink.named("rollout") if span.attributes[semconv.ROLLOUT_ID] == results[3].key.rollout_id]
        taken = {span.name: span.seconds for span in services.sink.spans if span.parent_id == root.span_id and span.scope == root.scope}
        assert (list(taken), taken["evaluate"] >= 5) == (["init", "run", "evaluate"], True)
        assert taken["run"] == pytest.approx(results[3].seconds, abs=1e-5), "a stage's span lasts as long as the stage"


class Env:
    """An environment of the service in this process."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def begin(self, given: object) -> object:
        self.seen.append(given)
        return {"seen": list(self.seen)}

    def reset(self) -> None:
        self.seen.clear()


async def test_leased_environment_of_killed_host_is_released(tmp_path: Path) -> None:
    settings = environment_service_settings()
    agent = CallableAgent("mine:leased", directory=tmp_path, environment=server.address_of(settings).url)
    async with server.running(settings, Env, 1), runner(tmp_path, agent) as (started, _):
        # The only instance is had by the second attempt, clean: the first one's host was killed with it in its hands.
        (outcome,) = await outcomes(started, ["kill"])
        assert (outcome.key.attempt, outcome.failure) == (1, AttemptFailure.INVALID_OUTPUT)
        assert recorded(tmp_path) == ["kill 0 has ['kill']", "kill 1 has ['kill']"]


@pytest.mark.slow
async def test_environment_service_restarted_fails_leased_attempts_and_serves_on(tmp_path: Path) -> None:
    settings = environment_service_settings(lease_seconds=1)
    agent = CallableAgent("mine:leased", evaluator="mine:judge_leased", directory=tmp_path, environment=server.address_of(settings).url)
    text = textwrap.dedent(AGENT) + "\n\ndef judge_leased(given, output):\n    return float(output == {'given': given})\n"
    with runner_services(tmp_path, max_attempts=2) as services:
        (tmp_path / "mine.py").write_text(text)
        async with server.running(settings, Env, 1):
            started = await Runner(services.settings, agent).__aenter__()
            run = asyncio.create_task(outcomes(started, ["wait"]))
            await until(lambda: _true(recorded(tmp_path)), 60)
        try:
            async with server.running(settings, Env, 1):
                (outcome,) = await run
        finally:
            await started.__aexit__(None, None, None)
        assert (outcome.key.attempt, outcome.reward) == (1, {"reward": 1.0})
        (first,) = [root for (_, attempt), root in services.roots().items() if attempt == 0]
        assert first[semconv.ROLLOUT_FAILURE] == "environment"


class Rewards(HttpServer):
    """Answers what a task's input says, one after the other; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        asked = json.loads(body)
        self.asked.append(asked)
        before = sum(one["task_id"] == asked["task_id"] for one in self.asked) - 1
        status, text = asked["input"][min(before, len(asked["input"]) - 1)]
        return status, {"retry-after": "0"}, text.encode()


PROGRAM = """
    import json, os, sys
    print(json.dumps({"given": json.load(sys.stdin), "environment": json.loads(os.environ["SPANGRAD_ENVIRONMENT"])}))
"""


async def test_reward_service_evaluates_programs_and_environments(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    settings = environment_service_settings()
    environments = server.address_of(settings).url
    answers = {
        "well": [(429, "slow down"), (503, "busy"), (200, "0.5")],
        "several": [(200, '{"a": 1, "b": -2.5}')],
        "game": [(200, '{"reward": {"white": 1, "black": -1}}')],
        "text": [(200, '"good"')],
        "large": [(200, f"1{'0' * 400}")],
        "none": [(200, "null")],
        "garbage": [(200, "<html>")],
        "broken": [(500, '{"error": "ouch"}')],
        "busy": [(503, "busy")],
    }
    with Rewards() as rewards:
        url = f"{rewards.url}/judge"
        agent = CommandAgent((sys.executable, "program.py"), evaluator=url, directory=tmp_path, environment=environments)
        limits = {"concurrency": 2, "max_attempts": 1, "evaluation_timeout_seconds": 6}
        async with server.running(settings, Env, 2), runner(tmp_path, agent, **limits) as (started, services):
            tasks = [Task(name, answer) for name, answer in answers.items()]
            results = {outcome.task_id: outcome for outcome in await started.run(tasks, mode=Mode.TRAIN, group_size=1)}
            assert {name: (outcome.reward, outcome.failure, outcome.detail) for name, outcome in results.items()} == {
                "well": ({"reward": 0.5}, None, ""),
                "several": ({"a": 1.0, "b": -2.5}, None, ""),
                "game": ({"reward": {"white": 1.0, "black": -1.0}}, None, ""),
                "text": (None, AttemptFailure.EVALUATION, f"{url}: the reward is 'good', not a finite number"),
                "large": (None, AttemptFailure.EVALUATION, f"{url}: the reward is 1{'0' * 199}, not a finite number"),
                "none": (None, AttemptFailure.NO_REWARD, f"{url} gave no reward"),
                "garbage": (None, AttemptFailure.EVALUATION, f"{url} answers what is not JSON: '<html>'"),
                "broken": (None, AttemptFailure.EVALUATION, f"{url} answers HTTP 500: ouch"),
                "busy": (None, AttemptFailure.EVALUATION, f"evaluate: not done after 6 s; {url} says: HTTP 503: busy"),
            }
            assert len(services.roots()) == len(answers)
        answer = [[200, "null"]]
        environment = {"seen": [answer]}
        (asked,) = [request for request in rewards.asked if request["task_id"] == "none"]
        assert asked == {
            "rollout_id": results["none"].key.rollout_id,
            "attempt": 0,
            "task_id": "none",
            "input": answer,
            "output": {"given": answer, "environment": environment},
            "environment": environment,
        }


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["take", "free", "free again", "leave"]), st.integers(0, 9)), max_size=40))
def test_slots_taken_never_exceed_count(count: int, steps: list[tuple[str, int]]) -> None:
    async def story() -> None:
        places, asked = Slots(count), dict[int, asyncio.Task[Any]]()
        for what, asker in steps:
            if what == "take" and asker not in asked:
                asked[asker] = asyncio.create_task(places.take())
            elif asker in asked and asked[asker].done() and what.startswith("free"):
                place = asked[asker].result()
                place.free()
                if what == "free again":
                    place.free()
                del asked[asker]
            elif asker in asked and not asked[asker].done() and what == "leave":
                asked.pop(asker).cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert sum(task.done() for task in asked.values()) == min(count, len(asked))

    asyncio.run(story())


def test_load_settings_ignores_variables_of_agent_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_ENVIRONMENT", "{}")
    monkeypatch.setenv("SPANGRAD_HOST", "mark")
    assert load_settings({}, env=dict(os.environ)).runner.run_id == "default"
