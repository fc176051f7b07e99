"""Laws of the whole builder, over any forest of spans: order, repetition and company change nothing, every call is accounted for.

A forest is a few rollouts of one or two attempts. Its spans are of any convention or none, hang below any other span, below one that never
arrived, or in a ring; they lie in their attempt's trace or in one of their own, name their rollout or leave that to their trace, and
come from processes that count or do not, whose clocks agree or do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from spangrad.settings import AirRule, BuilderSettings
from spangrad.types import call_id
from tests.support.spans import SpanFactory, versions
from transition_builder.build import build
from transition_builder.frames import Built, Frames, conform, empty
from transition_builder.schemas import BUILT
from transition_builder.source.sink import Written, revise

SPEC = BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.125, tools=("*",)),))
NOWHERE = "f" * 16
"""A parent that never arrived."""

PLAIN: dict[str, tuple[str, str, dict[str, str]]] = {
    "plain": ("work", "app", {}),
    "agent": ("solver", "openinference.instrumentation.openai_agents", {"openinference.span.kind": "AGENT"}),
    "chain": ("LangGraph", "openinference.instrumentation.langchain", {"openinference.span.kind": "CHAIN"}),
    "tool": ("search", "openinference.instrumentation.langchain", {"openinference.span.kind": "TOOL", "tool_call.id": "t1"}),
    "other_tool": ("execute_tool search", "autogen", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}),
}
"""Spans that are no calls: name, scope, attributes."""
CALLING: dict[str, tuple[str, str, dict[str, str]]] = {
    "framework": ("ChatOpenAI", "openinference.instrumentation.langchain", {"openinference.span.kind": "LLM"}),
    "gen_ai": (
        "chat policy",
        "opentelemetry.instrumentation.openai_v2",
        {"gen_ai.operation.name": "chat", "gen_ai.system": "openai", "gen_ai.request.model": "policy"},
    ),
    "traceloop": (
        "openai.chat",
        "opentelemetry.instrumentation.openai.v1",
        {"llm.request.type": "chat", "gen_ai.system": "openai", "gen_ai.request.model": "policy"},
    ),
    "vercel": ("ai.generateText.doGenerate", "ai", {"ai.operationId": "ai.generateText.doGenerate", "ai.model.id": "policy"}),
    "langfuse": ("answer", "langfuse-sdk", {"langfuse.observation.type": "generation", "langfuse.observation.model.name": "policy"}),
    "mlflow": ("chat", "mlflow.openai", {"mlflow.spanType": '"CHAT_MODEL"'}),
    "pydantic_ai": ("chat policy", "pydantic-ai", {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"}),
    "lightning": ("openai.chat.completion", "agentops", {"agentops.span.kind": "llm", "gen_ai.request.model": "policy"}),
    "engine": ("llm_request", "vllm.llm_engine", {"gen_ai.request.id": "cmpl-1", "gen_ai.response.model": "policy"}),
    "http": ("POST", "opentelemetry.instrumentation.httpx", {"url.full": "http://host/v1/chat/completions", "http.request.method": "POST"}),
}
"""Spans that tell of a call, or seem to."""
FAULTS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"HttpStatus": 503, "ErrorType": "503", "PromptIds": [], "ResponseIds": [], "Logprobs": []},
    {"Aborted": True, "ErrorType": "aborted"},
    {"PromptIds": []},
    {"Logprobs": []},
    versions((0, 3), (1, 4)),
    versions(),
    {"Temperature": None},
]


@dataclass(frozen=True)
class Plan:
    """One span, before it is made."""

    kind: str
    rollout: int
    attempt: int
    parent: int
    """Among the plans; beyond them: none, or one that never arrived."""
    lone: bool
    """True if the span has a trace of its own."""
    named: bool
    process: str
    failed: bool
    choices: int
    fault: int
    echoes: bool
    """True if the span's answer has the id that all such answers share."""
    graded: float | None


PLANS = st.builds(
    Plan,
    kind=st.sampled_from(["gateway", "gateway", "gateway", "client", "client", *PLAIN, *CALLING]),
    rollout=st.integers(0, 1),
    attempt=st.sampled_from([0, 0, 0, 1]),
    parent=st.integers(-2, 9),
    lone=st.sampled_from([False, False, False, True]),
    named=st.sampled_from([True, True, True, False]),
    process=st.sampled_from(["agent", "agent", "worker", ""]),
    failed=st.sampled_from([False, False, True]),
    choices=st.sampled_from([1, 1, 2]),
    fault=st.integers(0, len(FAULTS) - 1),
    echoes=st.booleans(),
    graded=st.sampled_from([None, None, 0.5, float("nan")]),
)
CLOCKS = st.dictionaries(st.sampled_from(["agent", "worker", "gateway", "runner"]), st.sampled_from([-30.0, 30.0, 0.5]), max_size=2)
ENDS = st.lists(st.sampled_from(["reward", "reward", "reward", "mute", "failed", "incomplete"]), min_size=2, max_size=2)


class Forest:
    """The rows of a forest, as the store's typed tables hold them."""

    def __init__(self, plans: list[Plan], ends: list[str], clocks: dict[str, float]) -> None:
        self._text = f"Forest({plans!r}, {ends!r}, {clocks!r})"
        self.factory = factory = SpanFactory(clocks=clocks)
        for number, end in enumerate(ends):
            name = f"r{number}"
            last = max([plan.attempt for plan in plans if plan.rollout == number], default=0)
            for attempt in range(last + 1):
                failure = "crash" if attempt < last or end == "failed" else ""
                verdict: dict[str, Any] = {"Verdict": "incomplete", "Detail": "too few calls"} if end == "incomplete" else {}
                root = factory.root(name, attempt=attempt, final=attempt == last, failure=failure, **verdict)
                if end == "reward" and attempt == last:
                    factory.evaluation(root, 0.5)
        planned = [(self._make(plan), plan) for plan in plans]
        names = [span for span, _ in planned]
        for span, plan in planned:
            parent = names[plan.parent] if 0 <= plan.parent < len(names) else NOWHERE if plan.parent < -1 else ""
            for rows in (factory.spans, factory.calls):
                for row in rows:
                    if row["SpanId"] == span:
                        row["ParentSpanId"] = parent
        self.calling = {span for span, plan in planned if plan.kind in CALLING or plan.kind in {"client", "gateway"}}

    def _make(self, plan: Plan) -> str:
        factory, name = self.factory, f"r{plan.rollout}"
        trace = f"lone {len(factory.spans)}" if plan.lone else f"run.{name}.{plan.attempt}"
        where: dict[str, Any] = {"rollout": name, "attempt": plan.attempt, "trace": trace}
        status: dict[str, Any] = {"status": "Error" if plan.failed else "Ok", "process": plan.process}
        if plan.kind == "gateway":
            echo = {"ResponseId": "echo"} if plan.echoes else {}
            span = factory.call("", choices=plan.choices, **where, **FAULTS[plan.fault], **echo)
        elif plan.kind == "client":
            span = factory.client("", **where, **status)
            if not plan.failed:
                factory.answer(span, **{"ResponseId": "echo"} if plan.echoes else {}, **{"PromptIds": []} if plan.fault == 5 else {})
        else:
            title, scope, attributes = (PLAIN | CALLING)[plan.kind]
            recorded = attributes | ({"gen_ai.response.id": "echo"} if plan.echoes and plan.kind in CALLING else {})
            span = factory.span(title, "", scope=scope, Attributes=recorded, **where, **status)
        if plan.graded is not None:
            factory.evaluation(span, plan.graded)
        for rows in (factory.spans, factory.calls):
            for row in rows:
                if row["SpanId"] == span:
                    if not plan.named and not plan.lone:
                        row |= {"RunId": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace", "Attempt": 0}
                    if plan.process == "" and plan.kind != "gateway":
                        row |= {"ProcessId": "", "Seq": 0}
        return span

    def __repr__(self) -> str:
        return self._text

    @property
    def frames(self) -> Frames:
        """All of it."""
        return self.factory.frames()


FORESTS = st.builds(Forest, st.lists(PLANS, min_size=1, max_size=10), ENDS, CLOCKS)
SLOWLY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_same(first: Built, other: Built) -> None:
    """The same rows, in the same order."""
    for left, right in ((first.transitions, other.transitions), (first.drops, other.drops), (first.rewards, other.rewards)):
        assert_frame_equal(left, right)


def mixed(rows: pl.DataFrame, data: st.DataObject) -> pl.DataFrame:
    """The rows in another order, some of them more than once."""
    places = list(range(rows.height))
    again = data.draw(st.lists(st.sampled_from(places), max_size=3)) if places else []
    return rows[data.draw(st.permutations(places + again))]


@SLOWLY
@given(FORESTS, st.data())
def test_build_any_forest_is_independent_of_order_and_repetition(forest: Forest, data: st.DataObject) -> None:
    frames = forest.frames
    other = replace(
        frames,
        rollouts=frames.rollouts[::-1],
        spans=mixed(frames.spans, data),
        calls=mixed(frames.calls, data),
        answers=mixed(frames.answers, data),
    )
    assert_same(build(frames, SPEC), build(other, SPEC))


@SLOWLY
@given(FORESTS)
def test_build_any_forest_concludes_every_call_once(forest: Forest) -> None:
    frames = forest.frames
    built = build(frames, SPEC)
    concluded = built.drops.filter(pl.col("CallId") != "")
    left = Counter([*built.transitions["CallId"], *concluded["CallId"]])
    assert set(left.values()) <= {1}

    owners = {trace for trace, source in frames.spans.select("TraceId", "RolloutKeySource").rows() if source == "rollout"}
    recorded = frames.calls.filter((pl.col("RolloutKeySource") == "rollout") | pl.col("TraceId").is_in(list(owners)))
    assert set(recorded["CallId"]) <= left.keys()

    known = {call_id(trace, span, choice) for trace, span in frames.spans.select("TraceId", "SpanId").rows() for choice in range(3)}
    assert left.keys() <= known

    # Nothing that tells of a call is passed over in silence: its attempt has a conclusion, by this span's or by another's word.
    attempts = ["RunId", "RolloutId", "Attempt"]
    rows = pl.concat([built.transitions.select(*attempts, "TraceId", "SpanId"), concluded.select(*attempts, "TraceId", "SpanId")])
    rollout_texts = {(rollout, attempt) for _, rollout, attempt, _, _ in rows.rows()}
    named = frames.spans.filter((pl.col("RolloutKeySource") == "rollout") & pl.col("SpanId").is_in(list(forest.calling)))
    assert {(row["RolloutKey"], row["Attempt"]) for row in named.iter_rows(named=True)} <= rollout_texts

    # A rollout whose final attempt has no call says so itself.
    final = {(row["RolloutId"], row["Attempt"]) for row in frames.rollouts.iter_rows(named=True)}
    silent = built.drops.filter(pl.col("CallId") == "").select("RolloutId", "Attempt").rows()
    assert sorted(silent) == sorted(final - rollout_texts)


@SLOWLY
@given(FORESTS)
def test_build_any_forest_moves_rewards_to_kept_calls_without_loss(forest: Forest) -> None:
    built = build(forest.frames, SPEC)
    keeping = built.transitions.select("RolloutId").unique()
    given_ = built.rewards.join(keeping, on="RolloutId", how="semi")
    spread = built.transitions.select("RolloutId", "Rewards.Name", "Rewards.Value").explode("Rewards.Name", "Rewards.Value").drop_nulls()
    assert sorted(spread.rows()) == sorted(given_.select("RolloutId", "Name", "Value").rows())


@SLOWLY
@given(FORESTS)
def test_build_any_forest_gives_same_rows_together_and_apart(forest: Forest) -> None:
    frames = forest.frames
    together = build(frames, SPEC)
    apart = [build(replace(frames, rollouts=rollout), SPEC) for rollout in frames.rollouts.iter_slices(1)]
    for name in ("transitions", "drops", "rewards"):
        rows = pl.concat([getattr(built, name) for built in apart])
        whole = getattr(together, name)
        order = [
            column for column in ("RunId", "RolloutId", "Attempt", "CallId", "Turn", "Name", "Source", "SpanId") if column in rows.columns
        ]
        assert_frame_equal(whole.sort(order), rows.sort(order))


@SLOWLY
@given(FORESTS, st.data())
def test_revise_after_late_spans_gives_same_rows_in_new_revision(forest: Forest, data: st.DataObject) -> None:
    frames = forest.frames
    early = data.draw(st.lists(st.booleans(), min_size=frames.spans.height, max_size=frames.spans.height))
    first = replace(frames, spans=frames.spans.filter(pl.Series(early, dtype=pl.Boolean)))
    at_once = revise(build(frames, SPEC), frames.rollouts, empty(BUILT), SPEC.spec)
    before = revise(build(first, SPEC), frames.rollouts, empty(BUILT), SPEC.spec)
    after = revise(build(replace(frames, spans=mixed(frames.spans, data)), SPEC), frames.rollouts, known(before), SPEC.spec)

    # What was concluded already, and alike, is not written again; everything else is, as if it had come at once.
    keys = ["RunId", "RolloutId"]
    alike = before.builds.join(at_once.builds, on=[*keys, "Content"], how="semi")
    assert sorted(after.builds["RolloutId"]) == sorted(at_once.builds.join(alike, on=keys, how="anti")["RolloutId"])
    assert set(after.builds["Revision"]) <= {1}
    for name in ("transitions", "drops", "rewards"):
        rows, right = getattr(after.rows, name), getattr(at_once.rows, name).join(alike, on=keys, how="anti", maintain_order="left")
        stamps = [column for column in ("Revision", "TransitionId") if column in rows.columns]
        assert_frame_equal(rows.drop(stamps), right.drop(stamps))


def known(written: Written) -> pl.DataFrame:
    """BUILT, as the store would tell of what was written."""
    missing = {name: pl.lit(None, dtype) for name, dtype in BUILT.items() if name not in written.builds.columns}
    return conform(written.builds.with_columns(**missing), BUILT)
