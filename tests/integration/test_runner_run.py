"""Rollouts through real agent hosts, against a small gateway and a small OTLP endpoint."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.runner import Outcome, Runner
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent, agent_environment
from span_processors.export import parse_headers
from spangrad import semconv
from spangrad.client.task_groups import queued
from spangrad.episode.agent import REFERENCE as EPISODES
from spangrad.errors import AgentError, GatewayError, SettingsError, StoreError
from spangrad.greedy_baseline import wants_greedy
from spangrad.http.tokens import agent_token
from spangrad.processes import free_ports
from spangrad.settings import AirRule, BuilderSettings, GatewaySettings, RunnerSettings, Settings, StoreSettings
from spangrad.settings.runner import EpisodeSettings, FailureRewards, ValidationSampling
from spangrad.types import AttemptFailure, Mode, Rollout, Task
from tests.support.otlp import OtlpSink, SunkSpan
from tests.support.policies import trainer_settings
from tests.support.runners import AttemptGateway, until

pytestmark = pytest.mark.usefixtures("quick_agents")

AGENT = """
    import asyncio, json, os, random, signal, time, urllib.request
    import spangrad
    from opentelemetry import trace
    tracer = trace.get_tracer("agent")

    def call(endpoint):
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]}).encode()
        urllib.request.urlopen(urllib.request.Request(endpoint + "/chat/completions", body)).read()

    async def busy(given):
        with tracer.start_as_current_span("outer"):
            await asyncio.sleep(random.random() / 50)
            with tracer.start_as_current_span("inner"):
                await asyncio.sleep(random.random() / 50)
                return {"reward": given["n"], "twice": 2 * given["n"]}

    def moody(given, endpoint):
        calls = given.get("calls", 0)
        for _ in range(calls):
            call(endpoint)
        attempt = int(endpoint.split("/")[-2])
        mood = given["moods"][attempt]
        if mood == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if mood == "hang":
            time.sleep(600)
        if mood == "raise":
            raise RuntimeError("bad day")
        if mood == "too long":
            raise ValueError("Error code: 400 - This model's maximum context length is 64 tokens. However, your prompt contains 65")
        if mood == "too many turns":
            try:
                raise MaxTurnsExceeded("Max turns (3) exceeded")
            except MaxTurnsExceeded as error:
                raise RuntimeError("the framework gave up") from error
        if mood == "own limit":
            raise spangrad.MaxTurnsError("5 turns")
        return mood

    class MaxTurnsExceeded(Exception):
        pass
"""
EVENT = semconv.EVALUATION_EVENT
NO_REWARDS = dict.fromkeys(FailureRewards.model_fields)


def reward_event(name: str, value: float) -> tuple[str, dict[str, object]]:
    return EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value}


class Stage:
    """A runner with what is around it."""

    def __init__(self, runner: Runner, sink: OtlpSink, gateway: AttemptGateway) -> None:
        self.runner = runner
        self.sink = sink
        self.gateway = gateway

    def roots(self) -> list[SunkSpan]:
        return self.sink.named("rollout")


@asynccontextmanager
async def stage(directory: Path, agent: AgentSpec, *, builder: BuilderSettings | None = None, **settings: Any) -> AsyncIterator[Stage]:
    (directory / "mine.py").write_text(textwrap.dedent(AGENT))
    with OtlpSink() as sink, AttemptGateway() as gateway:
        chosen = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=RunnerSettings(run_id="run", directory=directory / "runner", **settings),
            builder=builder or BuilderSettings(),
        )
        async with Runner(chosen, agent) as runner:
            yield Stage(runner, sink, gateway)


def facts(root: SunkSpan) -> dict[str, object]:
    """A root's attributes but for those that are new each time."""
    fresh = {semconv.ROLLOUT_ID, semconv.GROUP_ID, semconv.PROCESS_ID, semconv.SEQ}
    assert fresh <= root.attributes.keys()
    return {key: value for key, value in root.attributes.items() if key not in fresh}


async def test_runner_64_concurrent_rollouts_attribute_every_span(tmp_path: Path) -> None:
    agent = CallableAgent("mine:busy", directory=tmp_path)
    async with stage(tmp_path, agent, workers=2, concurrency=64) as on:
        tasks = [Task(f"task-{n}", {"n": n}) for n in range(8)]
        seen: list[Outcome] = []
        outcomes = await on.runner.run(tasks, mode=Mode.VALIDATE, group_size=8, progress=seen.append)
        assert [(o.task_id, o.reward, o.failure, o.calls) for o in outcomes] == [
            (f"task-{n}", {"reward": float(n), "twice": 2.0 * n}, None, 0) for n in range(8) for _ in range(8)
        ]
        assert sorted(seen, key=repr) == sorted(outcomes, key=repr)
        roots = {str(root.attributes[semconv.ROLLOUT_ID]): root for root in on.roots()}
        assert roots.keys() == {o.key.rollout_id for o in outcomes}
        assert Counter(root.attributes[semconv.GROUP_ID] for root in roots.values()) == Counter(
            dict.fromkeys({root.attributes[semconv.GROUP_ID] for root in roots.values()}, 8)
        )
        assert {key: on.gateway.announced[key, 0]["mode"] for key in roots} == dict.fromkeys(roots, "validate")
        by_name = {o.key.rollout_id: o.task_id for o in outcomes}
        for root_id, root in roots.items():
            n = int(by_name[root_id].removeprefix("task-"))
            assert facts(root) == {
                "spangrad.run.id": "run",
                "spangrad.rollout.mode": "validate",
                "spangrad.rollout.attempt": 0,
                "spangrad.task.id": f"task-{n}",
                "spangrad.group.size": 8,
                "spangrad.rollout.calls": 0,
                "spangrad.rollout.final": True,
            }
            assert (root.events, root.parent_id, root.status) == ((reward_event("reward", n), reward_event("twice", 2 * n)), "", "UNSET")
        spans = {span.span_id: span for span in on.sink.spans}
        outer, inner = on.sink.named("outer"), on.sink.named("inner")
        assert len(outer) == len(inner) == 64
        misattributed = [s for s in outer if s.parent_id != roots[str(s.attributes[semconv.ROLLOUT_ID])].span_id]
        misattributed += [s for s in inner if spans[s.parent_id].attributes[semconv.ROLLOUT_ID] != s.attributes[semconv.ROLLOUT_ID]]
        misattributed += [s for s in outer + inner if s.trace_id != roots[str(s.attributes[semconv.ROLLOUT_ID])].trace_id]
        assert misattributed == []
        assert len({s.attributes[semconv.PROCESS_ID] for s in outer}) == 2


async def test_runner_greedy_rollouts_adds_one_per_group(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, greedy_rollouts=True) as on:
        tasks = [Task(name, {"moods": [1.0], "calls": 1}) for name in ("a", "b")]
        outcomes = await on.runner.run(tasks, mode=Mode.TRAIN, group_size=2)
        assert [(o.task_id, o.mode, o.calls) for o in outcomes] == [
            (name, mode, 1) for name in ("a", "b") for mode in (Mode.GREEDY, Mode.TRAIN, Mode.TRAIN)
        ]
        attributes = {str(root.attributes[semconv.ROLLOUT_ID]): root.attributes for root in on.roots()}
        roots = [attributes[o.key.rollout_id] for o in outcomes]
        assert [(root[semconv.ROLLOUT_MODE], root[semconv.GROUP_SIZE]) for root in roots] == [("greedy", 1), ("train", 2), ("train", 2)] * 2
        groups = [root[semconv.GROUP_ID] for root in roots]
        assert groups == [groups[0]] * 3 + [groups[3]] * 3
        assert groups[0] != groups[3]
        # What makes an agent's calls greedy: the announcement for its own endpoint, and the baggage that instrumented clients send.
        announced = [on.gateway.announced[o.key.rollout_id, 0]["mode"] for o in outcomes]
        assert announced == ["greedy", "train", "train"] * 2
        held_out = await on.runner.run(tasks, mode=Mode.VALIDATE, group_size=1)
        assert [o.mode for o in held_out] == [Mode.VALIDATE] * 2


async def test_runner_validation_sampling_is_announced_of_held_out_rollouts_alone(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, validation_sampling=ValidationSampling(temperature=0.5)) as on:
        tasks = [Task("a", {"moods": [1.0], "calls": 1})]
        outcomes = [(await on.runner.run(tasks, mode=mode, group_size=1))[0] for mode in (Mode.TRAIN, Mode.VALIDATE)]
        sampling = [on.gateway.announced[outcome.key.rollout_id, 0].get("sampling") for outcome in outcomes]
    assert sampling == [None, {"temperature": 0.5}]
    direct = Settings(runner=RunnerSettings(gateway=False, validation_sampling=ValidationSampling(top_k=1)))
    with pytest.raises(SettingsError, match="validation_sampling needs the gateway"):
        queued(Rollout(outcomes[0].key, tasks[0], Mode.VALIDATE, "g", 1), direct)


@pytest.mark.parametrize(
    ("asked", "estimator", "greedy"), [(None, "grpo", False), (None, "remax", True), (False, "remax", False), (True, "grpo", True)]
)
def test_wants_greedy_by_setting_or_estimator(asked: bool | None, estimator: Any, greedy: bool) -> None:
    chosen = Settings(runner=RunnerSettings(greedy_rollouts=asked), trainer=trainer_settings(estimator=estimator))
    assert wants_greedy(chosen, Mode.TRAIN) is greedy
    assert not wants_greedy(chosen, Mode.VALIDATE)
    plain = chosen.model_copy(update={"runner": RunnerSettings(greedy_rollouts=asked, gateway=False)})
    with pytest.raises(SettingsError, match="needs the gateway") if greedy else nullcontext():
        assert not wants_greedy(plain, Mode.TRAIN)


async def test_run_failures_of_policy_get_failure_rewards_and_others_are_retried(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    rewards = {"exception": -1.0, "max_turns": -0.5}
    async with stage(tmp_path, agent, concurrency=16, timeout_seconds=8, failure_rewards=rewards) as on:
        moods: dict[str, list[object]] = {
            "exception": ["raise", 1.0],
            "invalid_output": ["text", 1.0],
            "timeout": ["hang", 1.0],
            "context_overflow": ["too long", 1.0],
            "max_turns": ["too many turns", 1.0],
            "max_turns ": ["own limit", 1.0],
            "no_reward": [None, 1.0],
        }
        tasks = [Task(name, {"moods": m, "calls": 2}) for name, m in moods.items()]
        outcomes = await on.runner.run(tasks, mode=Mode.TRAIN, group_size=1)
        expected = dict.fromkeys(moods, 0.0) | {"exception": -1.0, "max_turns": -0.5, "max_turns ": -0.5}
        del expected["no_reward"]
        assert {o.task_id: (o.key.attempt, o.reward, o.failure, o.calls) for o in outcomes} == {
            **{name: (0, {"reward": value}, name.strip(), 2) for name, value in expected.items()},
            "no_reward": (1, {"reward": 1.0}, None, 2),
        }
        roots = {(root.attributes[semconv.TASK_ID], root.attributes[semconv.ROLLOUT_ATTEMPT]): root for root in on.roots()}
        keys = (semconv.ROLLOUT_FAILURE, semconv.ROLLOUT_FINAL, semconv.ROLLOUT_CALLS)
        recorded = {name: (*(root.attributes.get(key) for key in keys), root.status, root.events) for name, root in roots.items()}
        assert recorded == {
            **{(name, 0): (name.strip(), True, 2, "ERROR", (reward_event("reward", value),)) for name, value in expected.items()},
            ("no_reward", 0): ("no_reward", False, 2, "ERROR", ()),
            ("no_reward", 1): (None, True, 2, "UNSET", (reward_event("reward", 1.0),)),
        }


async def test_run_last_call_overflowed_names_context_overflow(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=1, max_attempts=2) as on:
        on.gateway.overflow_all = True
        (raised, well) = await on.runner.run(
            [Task("a", {"moods": ["raise"], "calls": 1}), Task("b", {"moods": [0.5], "calls": 1})], mode=Mode.TRAIN, group_size=1
        )
        assert (raised.failure, raised.detail, raised.reward) == ("context_overflow", "RuntimeError: bad day", {"reward": 0.0})
        assert (well.failure, well.reward) == (None, {"reward": 0.5})


@pytest.mark.parametrize("reason", ["token_budget", "call_budget", "run_timeout"])
async def test_run_attempt_closed_by_gateway_fails_for_that_reason(tmp_path: Path, reason: str) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=1, max_attempts=2, max_calls=3, max_output_tokens=50, timeout_seconds=20) as on:
        on.gateway.budget_spent = reason
        (raised, well) = await on.runner.run(
            [Task("a", {"moods": ["raise"], "calls": 1}), Task("b", {"moods": [0.5], "calls": 1})], mode=Mode.TRAIN, group_size=1
        )
        assert (raised.failure, raised.detail, raised.reward) == (reason.removeprefix("run_"), "RuntimeError: bad day", {"reward": 0.0})
        assert (well.failure, well.reward) == (None, {"reward": 0.5})
        limits = [announcement["limits"] for announcement in on.gateway.announced.values()]
        assert {(each["max_calls"], each["max_output_tokens"]) for each in limits} == {(3, 50)}
        assert all(stages[0] == ("run", 20) for stages in on.gateway.stages.values())
        assert on.gateway.stages.keys() == on.gateway.announced.keys()


async def test_run_failed_attempt_forgotten_by_gateway_has_no_reward(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=1, max_attempts=1) as on:
        on.gateway.forgotten.add(0)
        (outcome,) = await on.runner.run([Task("a", {"moods": ["raise"], "calls": 1})], mode=Mode.TRAIN, group_size=1)
        assert (outcome.failure, outcome.reward, outcome.calls) == (AttemptFailure.UNCOUNTED, None, None)
        assert outcome.detail == "the gateway does not know this attempt any more; it had failed: exception: RuntimeError: bad day"


async def test_run_failed_attempts_without_failure_rewards_are_retried(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=8, timeout_seconds=6, failure_rewards=NO_REWARDS) as on:
        moods = {
            "second try": ["raise", 0.5],
            "never": ["raise", None],
            "invalid": ["text", "text"],
            "hangs": ["hang", 1.0],
            "crashes": [0.0, 0.0],
        }
        outcomes = await on.runner.run([Task(name, {"moods": m, "calls": 2}) for name, m in moods.items()], mode=Mode.TRAIN, group_size=1)
        assert [(o.task_id, o.key.attempt, o.reward, o.failure, o.detail, o.calls) for o in outcomes] == [
            ("second try", 1, {"reward": 0.5}, None, "", 2),
            ("never", 1, None, AttemptFailure.NO_REWARD, "the agent gave no reward: name an evaluator, or return a number", 2),
            (
                "invalid",
                1,
                None,
                AttemptFailure.INVALID_OUTPUT,
                "the reward is 'text', not a finite number: name an evaluator, or return a number",
                2,
            ),
            ("hangs", 1, {"reward": 1.0}, None, "", 2),
            ("crashes", 0, {"reward": 0.0}, None, "", 2),
        ]
        roots = {(root.attributes[semconv.TASK_ID], root.attributes[semconv.ROLLOUT_ATTEMPT]): root for root in on.roots()}
        keys = (semconv.ROLLOUT_FAILURE, semconv.ROLLOUT_FINAL, semconv.ROLLOUT_CALLS)
        recorded = {name: (*(root.attributes.get(key) for key in keys), root.status, root.events) for name, root in roots.items()}
        assert recorded == {
            ("second try", 0): ("exception", False, 2, "ERROR", ()),
            ("second try", 1): (None, True, 2, "UNSET", (reward_event("reward", 0.5),)),
            ("never", 0): ("exception", False, 2, "ERROR", ()),
            ("never", 1): ("no_reward", True, 2, "ERROR", ()),
            ("invalid", 0): ("invalid_output", False, 2, "ERROR", ()),
            ("invalid", 1): ("invalid_output", True, 2, "ERROR", ()),
            ("hangs", 0): ("timeout", False, 2, "ERROR", ()),
            ("hangs", 1): (None, True, 2, "UNSET", (reward_event("reward", 1.0),)),
            ("crashes", 0): (None, True, 2, "UNSET", (reward_event("reward", 0.0),)),
        }
        assert len({roots["never", n].attributes[semconv.ROLLOUT_ID] for n in (0, 1)}) == 1
        assert len({roots["never", n].trace_id for n in (0, 1)}) == 2


async def test_run_without_agent_reward_succeeds_where_air_rules_reward(tmp_path: Path) -> None:
    rule = AirRule(name="slow", kind="latency", reward=-1, seconds=2)
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, builder=BuilderSettings(rules=(rule,), rewards_from="rules"), max_attempts=1) as on:
        moods = {"silent": [None], "invalid": ["text"], "judged": [0.5]}
        outcomes = await on.runner.run([Task(name, {"moods": m, "calls": 1}) for name, m in moods.items()], mode=Mode.TRAIN, group_size=1)
        assert [(outcome.task_id, outcome.failure) for outcome in outcomes] == [
            ("silent", None),
            ("invalid", AttemptFailure.INVALID_OUTPUT),
            ("judged", None),
        ]
        root = next(root for root in on.roots() if root.attributes[semconv.TASK_ID] == "silent")
        assert (root.attributes.get(semconv.ROLLOUT_FAILURE), root.attributes[semconv.ROLLOUT_FINAL], root.events) == (None, True, ())


async def test_run_agent_crash_fails_concurrent_attempts_and_restarts_host(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=4, max_attempts=2, timeout_seconds=30) as on:
        tasks = [Task("neighbour", {"moods": ["hang", 1.0]}), Task("crash", {"moods": ["crash", "crash"]})]
        outcomes = await on.runner.run(tasks, mode=Mode.TRAIN, group_size=1)
        assert {o.task_id: (o.key.attempt, o.failure) for o in outcomes}["crash"] == (1, AttemptFailure.CRASH)
        assert outcomes[1].detail.startswith("the agent's process ended with exit code -9. Its log /")
        first = [r for r in on.roots() if r.attributes[semconv.ROLLOUT_ATTEMPT] == 0]
        assert {r.attributes[semconv.TASK_ID]: r.attributes[semconv.ROLLOUT_FAILURE] for r in first} == {
            "neighbour": "crash",
            "crash": "crash",
        }
        (again,) = await on.runner.run([Task("next", {"moods": [0.5]})], mode=Mode.TRAIN, group_size=1)
        assert again.reward == {"reward": 0.5}


PROGRAM = """
    import json, os, sys, urllib.request
    from opentelemetry import trace
    given = json.load(sys.stdin)
    trace.get_tracer("program").start_span("in the program").end()
    if given == "fail":
        sys.exit(4)
    if given == "hang":
        import time; time.sleep(600)
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).read()
    os.system("sleep 600 &")  # a grandchild that nobody waits for
    print("some words")
    if given != "silent":
        print(json.dumps({"given": given, "key": os.environ["OPENAI_API_KEY"], "cwd": os.getcwd()}) if given == "judge" else given)
"""


async def test_run_command_agent_rollouts_are_rewarded_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    agent = CommandAgent((sys.executable, "program.py"), directory=tmp_path, instrument=True)
    async with stage(tmp_path, agent, concurrency=4, max_attempts=1, timeout_seconds=120) as on:
        tasks = [Task(str(given), given) for given in (0.25, "fail", "silent", "words")]
        outcomes = await on.runner.run(tasks, mode=Mode.PROBE, group_size=1)
        assert [(o.reward, o.failure, o.detail, o.calls) for o in outcomes] == [
            ({"reward": 0.25}, None, "", 1),
            ({"reward": 0.0}, AttemptFailure.EXIT_CODE, "exit code 4", 0),
            (
                {"reward": 0.0},
                AttemptFailure.INVALID_OUTPUT,
                "the reward is 'some words', not a finite number: name an evaluator, or return a number",
                1,
            ),
            (
                {"reward": 0.0},
                AttemptFailure.INVALID_OUTPUT,
                "the reward is 'words', not a finite number: name an evaluator, or return a number",
                1,
            ),
        ]
        roots = {root.attributes[semconv.ROLLOUT_ID]: root for root in on.roots()}
        inside = on.sink.named("in the program")
        assert len(inside) == 4
        assert [s for s in inside if s.parent_id != roots[s.attributes[semconv.ROLLOUT_ID]].span_id] == []

    async def are_gone() -> bool:
        return not any(process.info["cwd"] == str(tmp_path) for process in psutil.process_iter(["cwd"]))

    await until(are_gone)  # they are killed, and on a busy machine yet to end


async def test_run_command_agent_with_evaluator_timeout_fails(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    right = {"given": "judge", "key": "none", "cwd": str(tmp_path)}
    (tmp_path / "judge.py").write_text(f"def judge(given, output):\n    return float(output == {right!r})\n")
    agent = CommandAgent((sys.executable, "program.py"), evaluator="judge:judge", directory=tmp_path)
    ends: list[tuple[object, object]] = []
    for task, seconds in (("judge", 120), ("hang", 1)):
        async with stage(tmp_path, agent, max_attempts=1, timeout_seconds=seconds) as on:
            (outcome,) = await on.runner.run([Task(task, task)], mode=Mode.TRAIN, group_size=1)
            assert on.sink.named("in the program") == []
        ends.append((outcome.reward, outcome.failure))
    assert ends == [({"reward": 1.0}, None), ({"reward": 0.0}, AttemptFailure.TIMEOUT)]


async def test_run_cancelled_ends_root_spans_and_leaves_no_process(tmp_path: Path) -> None:
    agent = CallableAgent("mine:moody", directory=tmp_path)
    async with stage(tmp_path, agent, concurrency=2) as on:
        task = asyncio.create_task(on.runner.run([Task("t", {"moods": ["hang"], "calls": 1})], mode=Mode.TRAIN, group_size=2))
        for _ in range(2):
            assert await asyncio.to_thread(on.gateway.chatted.acquire, timeout=60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [(r.attributes[semconv.ROLLOUT_FAILURE], r.attributes[semconv.ROLLOUT_FINAL]) for r in on.roots()] == [
            ("cancelled", True)
        ] * 2
    assert _children() == []


def _children() -> list[str]:
    """Command lines of agent hosts among this process's children."""
    processes = [process.as_dict(["cmdline"]) for process in psutil.Process().children()]
    return [" ".join(process["cmdline"]) for process in processes if "spangrad.agent.host" in (process["cmdline"] or [])]


async def test_run_with_missing_service_raises_before_any_rollout(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    away = f"http://127.0.0.1:{port}"
    agent = CallableAgent("mine:busy", directory=tmp_path)
    kept = RunnerSettings(directory=tmp_path)
    with OtlpSink() as sink, AttemptGateway() as gateway:
        settings = Settings(store=StoreSettings(otlp_endpoint=away), gateway=GatewaySettings(url=gateway.url), runner=kept)
        with pytest.raises(
            StoreError, match=f"the store at {away} does not answer .* Start it with `spangrad store`, or set store.otlp_endpoint"
        ):
            await Runner(settings, agent).__aenter__()
        settings = Settings(store=StoreSettings(otlp_endpoint=sink.url), gateway=GatewaySettings(url=away), runner=kept)
        with pytest.raises(
            GatewayError, match=f"the gateway at {away} does not answer .* Start it with `spangrad gateway`, or set gateway.url"
        ):
            await Runner(settings, agent).__aenter__()
        settings = Settings(store=StoreSettings(otlp_endpoint=sink.url), gateway=GatewaySettings(url=gateway.url), runner=kept)
        with pytest.raises(AgentError, match=r"'mine:busy' cannot be loaded from .*: ModuleNotFoundError"):
            await Runner(settings, agent).__aenter__()
        sink.refusals = [(401, {})]
        with pytest.raises(
            StoreError, match=re.escape("refuses POST /v1/traces (401): not now Check store.otlp_endpoint and store.token.")
        ):
            await Runner(settings, agent).__aenter__()
        assert sink.spans == []
    assert _children() == []


def test_agent_environment_has_endpoints_and_no_secrets_of_servers() -> None:
    settings = Settings(
        store=StoreSettings(otlp_endpoint="http://s:1", token="a+b/c==,%41"),  # pyright: ignore[reportArgumentType]
        gateway=GatewaySettings(url="http://g:2/", token="k", engine_url="http://e:3"),  # pyright: ignore[reportArgumentType]
    )
    started = {"PATH": "/bin", "SPANGRAD_RUNNER__DIRECTORY": "runs", "TRACEPARENT": "x", "BAGGAGE": "y", "OPENAI_BASE_URL": "http://other"}
    started |= {"SPANGRAD_STORE__TOKEN": "a", "SPANGRAD_gateway__token": "k", "SPANGRAD_QUEUE": '{"token": "q"}', "SPANGRAD_QUEUE__DB": "d"}
    started |= {"SPANGRAD_STORE__URL": "http://me:secret@s:8123", "SPANGRAD_GATEWAY__BACKENDS": "[]"}
    started |= {"SPANGRAD_RUNNER__SANDBOX__TOKEN": "of the tools", "SPANGRAD_TOOLS__TOKEN": "t"}
    started |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:1/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=other"}
    started |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    started |= {"OTEL_RESOURCE_ATTRIBUTES": "team=search,spangrad.rollout.id=that whose program started the runner"}
    store = {
        "PATH": "/bin",
        "SPANGRAD_RUNNER__DIRECTORY": "runs",
        "SPANGRAD_RUNNER__SANDBOX__TOKEN": "of the tools",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "team=search",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://s:1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{agent_token('a+b/c==,%41')}",
    }
    assert agent_environment(started, settings, CallableAgent("mine:agent")) == {
        **store,
        "OPENAI_BASE_URL": "http://g:2/v1",
        "OPENAI_API_KEY": agent_token("k"),
    }
    assert parse_headers(store["OTEL_EXPORTER_OTLP_HEADERS"]) == {"authorization": f"Bearer {agent_token('a+b/c==,%41')}"}
    direct = settings.model_copy(update={"runner": RunnerSettings(gateway=False)})
    engine = {**store, "OPENAI_BASE_URL": "http://e:3/v1"}
    episodes = agent_environment(started, settings, CallableAgent(EPISODES, environment="mine:Game"))
    assert EpisodeSettings.model_validate_json(episodes["SPANGRAD_EPISODE"]) == settings.runner.episode
    assert agent_environment(started, direct, CallableAgent("mine:agent")) == {**engine, "OPENAI_API_KEY": "none"}
    assert agent_environment({**started, "OPENAI_API_KEY": "e"}, direct, CallableAgent("mine:agent")) == {**engine, "OPENAI_API_KEY": "e"}


async def test_run_without_gateway_has_no_call_count(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(AGENT))
    with OtlpSink() as sink:
        settings = Settings(store=StoreSettings(otlp_endpoint=sink.url), runner=RunnerSettings(gateway=False, directory=tmp_path))
        async with Runner(settings, CallableAgent("mine:busy", directory=tmp_path)) as runner:
            (outcome,) = await runner.run([Task("t", {"n": 3})], mode=Mode.TRAIN, group_size=1)
        assert (outcome.calls, outcome.reward) == (None, {"reward": 3.0, "twice": 6.0})
        (root,) = sink.named("rollout")
        assert semconv.ROLLOUT_CALLS not in root.attributes
