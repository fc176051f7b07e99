"""Two agents of one rollout, trained as two policies from the same spans: the benchmark's task, its checks, and that both learn."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.credit_sampling import Call, Sampled
from benchmarks.credit_spans import Author, Served
from benchmarks.two_policies import STEPS, conclude, draw
from benchmarks.two_policies_run import BOTH, GROUPS, Result, account, run, successes
from benchmarks.two_policies_task import AGENTS, ARGUMENTS, ITEMS, PLANNER, TOOLS, TROUBLES, WORDS, WRITER, Desk, agent_of
from spangrad.settings import Selection, Settings, StoreSettings
from tests.support.built_rollouts import BuiltRollouts, trainer_over
from tests.support.policies import trainer_settings

END = WORDS[2]
TICKETS = ("broken", "lamp", "late", "chair", "twice", "table", "lost", "shelf")
RIGHT = ("refund", "north", "cancel", "south", "replace", "east", "notify", "west")


def play(*replies: str) -> Sampled:
    """A rollout of these replies, with made-up ids."""
    desk, rollout = Desk(), Sampled(TICKETS, 0)
    for reply in replies:
        agent = agent_of(rollout.state)
        turn = desk.step(TICKETS, rollout.state, [reply, END])
        rollout.calls.append(Call([1], [WORDS.index(reply), 2], [-1.0, -0.5], turn, agent))
    return rollout


@pytest.mark.parametrize(
    ("replies", "grades", "tools", "shares"),
    [
        (RIGHT, [1] * 8, [(tool, "ok") for tool in TOOLS], (1, 1, 1)),
        # The writer is graded for its argument alone, whatever the planner picked; the tool works when both were right.
        (("cancel", *RIGHT[1:]), [0] + [1] * 7, [("cancel", "error"), *((tool, "ok") for tool in TOOLS[1:])], (0.75, 1, 0.75)),
        ((*RIGHT[:3], "north", *RIGHT[4:]), [1, 1, 1, 0, 1, 1, 1, 1], None, (1, 0.75, 0.75)),
        ((*RIGHT[:3], "lamp"), [1, 1, 1, 0], [("refund", "ok")], (0.5, 0.25, 0.25)),
        ((*RIGHT[:2], "north"), [1, 1, 0], [("refund", "ok")], (0.25, 0.25, 0.25)),
    ],
)
def test_two_policies_desk_grades_each_call_and_alternates_agents(replies, grades, tools, shares) -> None:
    rollout = play(*replies)
    turns = rollout.turns()
    assert [turn.grade for turn in turns] == grades
    assert [call.agent for call in rollout.calls] == [AGENTS[place % 2] for place in range(len(replies))]
    assert rollout.done
    assert tools is None or [(turn.tool, turn.state.status) for turn in turns if turn.tool] == tools
    assert successes(Desk(), [rollout]) == dict(zip((PLANNER, WRITER, BOTH), shares, strict=True))


@pytest.mark.parametrize("agent", AGENTS)
def test_two_policies_demonstrations_reveal_no_answer(agent: str) -> None:
    desk, rng = Desk(), random.Random(0)
    demonstrations = [desk.demonstration(agent, rng) for _ in range(400)]
    assert len({len(prompt) for prompt, _ in demonstrations}) == 1
    assert {prompt[2] for prompt, _ in demonstrations} == {agent}
    assert {reply[0] for _, reply in demonstrations} == set(TOOLS if agent == PLANNER else ARGUMENTS)
    assert {prompt[-4] for prompt, _ in demonstrations} == set(TROUBLES if agent == PLANNER else ITEMS)


def test_two_policies_author_spans_name_agent_and_its_policy() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    served = {agent: Served(agent, version, "tokenizer") for version, agent in enumerate(AGENTS, start=3)}
    (body,) = Author("run", Desk(), 0).bodies([play("refund", "west", "cancel", "lamp")], 7, served)
    spans = [
        span
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    by_id = {span.span_id: span for span in spans}
    answers = [span for span in spans if span.name.startswith("chat ")]
    above = [by_id[by_id[span.parent_span_id].parent_span_id] for span in answers]
    assert [(span.name, agent.name) for span, agent in zip(answers, above, strict=True)] == [
        ("chat planner", "planner"),
        ("chat writer", "writer"),
        ("chat planner", "planner"),
        ("chat writer", "writer"),
    ]
    versions = [
        {attribute.key: attribute.value.string_value for attribute in span.attributes}["spangrad.policy.versions"] for span in answers
    ]
    assert versions == ["[[[0,3]]]", "[[[0,4]]]"] * 2
    assert [(span.name, span.status.code) for span in spans if span.name in TOOLS] == [("refund", 2)]
    assert {by_id[agent.parent_span_id].name for agent in above} == {"rollout"}


def test_two_policies_two_steps_train_each_policy_on_its_calls(tmp_path: Path) -> None:
    result = run(Desk(group=4), 0, 2, tmp_path)
    assert (result.sampled, set(result.checked.values())) == (2 * GROUPS * 4, {0})
    assert {name: (counts["versions"], counts["rollouts"]) for name, counts in result.lineage.items()} == {
        PLANNER: (2, 32),
        WRITER: (2, 32),
    }
    calls = [counts["calls"] for counts in result.lineage.values()]
    assert (sum(calls), calls[0] >= calls[1] > 64) == (result.calls, True)
    assert len({counts["spans"] for counts in result.lineage.values()}) == 1
    assert 0 < result.gap < 1e-4
    conclusion = conclude([result], whole=False)
    assert (set(conclusion["checked"].values()), conclusion["ours"]["final"][BOTH]) == ({0}, [round(result.final[BOTH], 3)])


@pytest.fixture
def world(store: StoreSettings, tiny_model: Path, tmp_path: Path) -> BuiltRollouts:
    """A run of three rollouts, in one of which the planner alone spoke; both policies have trained it."""
    name = f"desk-{uuid.uuid4().hex[:8]}"
    shared = trainer_settings(run_id=name, branch=name, model=tiny_model, directory=tmp_path / "policies", groups_per_batch=1)
    world = BuiltRollouts(Settings(store=store, trainer=shared), tiny_model)
    world.group("g", [1.0, 0.0], size=3, calls=[{"AgentName": agent, "Policy": agent} for agent in AGENTS])
    world.group("g", [0.0], size=3, calls=[{"AgentName": PLANNER, "Policy": PLANNER}], RolloutId="g-2")
    for agent in AGENTS:
        own = shared.model_copy(update={"policy": agent, "selection": Selection(agents=agent)})
        trainer = trainer_over(world, Settings(store=store, trainer=own))
        loaded = trainer.take()
        assert loaded
        assert trainer.step(loaded)
    return world


_COPY = (
    "INSERT INTO spangrad_internal.{table} SELECT * REPLACE ({changes})"
    " FROM spangrad_internal.{table} FINAL WHERE RunId = %(run)s AND Policy = '{policy}' LIMIT 1"
)


_LED_TO = (
    "INSERT INTO spangrad_internal.batch_calls SELECT * REPLACE ('t' AS TransitionId, 'c' AS CallId) FROM spangrad_internal.batch_calls"
    " WHERE (Policy, RolloutId) IN (SELECT Policy, RolloutId FROM spangrad_internal.transitions WHERE RunId = %(run)s AND CallId = 'c')"
    " LIMIT 1"
)


@pytest.mark.parametrize(
    ("spoiled", "seen"),
    [
        ((), {}),
        # The planner's policy answered the writer too: its version leads to a call of another agent, and the writer's trainer missed one.
        (
            ("transitions", PLANNER, "9 AS Turn, 'c' AS CallId, 't' AS TransitionId, 'writer' AS AgentName"),
            {"foreign_calls": 1, "otherwise_counted": 1},
        ),
        (("transitions", PLANNER, "9 AS Turn, 'c' AS CallId, 't' AS TransitionId"), {"otherwise_counted": 1}),
        (("batches", WRITER, "'twice' AS BatchId, 9 AS Version"), {"not_once": 1}),
    ],
)
def test_two_policies_account_counts_each_fault(world: BuiltRollouts, spoiled: tuple[str, str, str], seen: dict[str, int]) -> None:
    if spoiled:
        table, policy, changes = spoiled
        world.client.command(_COPY.format(table=table, policy=policy, changes=changes), parameters={"run": world.run})
        if table == "transitions":
            world.client.command(_LED_TO, parameters={"run": world.run})
    result = Result(0, 3, 1, sampled=3, calls=5 + (spoiled[:1] == ("transitions",)))
    account(result, world.client, world.run)
    assert {name: count for name, count in result.checked.items() if count} == seen
    assert [counts["rollouts"] for counts in result.lineage.values()] == [3, 3]
    more = replace(result, sampled=4, calls=result.calls + 2)
    account(more, world.client, world.run)
    assert (more.checked["untrained"], more.checked["unaccounted"]) == (len(AGENTS), 2)


def test_two_policies_conclude_counts_each_failed_claim(tmp_path: Path) -> None:
    names = (PLANNER, WRITER, BOTH)
    good = Result(
        0, 16, 60, dict.fromkeys(names, 0.25), dict.fromkeys(names, 0.99), {name: [0.25, 0.99] for name in names}, checked={"drops": 0}
    )
    assert set(conclude([good, good], whole=True)["checked"].values()) == {0}
    bad = replace(good, begun={**good.begun, WRITER: 0.5}, final={**good.final, PLANNER: 0.84}, checked={"drops": 2})
    conclusion = conclude([good, bad], whole=True)
    assert {name: count for name, count in conclusion["checked"].items() if count} == {
        "drops": 2, "writer_taught": 1, "planner_not_learned": 1,
    }  # fmt: skip
    assert json.loads(json.dumps(conclusion)) == conclusion
    draw(tmp_path / "two.png", [good, bad])
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_policies_both_learn(tmp_path: Path) -> None:
    # As many as the benchmark's: after three quarters of them it depends on the processor how far the writer is.
    result = run(Desk(), 0, STEPS, tmp_path)
    assert set(result.checked.values()) == {0}
    assert max(result.begun.values()) <= 0.45
    assert min(result.final.values()) >= 0.85
