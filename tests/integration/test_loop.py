"""The stages together: real runner, vLLM, gateway, store, builder and verl, and the laws that only the whole can break."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from commands.demo.settings import write_settings
from commands.training.play import play
from runner.runner import Outcome, Runner
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent
from spangrad.episode.agent import REFERENCE as EPISODES
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import Selection, Settings, StoreSettings
from spangrad.settings.runner import EpisodeSettings, FailureRewards, PlayerSettings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.store.clickhouse import connect
from spangrad.types import Mode, Task
from tests.support.dialects import IDS_OF_ANSWERS
from tests.support.processes import engine_settings, fetch, gateway_settings, run_spangrad, running_engine, running_gateway
from trainer.data.failures import failed_shares
from trainer.data.source import GroupReader
from transition_builder.loop import build_once

pytestmark = pytest.mark.vllm

AGENTS = Path(__file__).resolve().parent.parent / "agents"
NODE = Path(__file__).parents[2] / ".venv-node" / "node_modules"
ASK = CallableAgent("plain_agents:ask", directory=AGENTS)
TASKS = [Task("lima", {"city": "lima"}), Task("rome", {"city": "rome"})]


def own_run(settings: Settings, *, gateway: bool = True, **builder: object) -> Settings:
    """The settings with a run of the test's own."""
    run = uuid.uuid4().hex
    return settings.model_copy(
        update={
            "runner": settings.runner.model_copy(update={"run_id": run, "concurrency": 8, "gateway": gateway}),
            "trainer": settings.trainer.model_copy(update={"run_id": run}),
            "builder": settings.builder.model_copy(update={"selection": Selection(policies="policy"), **builder}),
        }
    )


def roll_out(
    settings: Settings, agent: AgentSpec, tasks: Sequence[Task], logs: Path, *, mode: Mode = Mode.TRAIN, size: int = 4
) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with Runner(settings.model_copy(update={"runner": settings.runner.model_copy(update={"directory": logs})}), agent) as runner:
            return await runner.run(tasks, mode=mode, group_size=size)

    return asyncio.run(run())


def build_all(settings: Settings, rollouts: int, timeout_seconds: float = 120) -> None:
    """Build until every rollout of the run has left the builder."""
    end = time.monotonic() + timeout_seconds
    while (built := ask(settings, "SELECT uniqExact(RolloutId) FROM spangrad.builds WHERE RunId = {run:String}")[0][0]) < rollouts:
        assert time.monotonic() < end, f"{built} of {rollouts} rollouts were built"
        build_once(settings)
        time.sleep(0.1)


def ask(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    client = connect(settings.store)
    try:
        return list(client.query(query, parameters={"run": settings.runner.run_id}).result_rows)
    finally:
        client.close()


def train_once(settings: Settings, directory: Path, model: Path) -> str:
    """`spangrad train --once` in a process of its own; what it logged."""
    values: dict[str, object] = {
        "store.url": settings.store.url,
        "gateway.url": settings.gateway.url,
        "builder.selection": {"policies": "policy"},
        "trainer.run_id": settings.runner.run_id,
        "trainer.model": str(model),
        "trainer.directory": str(directory / "policies"),
        "trainer.sampling.groups_per_batch": 2,
        "trainer.optim.learning_rate": 1e-3,
    }
    assert load_settings(values, env={}).builder.spec == settings.builder.spec
    write_settings(directory / "spangrad.toml", explain_settings(values, env={}))
    answer = run_spangrad("train", "--once", "--config", str(directory / "spangrad.toml"), kind="trainer", timeout=240)
    assert answer.returncode == 0, answer.stderr
    return answer.stderr


@pytest.fixture(autouse=True)
def _quick_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain")  # their framework is openai


def test_loop_every_call_is_transition_or_drop(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    agent = CallableAgent("plain_agents:stumble", directory=AGENTS)
    outcomes = roll_out(settings, agent, TASKS, tmp_path, size=2)
    assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, 2)] * 4
    build_all(settings, 4)
    calls, transitions = (
        ask(settings, f"SELECT count(), uniqExact(CallId) FROM spangrad.{view} WHERE RunId = {{run:String}}")[0]
        for view in ("calls", "transitions")
    )
    drops = ask(settings, "SELECT Reason, count(), uniqExact(CallId) FROM spangrad.drops WHERE RunId = {run:String} GROUP BY Reason")
    assert (calls, transitions, drops) == ((8, 8), (4, 4), [("call_failed", 4, 4)])
    # The reward of a rollout whose last call was dropped stands on the last kept one.
    kept = ask(
        settings, "SELECT RolloutId, sum(arraySum(Rewards.Value)) FROM spangrad.transitions WHERE RunId = {run:String} GROUP BY RolloutId"
    )
    assert dict(kept) == {outcome.key.rollout_id: (outcome.reward or {})["reward"] for outcome in outcomes}


def test_loop_episode_without_agent_rewards_the_call_of_each_step(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"episode": EpisodeSettings(turn_tokens=3)})})
    outcomes = roll_out(settings, CallableAgent(EPISODES, environment="two_guesses:TwoGuesses", directory=AGENTS), TASKS, tmp_path, size=2)
    assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, 2)] * 4
    build_all(settings, 4)
    rows = ask(settings, "SELECT Turn, `Rewards.Value` FROM spangrad.transitions WHERE RunId = {run:String} ORDER BY Turn")
    assert rows == [(0, [0.25])] * 4 + [(1, [0.5])] * 4
    appended = (
        "SELECT startsWith(arrayStringConcat(b.PromptIds, ' '), arrayStringConcat(arrayConcat(a.PromptIds, a.ResponseIds), ' ') || ' ')"
        " FROM spangrad.transitions AS a INNER JOIN spangrad.transitions AS b ON a.RolloutId = b.RolloutId AND b.Turn = a.Turn + 1"
        " WHERE a.RunId = {run:String}"
    )
    assert ask(settings, appended) == [(True,)] * 4, "the second prompt begins with all that the first call read and sampled"
    steps = "SELECT ToolName, count(), uniqExact(CallId) FROM spangrad.tool_calls WHERE RunId = {run:String} GROUP BY ToolName"
    assert ask(settings, steps) == [("step", 8, 8)]


def test_loop_episode_on_a_server_of_environments_trains_as_a_local_one(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    (port,) = free_ports(1)
    words = ("env", "serve", "two_guesses:TwoGuesses", "--directory", str(AGENTS), "--port", str(port))
    serving = Child(
        "environments", own_command(*words, "--set", f"store.otlp_endpoint={settings.store.otlp_endpoint}"), tmp_path / "env.log"
    )
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, "environments", [serving])
        settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"episode": EpisodeSettings(turn_tokens=3)})})
        agent = CallableAgent(EPISODES, environment=f"openenv+http://127.0.0.1:{port}", directory=AGENTS)
        outcomes = roll_out(settings, agent, TASKS, tmp_path, size=2)
    finally:
        serving.stop()
    assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, 2)] * 4
    build_all(settings, 4)
    rows = ask(settings, "SELECT Turn, `Rewards.Value` FROM spangrad.transitions WHERE RunId = {run:String} ORDER BY Turn")
    assert rows == [(0, [0.25])] * 4 + [(1, [0.5])] * 4
    steps = (
        "SELECT SpanName, count(), countIf(ParentSpanId IN (SELECT SpanId FROM otel.otel_traces WHERE SpanName = 'execute_tool step')) "
        "FROM otel.otel_traces WHERE ServiceName = 'spangrad-environments' AND SpanAttributes['spangrad.run.id'] = {run:String} "
        "GROUP BY SpanName ORDER BY SpanName"
    )
    assert ask(settings, steps) == [("reset", 4, 0), ("step", 8, 8)]


def test_loop_greedy_rollout_has_the_transcript_of_play_byte_by_byte(
    gateway: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training and use by the same version: `spangrad play --greedy` behind the same gateway. What is trained is what was generated."""
    settings = own_run(gateway)
    settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"episode": EpisodeSettings(turn_tokens=5)})})
    agent = CallableAgent(EPISODES, environment="two_guesses:TwoGuesses", directory=AGENTS)
    (outcome,) = roll_out(settings, agent, TASKS[:1], tmp_path, mode=Mode.GREEDY, size=1)
    assert (outcome.failure, outcome.calls) == (None, 2)
    build_all(settings, 1)
    spans = "FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = {run:String}"
    *_, (request, response) = ask(
        settings,
        f"SELECT SpanAttributes['spangrad.request.json'], SpanAttributes['spangrad.response.json'] {spans} AND SpanName = 'chat policy'"
        " AND SpanAttributes['spangrad.request.json'] != '' ORDER BY Timestamp",
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    token = settings.gateway.token.get_secret_value() if settings.gateway.token else "none"
    monkeypatch.setenv("SPANGRAD_GATEWAY__TOKEN", token)
    url = f"gateway.url={settings.gateway.url}"
    play(
        "two_guesses:TwoGuesses",
        task=json.dumps(TASKS[0].input),
        greedy=True,
        json=True,
        directory=AGENTS,
        set_=[url, "runner.episode.turn_tokens=5"],
    )
    played = json.loads(capsys.readouterr().out)["messages"]
    assert json.dumps(played[:-2]) == json.dumps(json.loads(request)["messages"])
    assert played[-2]["content"] == json.loads(response)["choices"][0]["message"]["content"]
    trained = ask(settings, "SELECT sum(length(ResponseIds)) FROM spangrad.transitions WHERE RunId = {run:String}")
    assert trained == ask(
        settings,
        f"SELECT sum(toUInt64(SpanAttributes['gen_ai.usage.output_tokens'])) {spans}"
        " AND ScopeName = 'spangrad.episode' AND SpanName = 'chat policy'",
    )


def test_loop_players_have_agents_policies_and_rewards_of_their_roles(gateway: Settings, tmp_path: Path) -> None:
    """Black is a model in the first run, and a script in the second."""
    expected = [("black", [-1.0], ["black"]), ("white", [1.0], ["white"])]
    for players, agents in (({}, expected), ({"black": PlayerSettings(script="duel:echo")}, expected[1:])):
        settings = own_run(gateway)
        episode = EpisodeSettings(turn_tokens=3, players=players)
        settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"episode": episode})})
        agent = CallableAgent(EPISODES, environment="duel:Duel", directory=AGENTS)
        outcomes = roll_out(settings, agent, TASKS[:1], tmp_path / str(len(players)), size=2)
        assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, len(agents))] * 2
        build_all(settings, 2)
        columns = "AgentName, `Rewards.Value`, `Rewards.Role`"
        rows = ask(settings, f"SELECT DISTINCT {columns} FROM spangrad.transitions WHERE RunId = {{run:String}} ORDER BY AgentName")
        assert rows == agents


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_loop_builds_nothing_partial_while_gateway_spans_are_delayed(
    engine: Settings, store: StoreSettings, tmp_path: Path, seconds: int
) -> None:
    held = gateway_settings(engine, store, export_delay_seconds=600)
    settings = own_run(held)
    with running_gateway(held, tmp_path / "gateway.log"):
        outcomes = roll_out(settings, ASK, TASKS, tmp_path)
        assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, 1)] * 8
        for _ in range(seconds):
            build_once(settings)
            assert ask(settings, "SELECT count() FROM spangrad.builds WHERE RunId = {run:String}") == [(0,)]
            time.sleep(1)
        assert ask(settings, "SELECT countIf(Final) FROM spangrad.attempts WHERE RunId = {run:String}") == [(8,)]
    # A gateway sends at its end what it held back; what a busy machine kept it from, the next one sends.
    prompt = held.gateway.model_copy(update={"export_delay_seconds": 0})
    with running_gateway(held.model_copy(update={"gateway": prompt}), tmp_path / "next.log"):
        build_all(settings, 8)
    built = ask(settings, "SELECT count(), uniqExact(RolloutId) FROM spangrad.transitions WHERE RunId = {run:String}")
    drops = ask(settings, "SELECT count() FROM spangrad.drops WHERE RunId = {run:String}")
    assert (built, drops) == ([(8, 8)], [(0,)])


@pytest.fixture
def fresh(store: StoreSettings, tiny_model: Path, vllm_cache: Path, tmp_path: Path) -> Iterator[Settings]:
    """An engine and a gateway of the test's own, which serve version 0."""
    engine = engine_settings(tiny_model, vllm_cache)
    settings = gateway_settings(engine, store)
    with running_engine(settings, tmp_path / "engine.log"), running_gateway(settings, tmp_path / "gateway.log"):
        yield settings


def test_loop_trains_train_rollouts_only_and_serves_new_version(fresh: Settings, tiny_model: Path, tmp_path: Path) -> None:
    settings = own_run(fresh)
    cool = [Task(task.task_id, {"city": task.task_id, "temperature": 0.7}) for task in TASKS]
    held_out = {outcome.key.rollout_id for outcome in roll_out(settings, ASK, cool, tmp_path, mode=Mode.VALIDATE)}
    trained = {outcome.key.rollout_id for outcome in roll_out(settings, ASK, cool, tmp_path, size=12)}
    build_all(settings, 32)
    log = train_once(settings, tmp_path, tiny_model)
    assert "step 1 -> version 1: 2 groups, 24 rollouts, 24 transitions" in log
    batch = {rollout for (rollout,) in ask(settings, "SELECT RolloutId FROM spangrad.batches WHERE RunId = {run:String}")}
    assert (batch, batch & held_out) == (trained, set())
    ((temperature, gap, steps),) = ask(
        settings,
        "SELECT (SELECT groupUniqArray(Temperature) FROM spangrad.transitions WHERE RunId = {run:String}),"
        " max(Metrics['logprob_gap_max']), count() FROM spangrad.policy_versions WHERE RunId = {run:String} AND Parent IS NOT NULL",
    )
    assert (temperature, steps) == ([0.7], 1)
    assert 0 < gap < 1e-3
    spans = {span for (span,) in ask(settings, "SELECT SpanId FROM spangrad.calls WHERE RunId = {run:String} AND Mode = 'train'")}
    batched = "(SELECT RolloutId FROM spangrad.batches WHERE RunId = {run:String})"
    lineage = ask(settings, f"SELECT SpanId FROM spangrad.lineage WHERE Version = 1 AND RolloutId IN {batched}")
    assert {span for (span,) in lineage} == spans
    served = f"{settings.gateway.url}/admin/policies/policy"
    assert fetch(served)["version"] == 1
    roll_out(settings, ASK, cool, tmp_path, mode=Mode.PROBE, size=1)
    build_all(settings, 34)
    answered = ask(settings, "SELECT DISTINCT Version FROM spangrad.transitions WHERE RunId = {run:String} AND Mode = 'probe'")
    assert answered == [(1,)]
    # A second run finds nothing left, and changes nothing.
    assert "step" not in train_once(settings, tmp_path, tiny_model)
    assert fetch(served)["version"] == 1


def test_loop_program_without_instrumentation_is_recorded_under_root_span(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    agent = CommandAgent((sys.executable, "plain_agents.py"), directory=AGENTS)
    outcomes = roll_out(settings, agent, TASKS[:1], tmp_path, size=2)
    assert [(outcome.reward, outcome.failure, outcome.calls) for outcome in outcomes] == [({"reward": 0.5}, None, 1)] * 2
    build_all(settings, 2)
    rows = ask(
        settings,
        "SELECT t.RolloutId, t.Mode, c.ParentSpanId = r.SpanId, arraySum(t.Rewards.Value), length(t.ResponseIds) > 0"
        " FROM spangrad.transitions AS t INNER JOIN spangrad.calls AS c ON c.CallId = t.CallId"
        " INNER JOIN spangrad.attempts AS r ON r.RolloutId = t.RolloutId"
        " WHERE t.RunId = {run:String}",
    )
    assert sorted(rows) == sorted((outcome.key.rollout_id, "train", 1, 0.5, 1) for outcome in outcomes)


@pytest.mark.skipif(not ((NODE.parent / ".made-from").exists() and shutil.which("node")), reason="no Node, or no packages of `make node`")
def test_loop_program_in_javascript_is_one_rollout_with_its_tools(
    gateway: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/runner.md").read_text()
    (tmp_path / "agent.mjs").write_text(page.partition("```javascript\n")[2].partition("```")[0])
    (tmp_path / "node_modules").symlink_to(NODE)
    monkeypatch.setenv("OTEL_NODE_RESOURCE_DETECTORS", "env")
    settings = own_run(gateway)
    command = ("node", "--import", "@opentelemetry/auto-instrumentations-node/register", "agent.mjs")
    agent = CommandAgent(command, directory=tmp_path, evaluator=f"{AGENTS / 'half.py'}:reward")
    outcomes = roll_out(settings, agent, TASKS, tmp_path, size=2)
    assert [(outcome.reward, outcome.failure, outcome.calls) for outcome in outcomes] == [({"reward": 0.5}, None, 1)] * 4
    build_all(settings, 4)
    tools = "SELECT RolloutId, count(), any(ToolName) FROM spangrad.tool_calls WHERE RunId = {run:String} GROUP BY RolloutId"
    assert sorted(ask(settings, tools)) == sorted((outcome.key.rollout_id, 1, "lookup") for outcome in outcomes)
    calls = "SELECT count(), uniqExact(RolloutId), sum(length(ResponseIds) > 0) FROM spangrad.transitions WHERE RunId = {run:String}"
    assert ask(settings, calls) == [(4, 4, 4)]
    alone = "SELECT count() FROM spangrad.rollout_spans WHERE ServiceName = 'agent.mjs' AND RolloutId = TraceId"
    assert ask(settings, alone) == [(0,)], "no trace is a rollout of its own"


def test_loop_in_direct_mode_builds_from_spans_of_agent(engine: Settings, store: StoreSettings, tmp_path: Path) -> None:
    settings = own_run(engine.model_copy(update={"store": store}), gateway=False, quiet_seconds=1)
    outcomes = roll_out(settings, ASK, TASKS[:1], tmp_path, size=3)
    assert [(outcome.failure, outcome.calls) for outcome in outcomes] == [(None, None)] * 3
    build_all(settings, 3)
    version = fetch(f"{engine.gateway.engine_url}/spangrad/info")["version"]
    rows = ask(
        settings,
        "SELECT PromptIds, length(ResponseIds) = length(Logprobs), Version, Temperature, Policy FROM spangrad.transitions"
        " WHERE RunId = {run:String}",
    )
    assert rows == [([1, 4, 7, 14, 2, 1, 5], 1, version, 1.0, "policy")] * 3
    built = ask(settings, "SELECT PromptIds, ResponseIds FROM spangrad.transitions WHERE RunId = {run:String}")
    traces = "SELECT TraceId FROM spangrad.rollout_spans WHERE RunId = {run:String}"
    assert sorted(ask(settings, IDS_OF_ANSWERS.format(traces))) == sorted(built)


FAILS = """
import json, os, sys, time
from urllib.request import Request, urlopen
given = json.load(sys.stdin)
def ask(text):
    body = json.dumps({"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}).encode()
    urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})).read()
ask(given["city"])
if given["fails"] == "context_overflow":
    ask("lima " * 5000)
if given["fails"] == "timeout":
    time.sleep(60)
if given["fails"] == "exit_code":
    sys.exit(3)
print(1.0)
"""


def test_loop_failure_rewards_are_built_and_loaded_for_training(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    rewards = FailureRewards(timeout=-1.0, context_overflow=-0.5, exit_code=None)
    runner = settings.runner.model_copy(update={"timeout_seconds": 20, "max_attempts": 2, "failure_rewards": rewards})
    settings = settings.model_copy(update={"runner": runner})
    fails = ("context_overflow", "timeout", "exit_code", "")
    tasks = [Task(name or "well", {"city": "lima", "fails": name}) for name in fails]
    agent = CommandAgent((sys.executable, "-c", FAILS), directory=AGENTS)
    outcomes = {outcome.task_id: outcome for outcome in roll_out(settings, agent, tasks, tmp_path, size=1)}
    assert {name: (outcome.failure, outcome.reward, outcome.calls, outcome.key.attempt) for name, outcome in outcomes.items()} == {
        "context_overflow": ("context_overflow", {"reward": -0.5}, 2, 0),
        "timeout": ("timeout", {"reward": -1.0}, 1, 0),
        "exit_code": ("exit_code", None, 1, 1),
        "well": (None, {"reward": 1.0}, 1, 0),
    }
    build_all(settings, 4)
    names = {outcome.key.rollout_id: name for name, outcome in outcomes.items()}
    rewarded = ask(settings, "SELECT RolloutId, Value, Source, Role FROM spangrad.rewards WHERE RunId = {run:String}")
    assert sorted((names[rollout], *rest) for rollout, *rest in rewarded) == [
        ("context_overflow", -0.5, "runner", ""), ("timeout", -1.0, "runner", ""), ("well", 1.0, "runner", ""),
    ]  # fmt: skip
    drops = ask(settings, "SELECT RolloutId, Reason, Detail FROM spangrad.drops WHERE RunId = {run:String}")
    assert sorted((names[rollout], *rest) for rollout, *rest in drops) == [
        ("context_overflow", "call_failed", "HTTP 400"),
        ("exit_code", "attempt_failed", "exit_code"),
        ("exit_code", "superseded_attempt", "attempt 1 counts"),
    ]
    client = connect(settings.store)
    try:
        source = GroupReader(client, settings)
        loaded = source.load(source.ready())
    finally:
        client.close()
    assert {names[rollout.rollout_id]: rollout.failure for rollout in loaded.rollouts} == {name or "well": name for name in fails}
    trained = dict(loaded.transitions.select("RolloutId", "Rewards.Value").rows())
    assert {names[rollout]: values for rollout, values in trained.items()} == {"context_overflow": [-0.5], "timeout": [-1.0], "well": [1.0]}
    assert failed_shares(loaded, 0.5)["failed_share"] == 0.75


def test_loop_rollout_without_reward_is_drop(gateway: Settings, tmp_path: Path) -> None:
    settings = own_run(gateway)
    settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"max_attempts": 1})})
    agent = CommandAgent((sys.executable, "-c", "print(1)"), evaluator="json:loads", directory=AGENTS)
    silent = CommandAgent((sys.executable, "-c", "pass"), directory=AGENTS)
    outcomes = [*roll_out(settings, silent, TASKS[:1], tmp_path, size=1), *roll_out(settings, agent, TASKS[:1], tmp_path, size=1)]
    assert [outcome.reward for outcome in outcomes] == [None, None]
    build_all(settings, 2)
    assert ask(settings, "SELECT count() FROM spangrad.rewards WHERE RunId = {run:String}") == [(0,)]
    drops = ask(settings, "SELECT Reason, CallId, count() FROM spangrad.drops WHERE RunId = {run:String} GROUP BY ALL")
    assert drops == [("attempt_failed", "", 2)]
