"""`spangrad rollout show` on a real store: spans of a real framework, sent twice, as a person reads them."""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

from spangrad import semconv
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.policies import skip
from tests.support.processes import run_spangrad
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory
from trainer.data.source import Group
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import SkipReason
from transition_builder.loop import build_once

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"


def post(store: StoreSettings, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, headers, method="POST"), timeout=30).close()


def show(store: StoreSettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_spangrad("rollout", "show", *arguments, "--set", f"store.url={store.url}")


def outline(printed: str) -> list[str]:
    """Each span's depth and name, with all that is told of it but durations and tokens."""
    lines = [line for line in printed.splitlines() if "──" in line]
    spans = [(line.index("── "), line.split("── ", 1)[1].split(" · ")) for line in lines]
    return [f"{indent // 4} {' · '.join(part for part in parts if not part[0].isdigit())}" for indent, parts in spans]


def test_rollout_show_framework_spans_appear_once_in_tree(store: StoreSettings) -> None:
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


def test_rollout_show_runner_rollout_has_verdict(store: StoreSettings) -> None:
    spans = SpanFactory(run="shown")
    failed = spans.root("shown-1", attempt=0, calls=1, final=False, failure="crash")
    spans.call(failed, rollout="shown-1", attempt=0)
    root = spans.root("shown-1", attempt=1, calls=2)
    spans.spans[-1]["Attributes"] |= {semconv.ROLLOUT_LOG: "thinking\n[b]done[/b]\n", semconv.ROLLOUT_PARTIAL: "KeyError: 'x'"}
    spans.evaluation(root, 0.5)
    for logprobs in ([-0.5, -0.25], [-0.5]):
        spans.call(spans.client(root, rollout="shown-1", attempt=1), rollout="shown-1", attempt=1, Logprobs=logprobs)
    post(store, spans.otlp())
    build_once(Settings(store=store, builder=BuilderSettings(selection=Selection(agents=".*|shown"))))

    head, facts, agents, built = show(store, "shown-1", "--width", "200").stdout.splitlines()[:4]
    assert head == "rollout shown-1"
    assert facts.startswith("run shown · mode train · task t · group g of 2 · 2 attempts · ")
    assert facts.endswith("· 7 spans · 3 calls 9→6 tokens")
    assert agents == "agents agent (2 calls), runner (1 call)"
    drops = "1 dropped as no_logprobs (1 logprobs for 2 tokens), 1 dropped as superseded_attempt (attempt 1 counts)"
    assert built == f"built: 1 transition, {drops}"
    assert "\nattempt 0: crash\n" in show(store, "shown-1", "--attempt", "0").stdout
    tree, verdict, rest = show(store, "shown-1", "--attempt", "1", "--width", "200").stdout.partition("attempt 1: succeeded")
    assert verdict + rest == (
        "attempt 1: succeeded, with a partial result after KeyError: 'x'\n  the end of its log:\n  | thinking\n  | [b]done[/b]\n"
    )
    assert outline(tree) == [
        "0 rollout · attempt 1 · final · ok · reward = 0.5 (event)",
        "1 ChatCompletion · llm · ok",
        "2 chat · gateway · policy v3 · stop · → transition, turn 0 of agent, reward = 0.5 (runner)",
        "1 ChatCompletion · llm · ok",
        "2 chat · gateway · policy v3 · stop · → dropped as no_logprobs (1 logprobs for 2 tokens)",
    ]


def test_rollout_show_unknown_id_names_nearest(store: StoreSettings) -> None:
    spans = SpanFactory(run="near")
    spans.root("nearly-there")
    post(store, spans.otlp())
    answer = show(store, "nearly-here")
    assert answer.returncode == 1
    sentence = f"spangrad: the store at {store.url} holds no span of rollout 'nearly-here'. Did you mean nearly-there?\n"
    assert (answer.stdout, answer.stderr) == ("", sentence)
    answer = show(store, "nearly-there", "--attempt", "3")
    assert answer.stderr.endswith("holds no span of attempt 3 of rollout 'nearly-there'. Leave --attempt out to see those that it had.\n")


def test_rollout_show_unknown_id_names_rootless_traces(tmp_path: Path) -> None:
    store = store_settings(tmp_path / "store")
    with running_store(store, tmp_path / "store.log"):
        assert show(store, "nobody").stderr.endswith("It holds no rollouts at all: is store.url the right one?\n")
        post(store, (SPANS / "autogen.jsonl").read_bytes())
        client = connect(store)
        ((trace,),) = client.query("SELECT RolloutKey FROM spangrad_internal.rollout_spans ORDER BY IngestedAt DESC LIMIT 1").result_rows
        client.close()
        assert f"The newest rollouts are {trace}" in show(store, "nobody").stderr


def test_rollout_why_without_calls_names_no_calls(store: StoreSettings, tmp_path: Path) -> None:
    spans = SpanFactory(run="callless")
    spans.evaluation(spans.root("callless-1", calls=0), 1.0)
    post(store, spans.otlp())
    build_once(Settings(store=store))
    lines = why(store, "callless-1", f"trainer.directory={tmp_path}")
    assert any("attempt 0 counting. 0 calls: 0 transitions, 0 drops." in line for line in lines), lines
    assert any(line.startswith("- The rollout itself: ") and "no_calls" in line for line in lines), lines


def why(store: StoreSettings, rollout: str, *sets: str) -> list[str]:
    """Lines of `spangrad rollout why`."""
    answer = run_spangrad(
        "rollout", "why", rollout, *(word for setting in (f"store.url={store.url}", *sets) for word in ("--set", setting))
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    return answer.stdout.splitlines()


def test_rollout_why_before_and_after_build(store: StoreSettings, tmp_path: Path) -> None:
    spans = SpanFactory(run="asked")
    root = spans.root("asked-1", calls=2)
    calls = [
        spans.call(spans.client(root, rollout="asked-1"), rollout="asked-1", Logprobs=logprobs) for logprobs in ([-0.5, -0.25], [-0.5])
    ]
    post(store, spans.otlp(*(str(row["SpanId"]) for row in spans.spans if row["SpanId"] != calls[1])))
    waiting = why(store, "asked-1")
    assert waiting[:3] == [
        "Rollout asked-1 of run asked (mode train): task t, group g of 2, 1 attempt.",
        "Attempt 0 ended well, and counts.",
        "4 spans arrived; the gateway answered 2 calls of attempt 0, and 1 of them did not arrive. Evaluations: none arrived.",
    ]
    assert waiting[3].startswith(
        "It is not built yet: it waits for 1 call of attempt 0 and a reward, at most builder.incomplete_after_seconds"
    )

    spans.evaluation(root, 0.5)
    post(store, spans.otlp(root, calls[1]))
    settings = Settings(store=store, builder=BuilderSettings(selection=Selection(agents=".*|asked")))
    build_once(settings)
    lines = why(store, "asked-1")
    place = next(number for number, line in enumerate(lines) if f"specification {settings.builder.spec}, revision 0) at " in line)
    assert lines[place].endswith(" UTC, attempt 0 counting. 2 calls: 1 transition, 1 drop.")
    kept, dropped = (calls[number][:8] for number in (0, 1))
    assert lines[place + 1 : place + 5] == [
        f"- Attempt 0, span {kept} (chat) by agent: transition, turn 0, sampled by policy policy version 3; reward = 0.5 (runner).",
        f"- Attempt 0, span {dropped} (chat) by agent: dropped as no_logprobs (1 logprobs for 2 tokens), reported by gateway.",
        "no_logprobs: Have the engine return a logprob for each sampled token: the gateway and `spangrad engine` ask for them.",
        "It is not trained: its group g has 1 of 2 rollouts built so far.",
    ]
    place = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    ledger = Ledger(place, "policy", "tried")
    skip(ledger, [Group("asked", "train", settings.builder.spec, "g")], SkipReason.EQUAL)
    ledger.close()
    skipped = (
        "the trainer of policy policy (branch tried) skipped its group as equal. `spangrad train skipped` names the remedy; "
        "`spangrad train restore g` brings the group back."
    )
    assert why(store, "asked-1", f"trainer.ledger_url={place}")[-1] == f"It is not trained: {skipped}"


def test_rollout_rebuilt_after_training_is_listed_with_both_builds(store: StoreSettings) -> None:
    """The view names it with what was trained of it and what is there now, and so does `why`."""
    spans = SpanFactory(run="again")
    root = spans.root("again-1", calls=1)
    spans.evaluation(root, 0.5)
    early, late = (spans.call(root, rollout="again-1") for _ in range(2))
    post(store, spans.otlp(root, early))
    first, second = (
        Settings(store=store, builder=BuilderSettings(selection=Selection(agents=".*|again"), max_tokens=tokens)) for tokens in (None, 9)
    )
    build_once(first)
    client = connect(store)
    same = {"Policy": "policy", "Branch": "main", "Version": 4, "BatchId": "b-1", "RunId": "again", "RolloutId": "again-1"}
    row = {**same, "Mode": "train", "GroupId": "g", "BuildSpec": first.builder.spec, "Revision": 0}
    client.insert("spangrad_internal.batches", [list(row.values())], column_names=list(row))
    there = (
        "SELECT Policy, Branch, Version, BatchId, TrainedSpec, TrainedRevision, BuildSpec, Revision FROM spangrad.already_trained "
        "WHERE RunId = 'again' ORDER BY Revision DESC, BuildSpec = TrainedSpec"
    )
    assert client.query(there).result_rows == []

    post(store, spans.otlp(late))
    build_once(first)
    build_once(second)
    trained = ("policy", "main", 4, "b-1", first.builder.spec, 0)
    assert client.query(there).result_rows == [(*trained, first.builder.spec, 1), (*trained, second.builder.spec, 0)]
    client.close()
    lines = [line for line in why(store, "again-1") if "rain" in line and not line.startswith(("Rollout", "- "))]
    committed = "It is trained: batch b-1 made version 4 of policy policy (branch main)."
    since = "already_trained: that was revision 0; what came since changes no version: a rollout is trained once."
    other = f"already_trained: built by specification {first.builder.spec}, it helped to make version 4 of policy policy, "
    assert sorted(lines) == sorted([committed, since, f"{other}and branch main trains no rollout twice."])
