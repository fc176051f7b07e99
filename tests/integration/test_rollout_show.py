"""`spangrad rollout show` on a real store: spans of a real framework, sent twice, as a person reads them."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import fakes
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from transition_builder.loop import build_once

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"


def post(store: StoreSettings, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, headers, method="POST"), timeout=30).close()


def show(store: StoreSettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spangrad", "rollout", "show", *arguments, "--set", f"store.url={store.url}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def outline(printed: str) -> list[str]:
    """Each span's depth and name, with all that is told of it but durations and tokens."""
    lines = [line for line in printed.splitlines() if "──" in line]
    told = [(line.index("── "), line.split("── ", 1)[1].split(" · ")) for line in lines]
    return [f"{indent // 4} {' · '.join(part for part in parts if not part[0].isdigit())}" for indent, parts in told]


def test_a_framework_s_spans_stand_once_below_what_caused_them(store: StoreSettings) -> None:
    body = (SPANS / "langgraph_tool_error.jsonl").read_bytes().replace(b'"r9"', b'"shown-r9"')
    for _ in range(2):
        post(store, body)
    answer = show(store, "shown-r9", "--width", "200")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert outline(answer.stdout) == [
        "0 react_ag · chain · ok · parent span is not here",
        "1 agent · ok",
        "2 call_model · chain · ok",
        "2 RunnableSequence · chain · ok",
        "3 Prompt · chain · ok",
        "3 ChatOpenAI · llm · ok",
        "3 ChatCompletion · llm · ok",
        "4 POST",
        "2 should_continue · chain · ok",
        "1 tools · chain · ok",
        "2 add · tool · ok",
        "1 tools · chain · ok",
        "2 broken · tool · error: ValueError('tool exploded')",
        "1 agent · ok",
        "2 call_model · chain · ok",
        "2 RunnableSequence · chain · ok",
        "3 Prompt · chain · ok",
        "3 ChatOpenAI · llm · ok",
        "3 ChatCompletion · llm · ok",
        "4 POST",
        "2 should_continue · chain · ok",
    ]


def test_a_rollout_of_ours_with_its_verdict(store: StoreSettings) -> None:
    spans = fakes.SpanFactory(run="shown")
    failed = spans.root("shown-1", attempt=0, calls=1, final=False, failure="crash")
    spans.call(failed, rollout="shown-1", attempt=0)
    root = spans.root("shown-1", attempt=1, calls=2)
    spans.evaluation(root, 0.5)
    for logprobs in ([-0.5, -0.25], [-0.5]):
        spans.call(spans.client(root, rollout="shown-1", attempt=1), rollout="shown-1", attempt=1, Logprobs=logprobs)
    post(store, spans.otlp())
    build_once(Settings(store=store, builder=BuilderSettings(agent_pattern=".*|shown")))

    head, facts, built = show(store, "shown-1", "--width", "200").stdout.splitlines()[:3]
    assert head == "rollout shown-1"
    assert facts.startswith("run shown · mode train · task t · group g of 2 · 2 attempts · ")
    assert facts.endswith("· 7 spans · 3 calls 9→6 tokens")
    drops = "1 dropped as no_logprobs (1 logprobs for 2 tokens), 1 dropped as superseded_attempt (attempt 1 counts)"
    assert built == f"built: 1 transition, {drops}"
    one = show(store, "shown-1", "--attempt", "1", "--width", "200").stdout
    assert outline(one) == [
        "0 rollout · attempt 1 · final · ok · reward = 0.5 (event)",
        "1 ChatCompletion · llm · ok",
        "2 chat · gateway · policy v3 · stop",
        "1 ChatCompletion · llm · ok",
        "2 chat · gateway · policy v3 · stop",
    ]


def test_an_unknown_id_is_one_sentence_with_what_comes_near(store: StoreSettings) -> None:
    spans = fakes.SpanFactory(run="near")
    spans.root("nearly-there")
    post(store, spans.otlp())
    answer = show(store, "nearly-here")
    assert answer.returncode == 1
    sentence = f"spangrad: the store at {store.url} holds no span of rollout 'nearly-here'. Did you mean nearly-there?\n"
    assert (answer.stdout, answer.stderr) == ("", sentence)
    answer = show(store, "nearly-there", "--attempt", "3")
    assert answer.stderr.endswith("holds no span of attempt 3 of rollout 'nearly-there'. Leave --attempt out to see those that it had.\n")
