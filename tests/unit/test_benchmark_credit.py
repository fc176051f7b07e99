"""The credit benchmark's own honesty: the tasks are what they are said to be, and every rollout goes through store, builder and trainer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.credit import ARMS, OF_ONE_SEED, OURS, conclude, steps_to
from benchmarks.credit_plot import draw
from benchmarks.credit_run import Result
from benchmarks.credit_sampling import AGENT, Call, Sampled, Sampler, write_model
from benchmarks.credit_spans import Author, Served
from benchmarks.credit_tasks import GOALS, KINDS, LOOK, RESPELLED, TOOLS, WORDS, Flow, Inbox, State, Task

END = WORDS[2]


def play(task: Task, goal: tuple[str, ...], replies: list[str]) -> Sampled:
    """A rollout of these replies, with made-up ids."""
    rollout = Sampled(goal, 0)
    for reply in replies:
        rollout.calls.append(Call([1], [WORDS.index(reply), 2], [-1.0, -0.5], task.step(goal, rollout.state, [reply, END])))
    return rollout


def test_flow_step_has_one_right_tool_per_page() -> None:
    flow = Flow()
    for goal in GOALS:
        for page in range(4):
            after = {tool: flow.step([goal], State(page), [tool, END]) for tool in TOOLS}
            right = [tool for tool, turn in after.items() if turn.state.page == page + 1]
            assert right == [TOOLS[(GOALS.index(goal) + page) % 5]]
            assert {turn.state.status for tool, turn in after.items() if tool not in right} == {"error"}
    won, lost = play(flow, ("cancel",), list(TOOLS[1:])), play(flow, ("cancel",), ["search", "login"])
    assert [flow.success(one.goal, one.turns()) for one in (won, lost)] == [1, 0]
    assert [won.done, lost.done, play(flow, ("cancel",), ["user"]).done] == [True, False, True]


def test_flow_step_with_look_tool_succeeds_and_stays_on_page() -> None:
    turn = Flow(look=True).step(["order"], State(2, "error"), [LOOK, END])
    assert (turn.state, turn.done) == (State(2, "ok"), False)
    assert Flow().step(["order"], State(2), [LOOK, END]).tool is None


def test_flow_step_with_respelled_tool_equals_original() -> None:
    flow = Flow(respelled=True)
    assert flow.step(["refund"], State(0), [RESPELLED + "login", END]) == flow.step(["refund"], State(0), ["login", END])


def test_inbox_step_grades_each_ticket() -> None:
    inbox = Inbox()
    rollout = play(inbox, KINDS, [TOOLS[0]] * 8)
    assert [turn.grade for turn in rollout.turns()] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert (rollout.done, inbox.success(KINDS, rollout.turns())) == (True, 2 / 8)
    broken = play(inbox, KINDS, [TOOLS[0], "save"])
    assert ([turn.grade for turn in broken.turns()], broken.done) == ([1, 0], True)


@pytest.mark.parametrize("task", [Flow(), Flow(look=True), Flow(respelled=True), Inbox()], ids=repr)
def test_demonstration_prompts_have_constant_length_and_valid_replies(task: Task) -> None:
    rng = random.Random(0)
    lengths = set[int]()
    for _ in range(200):
        prompt, reply = task.demonstration(rng)
        lengths.add(len(prompt))
        assert set(prompt) <= set(WORDS)
        assert task.step(task.goals(rng, 1)[0], State(0), reply).tool is not None
    assert len(lengths) == 1


def test_sampler_gives_logprobs_of_drawn_tokens(tmp_path: Path) -> None:
    import torch

    write_model(tmp_path / "model", Inbox(), 0)
    sampler = Sampler(tmp_path / "model", 0)
    rollouts = sampler.rollouts(Inbox(group=2), Inbox().goals(random.Random(0), 2))
    assert [one.group for one in rollouts] == [0, 0, 1, 1]
    assert len({tuple(call.prompt) for one in rollouts for call in one.calls}) > 3
    calls = [call for one in rollouts for call in one.calls]
    with torch.inference_mode():
        whole = sampler.model(torch.tensor([call.prompt + call.reply for call in calls])).logits.log_softmax(-1)
    for row, call in enumerate(calls):
        expected = [whole[row, len(call.prompt) - 1 + place, token].item() for place, token in enumerate(call.reply)]
        assert call.logprobs == pytest.approx(expected, abs=1e-5)


def test_author_spans_name_rollout_and_graded_rewards_only() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    rollouts = [play(Flow(), ("cancel",), list(TOOLS[1:])), play(Flow(), ("cancel",), ["search", "login", "user"])]
    (body,) = Author("run", Flow(group=2), 0).bodies(rollouts, 7, {AGENT: Served("policy", 3, "tokenizer")})
    spans = [
        span
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    attributes = [{one.key: one.value for one in span.attributes} for span in spans]
    assert {one["spangrad.rollout.id"].string_value for one in attributes} == {"run-7-0", "run-7-1"}
    names = [span.name for span in spans]
    assert {name: names.count(name) for name in names} == {
        "rollout": 2, "clerk": 2, "ChatCompletion": 7, "chat policy": 7, "search": 2, "open": 1, "edit": 1, "save": 1, "login": 1,
    }  # fmt: skip
    assert [(span.name, span.events[0].attributes[1].value.double_value) for span in spans if span.events] == [
        ("rollout", 1),
        ("rollout", 0),
    ]
    assert [span.name for span in spans if span.status.code == 2] == ["login"]
    assert [one["spangrad.rollout.calls"].int_value for one, name in zip(attributes, names, strict=True) if name == "rollout"] == [4, 3]


def results() -> list[Result]:
    """Five seeds of each arm, as they should be."""
    runs = list[Result]()
    for task, ours in OURS.items():
        for name, pace in ((ours, 40.0), ("identical", 80.0)):
            for seed in range(5):
                course = [min(1.0, step / pace) for step in range(60)]
                runs.append(
                    Result(task, name, seed, 64, 60, course, course, final=course[-1], sampled=9, trained=9, calls=9, transitions=9)
                )
    gamed = Result("flow", "gamed", 0, 64, 60, [0.0] * 60, [0.6] * 60, alarms=[20, 21])
    return [*runs, gamed, Result("flow", "retokenized", 0, 64, 60, [0.0], refused="no", sampled=9)]


def test_credit_conclude_of_good_results_has_no_failed_check(tmp_path: Path) -> None:
    good = results()
    summary = conclude(good, whole=True)
    assert set(summary["checked"].values()) == {0}
    assert (summary["ours"]["flow"]["final_mean"], summary["peer"]["inbox"]["steps_to_hit_median"]) == (1.0, 60)
    assert summary["ratio"] == {
        "flow_final_mean": 1.36, "flow_at_40_mean": 2.0, "flow_steps_to_hit_median": 1.82,
        "inbox_final_mean": 1.36, "inbox_at_40_mean": 2.0, "inbox_steps_to_hit_median": 1.82,
    }  # fmt: skip
    assert summary["others"]["gamed"]["alarms"] == [20, 21]
    draw(tmp_path / "credit.png", good)
    assert (tmp_path / "credit.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("place", "changes", "seen"),
    [
        (0, {"final": 0.9}, {"flow_not_learned": 1}),
        (10, {"final": 0.9}, {"inbox_not_learned": 1}),
        (0, {"success": [0.0] * 60}, {"flow_no_contrast": 0}),
        (slice(0, 5), {"success": [0.5] * 60}, {"flow_no_contrast": 1}),
        (slice(10, 15), {"success": [0.5] * 60}, {"inbox_not_faster": 1}),
        (3, {"trained": 8}, {"untrained": 1}),
        (3, {"drops": 2, "unaccounted": 1}, {"drops": 2, "unaccounted": 1}),
        (3, {"alarms": [30]}, {"false_alarms": 1}),
        (3, {"refused": "no"}, {"false_refusals": 1}),
        (20, {"alarms": []}, {"unseen_gaming": 1}),
        (21, {"refused": "", "trained": 9}, {"unseen_retokenized": 1}),
    ],
)
def test_credit_conclude_counts_each_failed_claim(place: int | slice, changes: dict[str, object], seen: dict[str, int]) -> None:
    changed = results()
    where = place if isinstance(place, slice) else slice(place, place + 1)
    changed[where] = [replace(one, **changes) for one in changed[where]]  # type: ignore[arg-type]
    checked = conclude(changed, whole=True)["checked"]
    assert {name: value for name, value in checked.items() if value} == {name: value for name, value in seen.items() if value}


def test_steps_to_needs_mean_of_3_steps() -> None:
    assert steps_to([0.9, 0.0, 0.9, 0.9, 0.9, 0.0]) == 4
    assert steps_to([0.9, 0.9]) is None
    assert set(OF_ONE_SEED) < set(ARMS)
