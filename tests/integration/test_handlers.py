"""Handlers of several data sources in one worker: each rollout by its own, with hooks, empty results and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.runner import Outcome, Runner
from runner.workers.agents import CallableAgent, CommandAgent
from spangrad import semconv
from spangrad.settings.runner import HandlerSettings
from spangrad.types import Mode, Task
from tests.support.runners import new_rollouts, queue_settings, runner_services, serving

pytestmark = pytest.mark.usefixtures("quick_agents")

AGENTS = """
import json
import sys


def solve(given):
    print("solving", given, file=sys.stderr)
    if given == "raise":
        raise LookupError("lost")
    if given == "give up":
        raise RuntimeError("no idea")
    return {"empty": "", "garbled": "not json"}.get(given, given)


def judge(given, output):
    if output == "not json":
        raise ValueError("unreadable")
    return {"reward": 1.0, "judged": float(len(output))}


def rescue(given, error, stage):
    if isinstance(error, RuntimeError):
        return None
    return 0.25 if stage == "evaluate" else "half"
"""


async def test_handlers_run_each_rollout_by_its_data_source(tmp_path: Path) -> None:
    (tmp_path / "solver.py").write_text(AGENTS)
    math = CallableAgent("solver:solve", evaluator="solver:judge", directory=tmp_path, on_failure="solver:rescue")
    code = CommandAgent(("sh", "-c", "read given; echo compiling >&2; echo 0.5"), directory=tmp_path)
    handlers = {"math": HandlerSettings(empty_reward=-1.0, concurrency=2, max_calls=7), "code": HandlerSettings()}
    with runner_services(tmp_path, concurrency=4, max_attempts=2, handlers=handlers) as services:
        tasks = [Task(name, name, data_source="math") for name in ("raise", "give up", "empty", "garbled", "four")]
        tasks += [Task("sh", "sh", data_source="code"), Task("else", 1, data_source="chess"), Task("unnamed", 1)]
        async with Runner(services.settings, {"math": math, "code": code}) as runner:
            outcomes = {each.task_id: each for each in await runner.run(tasks, mode=Mode.TRAIN, group_size=1)}
        roots = {root[semconv.TASK_ID]: root for root in services.roots().values()}
    assert {name: each.reward for name, each in outcomes.items()} == {
        "raise": {"reward": 1.0, "judged": 4.0},
        "give up": {"reward": 0.0},
        "empty": {"reward": -1.0},
        "garbled": {"reward": 0.25},
        "four": {"reward": 1.0, "judged": 4.0},
        "sh": {"reward": 0.5},
        "else": None,
        "unnamed": None,
    }
    assert (outcomes["give up"].failure, outcomes["give up"].detail) == ("exception", "RuntimeError: no idea"), "the hook gave nothing"
    partial = {name: root[semconv.ROLLOUT_PARTIAL] for name, root in roots.items() if semconv.ROLLOUT_PARTIAL in root}
    assert partial == {"raise": "LookupError: lost", "garbled": "ValueError: unreadable"}
    assert no_handler(outcomes["else"]) == "the worker has no handler for data source 'chess', only for code, math."
    assert no_handler(outcomes["unnamed"]) == "the worker has no handler for rollouts without a data source, only for code, math."
    sources = {name: root.get(semconv.ROLLOUT_DATA_SOURCE) for name, root in roots.items()}
    assert sources == {**dict.fromkeys(roots, "math"), "sh": "code", "else": "chess", "unnamed": None}
    assert roots["sh"][semconv.ROLLOUT_LOG] == "compiling\n0.5\n"
    assert str(roots["raise"][semconv.ROLLOUT_LOG]).startswith("solving raise\n")
    assert "LookupError: lost" in str(roots["raise"][semconv.ROLLOUT_LOG])
    ran = {name: each.key.rollout_id for name, each in outcomes.items() if each.failure != "no_handler"}
    announced = {name: services.gateway.announced[rollout, 0]["limits"] for name, rollout in ran.items()}
    assert {name: limits.get("max_calls") for name, limits in announced.items()} == {**dict.fromkeys(announced, 7), "sh": None}


COUNTED = """
import os, pathlib, time

running = pathlib.Path(__file__).parent / "running"


def together(given):
    running.mkdir(exist_ok=True)
    mark = running / given
    mark.touch()
    time.sleep(0.1)
    count = len(list(running.iterdir()))
    mark.unlink()
    return {"together": count, "process": os.getpid()}
"""


async def test_slots_of_a_handler_are_shared_by_the_processes_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    agent = CallableAgent("counted:together", directory=tmp_path)
    handlers = {"math": HandlerSettings(workers=3, concurrency=2)}
    with runner_services(tmp_path, workers=1, concurrency=8, max_attempts=1, handlers=handlers) as services:
        async with Runner(services.settings, {"math": agent}) as runner:
            tasks = [Task(str(number), str(number), data_source="math") for number in range(8)]
            outcomes = await runner.run(tasks, mode=Mode.TRAIN, group_size=1)
    rewards = [outcome.reward or {} for outcome in outcomes]
    assert {str(reward["together"]) for reward in rewards} <= {"1.0", "2.0"}
    assert len({str(reward["process"]) for reward in rewards}) == 2, "no process is started without a slot"


async def test_handlers_limit_the_time_of_their_agents(tmp_path: Path) -> None:
    seconds = {"slow": 1, "hurried": 60}
    agents = {name: CommandAgent(("sh", "-c", f"sleep {seconds[name]}; echo 0.5"), directory=tmp_path) for name in seconds}
    handlers = {"slow": HandlerSettings(), "hurried": HandlerSettings(timeout_seconds=0.2)}
    with runner_services(tmp_path, max_attempts=1, handlers=handlers) as services:
        async with Runner(services.settings, agents) as runner:
            tasks = [Task(name, name, data_source=name) for name in handlers]
            outcomes = {each.task_id: each.failure for each in await runner.run(tasks, mode=Mode.TRAIN, group_size=1)}
    assert outcomes == {"slow": None, "hurried": "timeout"}


async def test_queue_gives_each_rollout_the_time_limit_of_its_handler(tmp_path: Path) -> None:
    handlers = {"slow": HandlerSettings(timeout_seconds=900), "usual": HandlerSettings()}
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", runner__handlers=handlers)
    async with serving(settings) as (client, _):
        sources = ("slow", "usual", "else", "")
        await client.enqueue("run", [rollout for source in sources for rollout in new_rollouts(1, f"{source} ", data_source=source)])
        await client.enqueue("run", new_rollouts(1, "own", data_source="slow", timeout_seconds=5))
        leases = await client.lease("run", "worker", 5)
    assert {lease.rollout_id: lease.timeout_seconds for lease in leases} == {
        "slow 0": 900,
        "usual 0": 300,
        "else 0": 300,
        " 0": 300,
        "own0": 5,
    }


def no_handler(outcome: Outcome) -> str:
    """Detail of a rollout that no handler took, which is not tried again."""
    assert (outcome.failure, outcome.key.attempt) == ("no_handler", 0)
    return outcome.detail
