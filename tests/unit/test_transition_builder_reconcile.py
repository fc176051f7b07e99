"""Conclusions about calls: the drop reason and its detail, for hand-made calls with every fault at once."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

import polars as pl
import pytest

from spangrad import types
from spangrad.settings import BuilderSettings, Selection
from spangrad.types import HELD_OUT_MODES, DropReason, remedy
from tests.support.spans import SpanFactory, versions
from transition_builder.calls import reconcile
from transition_builder.schemas import CALLS, ROLLOUTS

ROOT = Path(__file__).parents[2]
EXTRA = {
    "Shared": pl.Boolean,
    "AgentName": pl.String,
    "Order": pl.Int64,
    "ByGateway": pl.Boolean,
    "Retried": pl.Boolean,
    "DuplicateOf": pl.String,
    "Convention": pl.String,
    "Dropped": pl.Boolean,
    "Unfinished": pl.Boolean,
    "Tools": pl.List(pl.String),
    "Components": pl.List(pl.String),
}


def concluded(
    spec: BuilderSettings | None = None, root: dict[str, object] | None = None, fault: str | None = None, **facts: object
) -> pl.DataFrame:
    """One call that nothing is wrong with but `facts`, concluded."""
    spans = SpanFactory()
    spans.call(spans.root("r", **(root or {})), rollout="r")
    rollouts = pl.DataFrame(spans.roots, schema=dict(ROLLOUTS))
    row = spans.calls[0] | {"Shared": False, "AgentName": "agent", "Order": 0, "ByGateway": True, "Retried": False, "DuplicateOf": ""}
    row |= {"Convention": "gateway", "Dropped": False, "Unfinished": False, "Tools": ["search", "add"], "Components": ["agent", "plan"]}
    calls = pl.DataFrame([row | facts], schema={**CALLS, **EXTRA}).rename({"RolloutKey": "RolloutId"}).drop("Mode", "RolloutKeySource")
    fault_rows = [] if fault is None else [{"RunId": "run", "RolloutId": "r", "fault": fault}]
    faults = pl.DataFrame(fault_rows, schema={"RunId": pl.String, "RolloutId": pl.String, "fault": pl.String})
    return reconcile.conclude(reconcile.without_arrays(calls), rollouts, faults, spec or BuilderSettings())


def reason(*args: object, **facts: object) -> tuple[str, str]:
    return concluded(*args, **facts).select("Reason", "Detail").row(0)  # type: ignore[arg-type]


def test_conclude_call_without_fault_is_kept() -> None:
    assert concluded().select("Reason", "Detail", "Turn").row(0) == ("", "", 0)


FAULTS: list[tuple[str, dict[str, object], str]] = [
    ("duplicate", {"DuplicateOf": "c9"}, "call c9 counts"),
    ("unknown_convention", {"Convention": "unknown"}, "model policy"),
    ("aborted", {"Aborted": True}, ""),
    ("call_failed", {"HttpStatus": 503, "ErrorType": "engine_down"}, "HTTP 503 engine_down"),
    ("retried", {"Retried": True}, ""),
    ("redacted", {"Redacted": True, "PromptIds": []}, ""),
    ("other_modality", {"Modality": "audio,image"}, "audio,image"),
    ("other_modality", {"Modality": "image", "PromptIds": []}, "image"),
    ("attributes_dropped", {"Dropped": True, "PromptIds": []}, ""),
    ("no_token_ids", {"PromptIds": []}, ""),
    ("retokenized", {"IdsSource": "retokenized", "TokenizerHash": "h"}, "by tokenizer h"),
    ("empty_response", {"ResponseIds": [], "Logprobs": []}, ""),
    ("no_logprobs", {"Logprobs": [-0.5]}, "1 logprobs for 2 tokens"),
    ("unknown_version", versions(), ""),
    ("unknown_sampling", {"MinP": None}, ""),
    ("other_distribution", {"TopP": 0.5}, "sampled with top_p=0.5"),
    ("unfinished", {"HttpStatus": 0, "FinishReason": "", "ResponseIds": [], "Logprobs": []}, ""),
    ("unfinished", {"Unfinished": True, "ByGateway": False, "PromptIds": [], "ResponseIds": [], "Logprobs": []}, ""),
]


@pytest.mark.parametrize(("expected", "facts", "detail"), FAULTS, ids=[f"{fault[0]}-{place}" for place, fault in enumerate(FAULTS)])
def test_conclude_each_fault_of_call_has_its_drop_reason(expected: str, facts: dict[str, object], detail: str) -> None:
    assert reason(**facts) == (expected, detail)


@pytest.mark.parametrize(
    ("expected", "root", "fault", "detail"),
    [
        ("superseded_attempt", {"attempt": 1}, None, "attempt 1 counts"),
        ("incomplete", {"Verdict": "incomplete", "Detail": "1 of 2 calls"}, None, "1 of 2 calls"),
        ("attempt_failed", {"failure": "crash"}, None, "crash"),
        ("no_reward", {}, "no evaluation", "no evaluation"),
    ],
)
def test_conclude_each_fault_of_rollout_has_its_drop_reason(expected: str, root: dict[str, object], fault: str | None, detail: str) -> None:
    spans = SpanFactory()
    spans.root("r", **{"attempt": 0, **root})  # type: ignore[arg-type]
    calls = concluded(root={"attempt": 0} | root, fault=fault, Attempt=0)
    assert calls.select("Reason", "Detail").row(0) == (expected, detail)


@pytest.mark.parametrize(
    ("facts", "reshaping"),
    [
        ({}, ""),
        ({"TopP": 1.0, "TopK": -1}, ""),
        ({"TopP": 0.9, "TopK": 20, "MinP": 0.05}, "top_p=0.9, top_k=20, min_p=0.05"),
        ({"PresencePenalty": -0.5, "Constrained": True}, "presence_penalty=-0.5, masked tokens"),
    ],
)
def test_conclude_reshaped_calls_are_kept_by_setting_or_held_out_mode(facts: dict[str, object], reshaping: str) -> None:
    columns = ["Reason", "Detail", "Reshaping"]
    dropped = ("other_distribution", f"sampled with {reshaping}", reshaping) if reshaping else ("", "", "")
    kept = ("", "", reshaping)
    keep = BuilderSettings(reshaped="keep")
    assert concluded(**facts).select(columns).row(0) == dropped  # type: ignore[arg-type]
    assert concluded(keep, **facts).select(columns).row(0) == kept  # type: ignore[arg-type]
    for mode in HELD_OUT_MODES:
        assert concluded(root={"Mode": mode.value}, **facts).select(columns).row(0) == kept  # type: ignore[arg-type]
    assert concluded(root={"Mode": "production"}, **facts).select(columns).row(0) == dropped  # type: ignore[arg-type]


def test_conclude_unknown_temperature_drops_with_any_setting() -> None:
    assert reason(BuilderSettings(reshaped="keep"), Temperature=None) == ("unknown_sampling", "")


def test_conclude_order_of_reasons_is_documented() -> None:
    """Faults are put on one call, the last of the list first: each new one is the one that is written."""
    words = re.findall(r"[a-z]+_[a-z_]+|aborted|retried|unfinished|redacted|retokenized|duplicate|incomplete", reconcile.__doc__ or "")
    order = [DropReason(name) for name in dict.fromkeys(words) if name in set(DropReason) and name != "no_calls"]
    assert {*order} == {*DropReason} - {DropReason.NO_CALLS}
    of_call: dict[DropReason, dict[str, object]] = {
        DropReason.NO_REWARD: {"fault": "none"},
        DropReason.OVER_LENGTH: {"PromptIds": [1] * 10},
        DropReason.OTHER_DISTRIBUTION: {"TopP": 0.5},
        DropReason.MIXED_VERSIONS: versions((0, 3), (1, 4)),
        DropReason.OTHER_TOKENIZER: {"TokenizerHash": "another"},
        DropReason.UNKNOWN_SAMPLING: {"Temperature": None},
        DropReason.UNKNOWN_VERSION: versions(),
        DropReason.NO_LOGPROBS: {"Logprobs": []},
        DropReason.EMPTY_RESPONSE: {"ResponseIds": [], "Logprobs": []},
        DropReason.RETOKENIZED: {"IdsSource": "retokenized"},
        DropReason.NO_TOKEN_IDS: {"PromptIds": []},
        DropReason.ATTRIBUTES_DROPPED: {"Dropped": True},
        DropReason.OTHER_MODALITY: {"Modality": "image"},
        DropReason.REDACTED: {"Redacted": True},
        DropReason.UNFINISHED: {"Unfinished": True},
        DropReason.RETRIED: {"Retried": True},
        DropReason.CALL_FAILED: {"ErrorType": "timeout"},
        DropReason.ABORTED: {"Aborted": True},
        DropReason.NOT_SELECTED: {"AgentName": "other"},
        DropReason.ATTEMPT_FAILED: {"root": {"Failure": "crash"}},
        DropReason.INCOMPLETE: {"root": {"Failure": "crash", "Verdict": "incomplete"}},
        DropReason.UNKNOWN_CONVENTION: {"Convention": "unknown"},
        DropReason.DUPLICATE: {"DuplicateOf": "c9"},
        DropReason.SUPERSEDED_ATTEMPT: {"Attempt": 7},
        DropReason.SHARED_TRACE: {"Shared": True},
    }
    assert [*of_call] == order[::-1]
    # Ids of ours cannot be wrong in the ways in which no ids can, and those of a text are of no version.
    spec = BuilderSettings(max_tokens=9, tokenizer_hash="tok", selection=Selection(agents="agent"), mixed_versions="drop")
    facts: dict[str, object] = {}
    reasons = list[str]()
    for changes in of_call.values():
        facts |= changes
        reasons.append(concluded(spec, **facts)["Reason"][0])  # type: ignore[arg-type]
    assert reasons == [name.value for name in of_call]


def test_conclude_mixed_versions_setting_keeps_or_drops() -> None:
    facts = versions((0, 3), (1, 4))
    assert reason(**facts) == ("", "")
    assert reason(BuilderSettings(mixed_versions="drop"), **facts) == ("mixed_versions", "versions 3, 4")
    assert reason(BuilderSettings(mixed_versions="drop")) == ("", "")


@pytest.mark.parametrize(
    ("selection", "detail"),
    [
        (Selection(agents="agen"), "agent agent"),
        (Selection(models="gpt.*"), "model policy"),
        (Selection(policies="judge"), "policy policy"),
        (Selection(tools="calculator|ad"), "tool search, add"),
        (Selection(components="critic"), "component agent, plan"),
        (Selection(agents="agent", tools="add", components="critic|judge"), "component agent, plan"),
    ],
)
def test_conclude_not_selected_names_field_that_did_not_match(selection: Selection, detail: str) -> None:
    spec = BuilderSettings(selection=selection)
    assert concluded(spec).select("Reason", "Detail", "Turn").row(0) == ("not_selected", detail, None)


def test_conclude_selection_matches_any_tool_or_component() -> None:
    spec = BuilderSettings(selection=Selection(agents="a.*", models="policy", policies="policy", tools="add", components="plan|x"))
    assert reason(spec) == ("", "")
    assert reason(spec, Tools=[]) == ("not_selected", "tool none")
    assert reason(BuilderSettings(selection=Selection(policies="gpt")), Policy="", Model="gpt") == ("", "")


def test_conclude_turn_is_given_to_used_calls_only() -> None:
    for facts in ({"Retried": True}, {"DuplicateOf": "c"}, {"Convention": "unknown"}, {"HttpStatus": 500}):
        assert concluded(**facts)["Turn"][0] is None  # type: ignore[arg-type]
    assert concluded(Logprobs=[-0.5])["Turn"][0] == 0


def test_conclude_over_length_counts_prompt_and_response() -> None:
    assert reason(BuilderSettings(max_tokens=5)) == ("", "")
    assert reason(BuilderSettings(max_tokens=4)) == ("over_length", "5 tokens; builder.max_tokens = 4")


def meanings() -> dict[str, str]:
    """Return the docstrings of DropReason's members by value."""
    tree = ast.parse(inspect.getsource(types.DropReason))
    body = tree.body[0].body  # type: ignore[attr-defined]
    return {
        assignment.value.value: docstring.value.value
        for assignment, docstring in itertools.pairwise(body)
        if isinstance(assignment, ast.Assign)
        and isinstance(assignment.value, ast.Constant)
        and isinstance(docstring, ast.Expr)
        and isinstance(docstring.value, ast.Constant)
    }


def test_drop_reasons_have_meaning_and_remedy_of_one_sentence() -> None:
    assert [*meanings()] == [reason.value for reason in DropReason]
    assert len({remedy(reason) for reason in DropReason}) == len(DropReason)
    for reason in DropReason:
        assert re.fullmatch(r"[A-Z][^\n]+\.", remedy(reason)), reason
        assert remedy(reason).count(". ") == 0, reason


def test_drops_page_matches_drop_reason() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", (ROOT / "docs/reference/drops.md").read_text().split("\n## ")[0], re.MULTILINE)
    assert rows == [(reason.value, meanings()[reason.value], remedy(reason)) for reason in DropReason]
