"""A rollout explained in sentences: the whole text, for rollouts made by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spangrad.settings import Settings
from spangrad.store.rollout.record import Build, Conclusion, Record, Reward, TrainedBatch
from spangrad.store.rollout.why import explain
from tests.support.policies import changed

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings()
ROLLOUT = msgspec.json.decode((Path(__file__).parents[1] / "fixtures/rollout.json").read_bytes(), type=Record)
FAILED, KEPT, AGENT, CLIENT, FIRST_CALL, SECOND_CALL = (
    next(span for span in ROLLOUT.spans if span.span == own) for own in ("a0", "b0", "b1", "b2", "b3", "b6")
)
ENDED = replace(KEPT, status="Unset", attributes={**KEPT.attributes, "spangrad.rollout.calls": "2"})
FAILED_FIRST = replace(FAILED, attributes={**FAILED.attributes, "spangrad.rollout.calls": "0"})
GIVEN = [("reward", 1.0, "evaluation_event", ""), ("tool", -0.1, "air", "")]
KEPT_CALL = Conclusion(1, "t1", "b3", 0, "researcher", "policy", 3, 0, GIVEN)
CUT = Conclusion(1, "t1", "b6", 1, "", "policy", reason="mixed_versions", detail="versions 3, 4", convention="gateway")
BUILD = Build(
    SETTINGS.builder.spec,
    "run-1",
    group="g7",
    group_size=8,
    revision=1,
    attempt=1,
    calls=2,
    built_at=NOW - timedelta(minutes=1),
    conclusions=[KEPT_CALL, CUT],
    dataset="default@1",
    group_built=7,
)


def record(*spans: Any, builds: tuple[Build, ...] = (), **facts: Any) -> Record:
    return Record("rollout-1", spans, [], facts.pop("rewards", []), builds, last_arrival=NOW - timedelta(seconds=12), now=NOW, **facts)


def explained(rollout: Record, settings: Settings = SETTINGS) -> str:
    return "\n".join(explain(rollout, settings)) + "\n"


def last(rollout: Record, settings: Settings = SETTINGS) -> str:
    return explain(rollout, settings)[-1]


WHOLE_SPANS = (FAILED_FIRST, ENDED, CLIENT, FIRST_CALL, SECOND_CALL, FIRST_CALL)
EARNED = [Reward("t1", "b0", "reward", "1", "event")]


def test_explain_built_rollout() -> None:
    assert explained(record(*WHOLE_SPANS, builds=(BUILD,), rewards=EARNED)) == (
        f"""\
Rollout rollout-1 of run run-1 (mode train): task paris, group g7 of 8, 2 attempts.
Attempt 0 failed: crash (exit code 1), and was tried again.
Attempt 1 ended well, and counts.
5 spans arrived; the gateway answered 2 calls of attempt 1, and all of them arrived. Evaluations: reward = 1 (event).
It is built (dataset default@1, specification {BUILD.spec}, revision 1) at 2026-01-01 11:59:00 UTC, attempt 1 counting. \
2 calls: 1 transition, 1 drop.
- Attempt 1, span b3 (chat policy) by researcher: transition, turn 0, sampled by policy policy version 3; \
reward = 1 (evaluation_event), tool = -0.1 (air).
- Attempt 1, span b6 (chat policy, choice 1): dropped as mixed_versions (versions 3, 4), reported by gateway.
mixed_versions: Set builder.mixed_versions = keep: each token is then trained as sampled by its own version.
It is not trained: its group g7 has 7 of 8 rollouts built so far.
"""
    )


def test_explain_waiting_rollout_names_missing_parts() -> None:
    lost = replace(ENDED, attributes={**ENDED.attributes, "spangrad.rollout.calls": "4"})
    assert explained(record(lost, FIRST_CALL)) == (
        """\
Rollout rollout-1 of run run-1 (mode train): task paris, group g7 of 8, 1 attempt.
Attempt 1 ended well, and counts.
2 spans arrived; the gateway answered 4 calls of attempt 1, and 3 of them did not arrive. Evaluations: none arrived.
It is not built yet: it waits for 3 calls of attempt 1 and the root span of attempt 0 and a reward, at most \
builder.incomplete_after_seconds (600 s) after its end; the newest span arrived 12 s ago.
"""
    )


AGENT_SPAN = replace(AGENT, span="1", parent="", run="", mode="", names_rollout=False, kind="")
CALL_SPAN = replace(CLIENT, span="2", parent="1", run="", mode="", names_rollout=False)


@pytest.mark.parametrize(
    ("spans", "rewards", "sentence"),
    [
        (
            (FAILED_FIRST, ENDED, FIRST_CALL, SECOND_CALL),
            EARNED,
            "It is not built yet, and nothing that it needs is missing: the next `spangrad build` takes it. Is a builder running?",
        ),
        (
            (FIRST_CALL,),
            [],
            "It is not built yet: it waits for its runner's final root span, until it has been silent for "
            "builder.incomplete_after_seconds (600 s); it has been for 12 s.",
        ),
        (
            (AGENT_SPAN, CALL_SPAN),
            [],
            "It is not built yet: it waits to be silent for builder.quiet_seconds (30 s); it has been for 12 s. "
            "Then the next `spangrad build` takes it.",
        ),
        (
            (CALL_SPAN,),
            [],
            "It is not built yet: it waits to be silent for builder.incomplete_after_seconds (600 s), because the parent of some span has "
            "not arrived; it has been for 12 s. Then the next `spangrad build` takes it.",
        ),
        ((AGENT_SPAN,), [], "It is not built: nothing in it calls a model, as far as any dialect knows."),
    ],
)
def test_explain_unbuilt_rollout_names_cause(spans: tuple[Any, ...], rewards: list[Reward], sentence: str) -> None:
    assert last(record(*spans, rewards=rewards)) == sentence


def test_explain_rootless_rollout_as_production() -> None:
    first, second, *_ = explain(record(AGENT_SPAN, CALL_SPAN), SETTINGS)
    assert first == (
        "Rollout rollout-1: no runner announced it (it is known by its session, conversation or trace), so it counts as mode production."
    )
    assert second == "2 spans arrived, 0 calls of the gateway among them. Evaluations: none arrived."
    assert explain(record(FIRST_CALL), SETTINGS)[0] == (
        "Rollout rollout-1 of run run-1 (mode train): a runner announced it, and no root span of it has arrived."
    )


WHOLE_GROUP = replace(BUILD, group_built=8)
LEDGER = SETTINGS.trainer.directory / "ledger.db"
LOOK = f"If `spangrad train` has skipped it, the reason is in its log and its ledger ({LEDGER})."


@pytest.mark.parametrize(
    ("build", "facts", "sentence"),
    [
        (WHOLE_GROUP, {}, f"its group is whole and waits for `spangrad train`. {LOOK}"),
        (
            WHOLE_GROUP,
            {"committed": {("policy", "main"): range(901)}},
            "it is stale: its newest call was sampled by version 3, and 897 versions followed that "
            f"(trainer.sampling.max_staleness = {SETTINGS.trainer.sampling.max_staleness}). {LOOK}",
        ),
        (
            replace(WHOLE_GROUP, conclusions=[KEPT_CALL, replace(KEPT_CALL, version=900)]),
            {"committed": {("policy", "main"): range(901)}},
            f"its group is whole and waits for `spangrad train`. {LOOK}",
        ),
        (
            replace(WHOLE_GROUP, skipped=[("policy", "main", "stale", "version 3 is too old.")]),
            {},
            "the trainer of policy policy (branch main) skipped its group as stale: version 3 is too old. `spangrad train skipped` "
            f"names the remedy; `spangrad train restore {WHOLE_GROUP.group}` brings the group back.",
        ),
        (replace(WHOLE_GROUP, conclusions=[CUT]), {}, "it left no transitions."),
        (replace(BUILD, group_size=0), {}, "the size of its group is unknown, so that the group is never complete."),
        (
            replace(WHOLE_GROUP, spec="another"),
            {},
            "the trainer, as it is set up here, takes what the present builder settings make, which is another specification.",
        ),
        (
            replace(WHOLE_GROUP, conclusions=[replace(KEPT_CALL, policy="judge")]),
            {},
            "none of its transitions is of policy policy, which the trainer, as it is set up here, trains.",
        ),
    ],
)
def test_explain_untrained_rollout_names_cause(build: Build, facts: dict[str, Any], sentence: str) -> None:
    assert last(record(*WHOLE_SPANS, builds=(build,), **facts)) == f"It is not trained: {sentence}"


def test_explain_staleness_counts_committed_versions_not_numbers() -> None:
    """Versions 4 to 899 are orphaned, as crashes leave them."""
    settings = SETTINGS.model_copy(update={"trainer": changed(SETTINGS.trainer, {"max_staleness": 1})})
    rollout = record(*WHOLE_SPANS, builds=(WHOLE_GROUP,), committed={("policy", "main"): [3, 900]})
    assert last(rollout, settings) == f"It is not trained: its group is whole and waits for `spangrad train`. {LOOK}"


def test_explain_with_unreachable_ledger_leaves_skips_open() -> None:
    verdict = last(record(*WHOLE_SPANS, builds=(WHOLE_GROUP,), ledger_silent="the ledger postgresql://HOST/NAME failed (no answer)."))
    assert verdict == (
        "It is not trained: its group is whole and waits for `spangrad train`. Whether a trainer has skipped its group is not known: the "
        "ledger postgresql://HOST/NAME failed (no answer)."
    )


def test_explain_mode_outside_trainer_modes_is_not_trained() -> None:
    held_out = [replace(one, mode="validate") for one in WHOLE_SPANS]
    assert last(record(*held_out, builds=(WHOLE_GROUP,))) == "It is not trained: trainer.modes takes train only, and this is validate."


def test_explain_greedy_rollout_as_baseline() -> None:
    greedy = [replace(one, mode="greedy") for one in WHOLE_SPANS]
    assert last(record(*greedy, builds=(WHOLE_GROUP,))) == (
        "It is not trained: it is greedy: what the other rollouts of its group g7 are compared with (trainer.credit.estimator = 'remax')."
    )


def test_explain_trained_rollout_names_version() -> None:
    used = TrainedBatch("run-1", BUILD.spec, "policy", "main", 5, "b-1", 1, "committed")
    assert last(record(*WHOLE_SPANS, builds=(BUILD,), trained=[used])) == (
        "It is trained: batch b-1 made version 5 of policy policy (branch main)."
    )
    earlier = replace(used, revision=0, status="orphaned")
    assert explain(record(*WHOLE_SPANS, builds=(BUILD,), trained=[earlier]), SETTINGS)[-2:] == [
        "It is trained: batch b-1 made version 5 of policy policy (branch main), which is orphaned.",
        "already_trained: that was revision 0; what came since changes no version: a rollout is trained once.",
    ]
    by_another = replace(used, spec="another")
    assert last(record(*WHOLE_SPANS, builds=(BUILD,), trained=[by_another])) == (
        "already_trained: built by specification another, it helped to make version 5 of policy policy, "
        "and branch main trains no rollout twice."
    )
    elsewhere = replace(by_another, branch="try")
    assert last(record(*WHOLE_SPANS, builds=(BUILD,), trained=[elsewhere])) == (
        "It is not trained: its group g7 has 7 of 8 rollouts built so far. "
        "(As another specification built it, it helped to make policy version 5.)"
    )


def test_explain_rollout_without_calls_names_its_drop() -> None:
    alone = Conclusion(1, "t1", "", 0, "", "", reason="attempt_failed", detail="timeout")
    lines = explain(record(KEPT, builds=(replace(BUILD, conclusions=[alone], calls=0),)), SETTINGS)
    assert lines[-3:-1] == [
        "- The rollout itself: dropped as attempt_failed (timeout).",
        "attempt_failed: Fix the cause of the failure (the attempt's root span names it), or allow more attempts.",
    ]


def test_explain_same_id_in_two_runs_explains_each() -> None:
    other = replace(ENDED, run="run-2", trace="t9")
    lines = explain(record(*WHOLE_SPANS, other, builds=(BUILD,)), SETTINGS)
    place = lines.index("")
    assert lines[0].startswith("Rollout rollout-1 of run run-1")
    assert lines[place + 1].startswith("Rollout rollout-1 of run run-2")
    assert any(line.startswith("It is built") for line in lines[:place])
    assert lines[-1].startswith("It is not built yet")


def test_explain_names_roles_and_those_that_trainer_counts() -> None:
    earned = [Reward("t1", "b0", "reward", value, "event", role) for role, value in {"white": "1", "black": "-1"}.items()]
    kept = replace(KEPT_CALL, rewards=[("reward", 1.0, "runner", "white"), ("reward", -1.0, "runner", "black")])
    game = record(*WHOLE_SPANS, rewards=earned, builds=(replace(BUILD, conclusions=[kept]),))
    known = replace(game, roles_by_run={"run-1": ["black", "red", "white"], "run-2": ["blue"]})
    lines = explain(known, SETTINGS)
    assert lines[4].startswith(
        "Rewards of the run are of the roles black, red, white; the trainer, as it is set up here, counts all of them."
    )
    assert lines[3].endswith("Evaluations: reward of white = 1 (event), reward of black = -1 (event).")
    assert any(
        "turn 0, sampled by policy policy version 3; reward of white = 1 (runner), reward of black = -1 (runner)." in line for line in lines
    )
    chosen = SETTINGS.model_copy(update={"trainer": changed(SETTINGS.trainer, {"reward_roles": ("white",)})})
    assert "counts those of white and everybody's." in explain(known, chosen)[4]
    assert not any("roles" in line for line in explain(record(*WHOLE_SPANS, builds=(BUILD,)), SETTINGS))
