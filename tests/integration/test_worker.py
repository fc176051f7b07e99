"""Workers: what they hold is told or given back, each attempt's root comes before its ending, and what is left of a run is finished."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import textwrap
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from runner.embedded import EmbeddedQueue
from runner.queue.wire import RolloutSelector, RolloutState
from runner.runner import Outcome, Runner
from runner.workers.agents import CallableAgent
from runner.workers.handlers import Handlers
from runner.workers.serving import serve
from spangrad import semconv
from spangrad.errors import QueueError
from spangrad.http.queue_messages import NewRollout
from spangrad.processes import own_command, wait_until
from spangrad.settings import RunnerSettings, Settings
from spangrad.types import AttemptFailure, Mode, Task
from tests.support.runners import RunnerServices, kill, new_rollouts, queue_settings, runner_services, serving, until_ended

pytestmark = pytest.mark.usefixtures("quick_agents")

BAD = {"crash": 10, "hang": 5, "garbage": 5}
"""Number of agents that fail in each way, of 100 tasks."""
REASONS = {"crash": AttemptFailure.EXIT_CODE, "hang": AttemptFailure.TIMEOUT, "garbage": AttemptFailure.INVALID_OUTPUT, "well": None}
REWARDS = {AttemptFailure.EXIT_CODE: {"reward": 0.0}, AttemptFailure.TIMEOUT: {"reward": -1.0}, AttemptFailure.INVALID_OUTPUT: None}


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_worker_rollouts_with_failing_agents_end_with_a_reason_each(tmp_path: Path, count: int) -> None:
    moods = [mood for mood, percent in BAD.items() for _ in range(count * percent // 100)]
    moods += ["well"] * (count - len(moods))
    tasks = [Task(f"{number} {mood}", mood) for number, mood in enumerate(moods)]
    rewards = {"timeout": -1.0, "invalid_output": None}
    with runner_services(
        tmp_path, concurrency=8, timeout_seconds=10, max_attempts=2, attempts_kept=count, failure_rewards=rewards
    ) as services:
        async with Runner(services.settings, services.agent) as runner:
            outcomes = await runner.run(tasks, mode=Mode.TRAIN, group_size=1)
        assert Counter((o.task_id.split()[1], o.failure) for o in outcomes) == Counter((mood, REASONS[mood]) for mood in moods)
        assert {o.failure: o.reward for o in outcomes} == {None: {"reward": 1.0}, **REWARDS}
        # What fails without a reward is tried twice, and each attempt has its root; the last one of each rollout ends it.
        expected = {(o.key.rollout_id, n): n == o.key.attempt for o in outcomes for n in range(o.key.attempt + 1)}
        assert {key: root[semconv.ROLLOUT_FINAL] for key, root in services.roots().items()} == expected
        assert Counter(o.key.attempt for o in outcomes) == Counter(int(mood == "garbage") for mood in moods)
        by_mood: dict[str, Outcome] = {o.task_id.split()[1]: o for o in outcomes}
        roots = services.roots()
        shown = {
            mood: [
                (root.get(semconv.ROLLOUT_FAILURE), root.get(semconv.ROLLOUT_LOG, ""))
                for root in (roots[o.key.rollout_id, n] for n in range(o.key.attempt + 1))
            ]
            for mood, o in by_mood.items()
        }
        assert shown == {
            "crash": [("exit_code", "")],
            "hang": [("timeout", "")],
            "garbage": [("invalid_output", "no number\n")] * 2,
            "well": [(None, "thinking\n1\n")],
        }
        assert services.processes() == []


async def test_worker_sigterm_releases_unfinished_rollouts(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=1)
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=2, drain_seconds=0.5) as services:
        async with serving(settings) as (client, _):
            tasks = [*new_rollouts(1, "hang", priority=1), *new_rollouts(3, "slow")]
            await client.enqueue(
                "run", [_mood(rollout, rollout.rollout_id.rstrip("0123456789")) for rollout in tasks if rollout.rollout_id]
            )
            worker = services.start_worker()
            await asyncio.to_thread(services.sink.wait_for, lambda: bool(services.sink.named("rollout")))
            worker.process.terminate()
            assert await asyncio.to_thread(worker.process.wait, 120) == 0
            states = {name: await client.rollout(name) for name in ("hang0", "slow0", "slow1", "slow2")}
            ends = {name: [attempt.reason for attempt in rollout.attempts] for name, rollout in states.items()}
            assert (states["hang0"].state, states["hang0"].attempts_left, ends["hang0"]) == (
                RolloutState.QUEUED,
                1,
                [AttemptFailure.RELEASED],
            )
            assert (states["slow0"].state, ends["slow0"]) == (RolloutState.SUCCEEDED, [None])
            assert states["slow2"].state in {RolloutState.QUEUED, RolloutState.SUCCEEDED}
            released = services.roots()["hang0", 0]
            assert (released[semconv.ROLLOUT_FAILURE], released[semconv.ROLLOUT_FINAL]) == ("released", False)
            # Every attempt that the queue knows of has its root.
            assert services.roots().keys() == {(name, attempt.attempt) for name, rollout in states.items() for attempt in rollout.attempts}
        assert services.processes() == []


def _mood(rollout: NewRollout, mood: str) -> NewRollout:
    return msgspec.structs.replace(rollout, input=msgspec.Raw(json.dumps(mood).encode()))


async def test_worker_cancelled_rollout_ends_with_root_span(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=3)
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=1) as services:
        async with serving(settings) as (client, _):
            await client.enqueue("run", [_mood(rollout, "hang") for rollout in new_rollouts(2)])
            services.start_worker()
            await asyncio.to_thread(wait_until, lambda: bool(services.gateway.announced), 120, "an attempt")
            cancelled = await client.cancel(RolloutSelector(run_id="run"))
            assert (cancelled.queued, cancelled.running) == (1, 1)
            await asyncio.to_thread(services.sink.wait_for, lambda: bool(services.sink.named("rollout")))
            assert {key: (r[semconv.ROLLOUT_FAILURE], r[semconv.ROLLOUT_FINAL]) for key, r in services.roots().items()} == {
                ("r0", 0): ("cancelled", True)
            }
            await asyncio.to_thread(wait_until, lambda: not services.processes(), 60, "the end of the agent's programs")


async def test_worker_with_an_unforeseen_error_ends_and_frees_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ArithmeticError("no code expects this")

    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", queue__lease_seconds=5, max_attempts=2)
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=1) as services:
        async with serving(settings) as (client, _):
            await client.enqueue("run", [_mood(rollout, "well") for rollout in new_rollouts(1)])
            monkeypatch.setattr(Handlers, "make", fail)
            with pytest.raises(ArithmeticError, match="no code expects this"):
                await asyncio.wait_for(serve(services.settings, services.agent, asyncio.Event(), lambda: None), 60)
            services.start_worker()
            (rollout,) = await until_ended(client, 1)
            assert rollout.state is RolloutState.SUCCEEDED
            assert [attempt.reason for attempt in (await client.rollout("r0")).attempts] == [AttemptFailure.LOST, None]
        assert services.processes() == []


async def test_worker_killed_has_its_root_spans_closed_by_others(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=2)
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=1) as services:
        async with serving(settings) as (client, _):
            await client.enqueue("run", [_mood(rollout, "hang") for rollout in new_rollouts(1)])
            for attempt in range(2):
                worker = services.start_worker()
                key = ("r0", attempt)
                await asyncio.to_thread(wait_until, lambda key=key: key in services.gateway.announced, 120, "an attempt")
                kill(worker.process.pid)
                worker.process.wait()
            await asyncio.to_thread(wait_until, lambda: not services.processes(), 60, "the end of the agent's programs")
            (rollout,) = await until_ended(client, 1)
            assert rollout.state is RolloutState.DEAD
            for _ in range(2):  # two workers that find it dead
                services.start_worker()
            await asyncio.to_thread(services.sink.wait_for, lambda: len(services.sink.named("rollout")) >= 4)
            attempts = (await client.rollout(rollout.rollout_id)).attempts
            rows = {(span.span_id, span.began, span.seconds) for span in services.sink.named("rollout")}
            assert len(rows) == 2, "both workers wrote the same row of each attempt"
            assert {began for _, began, _ in rows} == {round(attempt.began_at * 1e9) for attempt in attempts}
            assert all(seconds > 0 for *_, seconds in rows)
            assert {key: (r[semconv.ROLLOUT_FAILURE], r[semconv.ROLLOUT_FINAL]) for key, r in services.roots().items()} == {
                ("r0", 0): ("lost", False),
                ("r0", 1): ("lost", True),
            }


def run_command(services: RunnerServices, *words: str) -> list[str]:
    settings = {
        "store.otlp_endpoint": services.settings.store.otlp_endpoint,
        "gateway.url": services.settings.gateway.url,
        "runner.directory": services.settings.runner.directory,
        "runner.concurrency": 2,
        "runner.group_size": 1,
    }
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [*own_command("run", "--run-id", "run", "--directory", str(services.directory), *sets, *words), "--", "sh", "agent.sh"]


def test_queue_of_another_schema_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def left() -> list[EmbeddedQueue]:
        return [queue for queue, _ in await EmbeddedQueue.left(settings)]

    async def begin() -> Path:
        queue = EmbeddedQueue.begin(settings)
        await queue.enqueue(settings.runner.run_id, new_rollouts(1))
        await queue.close()
        return queue.file

    settings = Settings(runner=RunnerSettings(directory=tmp_path))
    file = asyncio.run(begin())
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE schema_of_queue_db SET version = 'another'")
    assert asyncio.run(left()) == []
    assert (f"what {file} has of run" in caplog.text, "has tables of schema another" in caplog.text) == (True, True)
    assert file.exists()


def test_run_resume_after_kill_completes_rollouts(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"task_id": f"t{n}", "input": "slow"}) + "\n" for n in range(12)))
    with runner_services(tmp_path) as services:
        run = subprocess.Popen(run_command(services, "--tasks", str(tmp_path / "tasks.jsonl")), stdout=subprocess.DEVNULL)
        try:
            services.sink.wait_for(lambda: len(services.sink.named("rollout")) >= 3, 120)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        resumed = subprocess.run(run_command(services, "--resume"), capture_output=True, text=True, timeout=300)
        assert resumed.returncode == 0, resumed.stderr
        assert len([line for line in resumed.stdout.splitlines() if line.startswith("t") and "+1.000" in line]) == 12
        finals = Counter(key[0] for key, root in services.roots().items() if root[semconv.ROLLOUT_FINAL])
        assert len(finals) == 12
        lost = [root for root in services.roots().values() if root.get(semconv.ROLLOUT_FAILURE)]
        assert {root[semconv.ROLLOUT_FAILURE] for root in lost} <= {"lost"}
        assert services.processes() == []
        assert list(services.settings.runner.directory.glob("queues/run/*.db")) == []
        with pytest.raises(QueueError, match="there is nothing to resume"):
            asyncio.run(Runner(services.settings, services.agent, resume=True).__aenter__())


JUDGED = """
    import asyncio, time
    begun = judged = running = judging = 0
    end = time.monotonic() + 60
    most = {"running": 0, "judging": 0, "late": 0}

    async def agent(given):
        global begun, running
        running += 1
        most["running"] = max(most["running"], running)
        while given > 1 and not judging and time.monotonic() < end:  # the first two have nobody to wait for
            await asyncio.sleep(0.01)
        most["late"] += judging > 0  # went on while another one was judged
        begun += 1
        await asyncio.sleep(0.05)
        running -= 1
        return given

    def judge(given, output):
        global judged, judging
        judging += 1
        most["judging"] = max(most["judging"], judging)
        while begun < min(judged + 3, 8) and time.monotonic() < end:  # beside the one that is judged there are two agents
            time.sleep(0.01)
        judged += 1
        judging -= 1
        return dict(most)
"""


async def test_evaluations_setting_bounds_evaluators_apart_from_agents(tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(textwrap.dedent(JUDGED))
    agent = CallableAgent("judged:agent", evaluator="judged:judge", directory=tmp_path)
    with runner_services(tmp_path, concurrency=2, evaluations=1) as services:
        async with Runner(services.settings, agent) as runner:
            outcomes = await runner.run([Task(str(n), n) for n in range(8)], mode=Mode.TRAIN, group_size=1)
    rewards = [o.reward for o in outcomes if o.reward]
    assert len(rewards) == 8
    most = {name: max(reward[name] for reward in rewards) for name in ("running", "judging")}
    assert most == {"running": 2, "judging": 1}
    assert max(reward["late"] for reward in rewards) >= 6, "all but the first two"
