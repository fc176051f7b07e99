"""Exports out of a real store, read back by those who read them: pyarrow, `datasets`, verl's own dataset classes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import urllib.request
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from benchmarks.peers.environment import peer_environment
from spangrad.errors import BuilderError, StoreError
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.types import DropReason, transition_id
from tests.support.built_rollouts import START, StoredRollouts, assistant, chat, user
from tests.support.processes import run_spangrad
from tests.support.spans import SpanFactory
from trainer.optim.process import choose_platform
from transition_builder.export.formats import FORMATS, export
from transition_builder.export.reading import ExportReader, ExportSelection
from transition_builder.export.tally import LeftOut
from transition_builder.loop import build_once

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
ASKS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}],
}
ANSWERS = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def write(world: StoredRollouts, name: str, out: Path, **selection: Any) -> ExportReader:
    options = {key: selection.pop(key) for key in ("force", "min_margin") if key in selection}
    return export(world.client, name, ExportSelection(selection.pop("dataset", world.name), **selection), out, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def two_turns(world: StoredRollouts, rollout: str, reward: float, reply: str = "sunny in rome", **where: Any) -> list[str]:
    """A rollout of two calls, the second of which goes on where the first ended."""
    first = world.call(rollout, *chat([SYSTEM, user("rome?")], ASKS, tools=[TOOL]), ids=([1, 2], [3, 4]), **where)
    second = world.call(
        rollout, *chat([SYSTEM, user("rome?"), ASKS, ANSWERS], reply, tools=[TOOL]), ids=([1, 2, 3, 4, 5], [6, 7]), reward=reward, **where
    )
    return [first, second]


def test_export_parquet_holds_transitions_unchanged(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-parquet")
    calls = two_turns(world, "r0", 1.0) + two_turns(world, "r1", 0.5)
    world.call("r1", dropped="call_failed")
    world.commit()
    done = write(world, "parquet", tmp_path / "out.parquet", reward_weights={"reward": 2.0})
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.metadata == {
        b"spangrad.dataset": b"ex-parquet@1",
        b"spangrad.build_spec": world.spec.encode(),
        b"spangrad.as_of": b"",
        b"spangrad.reward_weights": b'{"reward": 2.0}',
    }
    assert table.column("CallId").to_pylist() == calls
    assert table.slice(1, 1).to_pylist() == [
        {
            "RunId": "ex-parquet", "Mode": "train", "BuildSpec": world.spec, "GroupId": "g", "GroupSize": 2, "TaskId": "t",
            "RolloutId": "r0", "Attempt": 0, "Revision": 0, "Turn": 1, "CallId": calls[1],
            "TransitionId": transition_id(calls[1], world.spec, 0),
            "TraceId": table.column("TraceId")[1].as_py(), "SpanId": f"{2:016x}", "ChoiceIndex": 0,
            "Timestamp": START + timedelta(seconds=2),
            "ParentCallId": "", "Branch": 0, "AgentName": "planner", "Components": ["planner"], "Tools": [], "Policy": "policy",
            "Version": 3, "Versions.Start": [0], "Versions.Version": [3], "Model": "policy", "TokenizerHash": "tok", "Reshaping": "",
            "PromptIds": [1, 2, 3, 4, 5], "ResponseIds": [6, 7], "Logprobs": [-0.5, -0.5],
            "Temperature": 1.0, "FinishReason": "stop", "Return": 2.0,
            "Rewards": [{"Name": "reward", "Value": 1.0, "Source": "runner", "CallId": "", "Role": "", "Turn": 1}],
        }
    ]  # fmt: skip
    assert (done.tally.calls, done.tally.calls_written, dict(done.tally.left_out)) == (5, 4, {"dropped: call_failed": 1})


def test_export_as_of_past_time_or_older_revision_gives_those_rows(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-asof")
    first = two_turns(world, "r0", 1.0)
    then = world.commit()
    second = two_turns(world, "r0", 0.0) + two_turns(world, "r1", 0.0)
    world.commit(revision=1)
    world.spec = "otherspec-ex-asof"
    world.call("r0", *chat([user("x")], "y"), reward=3.0)
    world.commit()

    def calls(**selection: Any) -> list[str]:
        write(world, "parquet", tmp_path / "out.parquet", force=True, **selection)
        return pq.read_table(tmp_path / "out.parquet").column("CallId").to_pylist()

    assert calls(as_of=then) == first
    assert calls(dataset="ex-asof@1") == second
    assert len(calls()) == 1
    assert calls(dataset="ex-asof@1", since=then) == second[2:]
    with pytest.raises(StoreError, match=r"has no dataset 'ex-asof@3'\. There are: .*ex-asof@1, ex-asof@2"):
        calls(dataset="ex-asof@3")


def test_export_selection_writes_chosen_calls_and_counts_rest(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-chosen")
    two_turns(world, "r0", 1.0)
    two_turns(world, "r1", 0.25)
    kept = world.call("r2", *chat([user("x")], "y"), reward=2.0, AgentName="critic")
    world.call("r3", *chat([user("x")], "y"), reward=2.0, mode="validate")
    world.commit()
    done = write(world, "parquet", tmp_path / "out.parquet", modes=("train",), min_return=0.5, selection=Selection(agents="crit.*"))
    assert pq.read_table(tmp_path / "out.parquet").column("CallId").to_pylist() == [kept]
    assert (done.tally.calls, done.tally.rollouts) == (5, 3)
    assert dict(done.tally.left_out) == {"below_return": 2, "not_selected": 2}


def test_export_huggingface_directory_loads_with_datasets(store: StoreSettings, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    world = StoredRollouts(store, "ex-hf")
    calls = two_turns(world, "r0", 1.0)
    held_out = world.call("r1", *chat([user("x")], "y"), reward=0.5, mode="validate")
    world.commit()
    write(world, "huggingface", tmp_path / "hf")
    write(world, "parquet", tmp_path / "out.parquet")
    loaded = datasets.load_dataset(str(tmp_path / "hf"), cache_dir=str(tmp_path / "cache"))
    assert {name: split["CallId"] for name, split in loaded.items()} == {"train": calls, "validate": [held_out]}
    assert [*loaded["train"], *loaded["validate"]] == pq.read_table(tmp_path / "out.parquet").to_pylist()
    features = loaded["train"].features
    assert features["PromptIds"] == datasets.List(datasets.Value("uint32"))
    assert features["Timestamp"] == datasets.Value("timestamp[ns, tz=UTC]")
    assert [path.name for path in sorted((tmp_path / "hf" / "data").iterdir())] == ["train-00000.parquet", "validate-00000.parquet"]


def test_export_sft_trains_each_reply_once(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-sft")
    merged = two_turns(world, "r0", 1.0)
    few_shot = world.call("r1", *chat([user("a"), assistant("b"), user("c")], "d"), reward=0.0)
    plain = world.call("r2", {"prompt": "once upon"}, {"choices": [{"index": 0, "text": " a time", "finish_reason": "stop"}]}, reward=0.0)
    world.call("r3", *chat([user("x")], "cut"), reward=0.0, FinishReason="length")
    world.call("r4", reward=0.0)
    world.call("r5", *chat([user("x")], "[redacted]"), reward=0.0, attributes={"spangrad.redacted": True})
    world.call("r6", {"model": "policy"}, {"what": 1}, reward=0.0)
    world.commit()
    done = write(world, "sft", tmp_path / "sft.jsonl")

    def meta(rollout: str, value: float, *calls: str) -> dict[str, Any]:
        about = {"dataset": "ex-sft@1", "run": "ex-sft", "mode": "train", "task": "t", "group": "g", "rollout": rollout, "attempt": 0}
        about |= {"build_spec": world.spec, "revision": 0, "return": value, "agents": ["planner"]}
        return {**about, "calls": list(calls), "tokenizers": ["tok"]}

    assert lines(tmp_path / "sft.jsonl") == [
        {
            "messages": [SYSTEM, user("rome?"), {**ASKS, "weight": 1}, ANSWERS, {**assistant("sunny in rome"), "weight": 1}],
            "tools": [TOOL],
            "meta": meta("r0", 1.0, *merged),
        },
        {
            "messages": [user("a"), {**assistant("b"), "weight": 0}, user("c"), {**assistant("d"), "weight": 1}],
            "meta": meta("r1", 0.0, few_shot),
        },
        {"prompt": "once upon", "completion": " a time", "meta": meta("r2", 0.0, plain)},
    ]
    assert dict(done.tally.left_out) == {"cut_short": 1, "no_text": 1, "redacted_text": 1, "unreadable_text": 1}
    assert (done.tally.calls, done.tally.calls_written, dict(done.tally.written)) == (8, 4, {"rows": 3, "trained_messages": 3})


def test_export_dropped_calls_without_ids_gives_their_text(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-noids")
    asked = {"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "hi"}
    answered = {"llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": "hello"}
    first = world.call("r0", attributes={"openinference.span.kind": "LLM", **asked, **answered}, dropped="no_token_ids")
    second = world.call("r1", *chat([user("x")], "y"), dropped="no_token_ids")
    world.call("r1", *chat([user("x")], "z"), dropped="call_failed")
    world.give("r0", 0.5)
    world.give("r0", 0.25, "sql", "brevity")
    world.commit()
    done = write(world, "sft", tmp_path / "a.jsonl")
    assert (lines(tmp_path / "a.jsonl"), dict(done.tally.left_out)) == ([], {"dropped: no_token_ids": 2, "dropped: call_failed": 1})
    done = write(world, "sft", tmp_path / "b.jsonl", dropped=(DropReason.NO_TOKEN_IDS,))
    rows = [(row["messages"], row["meta"]["return"], row["meta"]["calls"]) for row in lines(tmp_path / "b.jsonl")]
    assert rows == [
        ([user("hi"), {**assistant("hello"), "weight": 1}], 0.75, [first]),
        ([user("x"), {**assistant("y"), "weight": 1}], None, [second]),
    ]
    assert dict(done.tally.left_out) == {"dropped: call_failed": 1}
    done = write(world, "sft", tmp_path / "c.jsonl", dropped=(DropReason.NO_TOKEN_IDS,), min_return=0.5)
    assert (len(lines(tmp_path / "c.jsonl")), dict(done.tally.left_out)) == (1, {"no_return": 1, "dropped: call_failed": 1})
    with pytest.raises(
        BuilderError, match=r"sft-tokens has no place for calls that were dropped. Leave --dropped out, or take one of verl-sft, sft"
    ):
        write(world, "sft-tokens", tmp_path / "d.jsonl", dropped=(DropReason.NO_TOKEN_IDS,))
    with pytest.raises(BuilderError, match="calls dropped as aborted cannot be exported"):
        write(world, "sft", tmp_path / "d.jsonl", dropped=(DropReason.ABORTED,))


def test_export_sft_reads_texts_of_log_records(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-logs")
    world.call("r0", attributes={"gen_ai.response.model": "m", "gen_ai.response.finish_reasons": '["stop"]'}, dropped="no_token_ids")
    world.call("r0", *chat([user("x")], "y"), dropped="no_token_ids")
    world.call("r1", attributes={"gen_ai.response.finish_reasons": '["stop"]'}, dropped="no_token_ids")
    of_call = {"TraceId": world.drops[0]["TraceId"], "SpanId": world.drops[0]["SpanId"], "Timestamp": world.drops[0]["Timestamp"]}
    records = [
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": assistant("hello")}),
        ("gen_ai.system.message", {"content": "Be brief."}),
        ("gen_ai.user.message", {"content": "hi"}),
    ]
    world.commit()
    logs = [{**of_call, "EventName": name, "Body": json.dumps(body)} for name, body in [*records, *records]]  # delivered twice
    world.client.insert("otel.otel_logs", [list(log.values()) for log in logs], column_names=list(logs[0]))
    done = write(world, "sft", tmp_path / "out.jsonl", dropped=(DropReason.NO_TOKEN_IDS,))
    assert [row["messages"] for row in lines(tmp_path / "out.jsonl")] == [
        [SYSTEM, user("hi"), {**assistant("hello"), "weight": 1}],
        [user("x"), {**assistant("y"), "weight": 1}],
    ]
    assert dict(done.tally.left_out) == {"no_text": 1}


def test_export_half_of_surrogate_pair_is_written_as_replacement(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-surrogate")
    world.call("r0", *chat([user("cut \ud83d")], "fine \U0001f600"), reward=1.0)
    world.commit()
    write(world, "sft", tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["messages"] == [user("cut \ufffd"), {**assistant("fine \U0001f600"), "weight": 1}]


@pytest.mark.parametrize("name", FORMATS)
def test_export_leaves_out_rollouts_whose_names_are_not_utf8(store: StoreSettings, tmp_path: Path, name: str) -> None:
    """Other names that are not are written with replacements."""
    world = StoredRollouts(store, f"ex-utf8-{name}")
    two_turns(world, "r0", 1.0)
    world.call("r0", dropped="call_failed")
    two_turns(world, "r1", 0.0)
    world.commit()

    def copy_of_r0(table: str, changes: str) -> None:
        rows = f"SELECT * FROM spangrad_internal.{table} WHERE RunId = '{world.name}' AND RolloutId = 'r0'"
        world.client.command(f"INSERT INTO spangrad_internal.{table} SELECT * REPLACE ({changes}) FROM ({rows})")

    bad = "unhex('61ff')"
    for changes in (f"{bad} AS RunId", f"{bad} AS RolloutId", f"'r2' AS RolloutId, {bad} AS GroupId"):
        for table in ("transitions", "drops", "builds"):
            copy_of_r0(table, changes)
    copy_of_r0("transitions", f"{bad} AS AgentName, ['weather', {bad}] AS Tools, {bad} AS TaskId, now64(6) + 1 AS IngestedAt")
    world.client.command("OPTIMIZE TABLE spangrad_internal.transitions FINAL")
    done = write(world, name, tmp_path / "out")
    assert (done.tally.calls, done.tally.left_out["not_utf8"]) == (14, 9)
    assert done.tally.calls_written > 0
    if name == "parquet":
        table = pq.read_table(tmp_path / "out")
        assert {(row["AgentName"], row["TaskId"], *row["Tools"]) for row in table.to_pylist()} == {
            ("a\ufffd", "a\ufffd", "weather", "a\ufffd"),
            ("planner", "t"),
        }


def test_export_finds_transitions_by_key(store: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other specifications may have as many rows of the same run, and an export reads parts of it thousands of times."""
    world = StoredRollouts(store, "ex-key")
    two_turns(world, "r0", 1.0)
    world.commit()
    statements, frame = list[str](), ExportReader._frame

    def noted(reader: ExportReader, sql: str) -> pl.DataFrame:
        statements.append(sql)
        return frame(reader, sql)

    monkeypatch.setattr(ExportReader, "_frame", noted)
    write(world, "parquet", tmp_path / "out")
    (sql,) = (sql for sql in statements if "FROM spangrad_internal.transitions" in sql)
    plan = [line.strip() for (line,) in world.client.query(f"EXPLAIN indexes = 1 {sql}").result_rows]
    keys = plan[plan.index("PrimaryKey") :][2:8]
    assert keys == ["RunId", "Mode", "BuildSpec", "GroupId", "RolloutId", "Revision"]


def test_export_return_of_rollout_without_kept_calls_is_of_its_revision(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-revised")
    times = list[datetime]()
    for revision, name in enumerate(("reward", "other")):
        world.call("r0", *chat([user("x")], "y"), dropped="no_token_ids")
        world.give("r0", 1.0 + revision, name=name)
        times.append(world.commit(revision))
    for as_of, expected in zip((None, *times), (2.0, 1.0, 2.0), strict=True):
        write(world, "sft", tmp_path / "out.jsonl", dropped=(DropReason.NO_TOKEN_IDS,), as_of=as_of, force=True)
        assert [row["meta"]["return"] for row in lines(tmp_path / "out.jsonl")] == [expected]


def test_export_sft_tokens_are_engine_ids(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-tokens")
    two_turns(world, "r0", 1.0)
    world.call("r0", *chat([user("new")], "y"), ids=([9], [8]))
    world.commit()
    done = write(world, "sft-tokens", tmp_path / "tokens.jsonl")
    rows = [(row["input_ids"], row["loss_mask"]) for row in lines(tmp_path / "tokens.jsonl")]
    assert rows == [([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1, 1]), ([9, 8], [0, 1])]
    assert dict(done.tally.written) == {"rows": 2, "tokens": 9, "trained_tokens": 5}


def test_export_training_trace_has_a_turn_for_each_call(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-trace")
    first, second = two_turns(world, "r0", 1.0)
    world.call("r1", *chat([user("new")], "y"), ids=([9], [8]), Logprobs=[-0.25])
    world.commit()
    out = tmp_path / "traces.jsonl"
    done = write(world, "training-trace", out)
    trace, other = lines(out)
    turns = [
        {
            "node_id": transition_id(call, world.spec, 0), "prompt_token_ids": prompt, "completion_token_ids": reply,
            "per_token_logps": [-0.5, -0.5], "loss_mask": [0] * len(prompt) + [1, 1], "request": {"messages": said_before, "tools": [TOOL]},
            "response": {"choices": [{"message": message, "finish_reason": "stop"}]},
        }
        for call, prompt, reply, said_before, message in [
            (first, [1, 2], [3, 4], [SYSTEM, user("rome?")], ASKS),
            (second, [1, 2, 3, 4, 5], [6, 7], [SYSTEM, user("rome?"), ASKS, ANSWERS], assistant("sunny in rome")),
        ]
    ]  # fmt: skip
    metadata = [turn.pop("metadata") for turn in trace["turns"]]
    assert trace == {"schema_version": 1, "turns": turns}
    assert [(about["calls"], about["return"], about["rewards"]) for about in metadata] == [
        ([first], 1.0, []),
        ([second], 1.0, [{"name": "reward", "value": 1.0}]),
    ]
    assert other["turns"][0]["per_token_logps"] == [-0.25]
    assert dict(done.tally.written) == {"rows": 2, "turns": 3, "trained_tokens": 5}


def test_export_training_trace_leaves_out_calls_without_logprobs(store: StoreSettings, tmp_path: Path) -> None:
    """OpenEnv refuses a whole trace for one of them."""
    world = StoredRollouts(store, "ex-trace-logprobs")
    whole, computed, broken = ([-0.5], [], [float("nan")])
    for logprobs in (whole, computed, broken):
        world.call("r0", *chat([user("new")], "y"), ids=([9], [8]), Logprobs=logprobs)
    world.call("r1", *chat([user("new")], "y"), ids=([9], [8]), Logprobs=computed)
    world.commit()
    done = write(world, "training-trace", tmp_path / "traces.jsonl")
    assert [[turn["per_token_logps"] for turn in row["turns"]] for row in lines(tmp_path / "traces.jsonl")] == [[whole]]
    assert dict(done.tally.left_out) == {"no_logprobs": 3}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_export_training_trace_is_valid_for_openenv(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-openenv")
    two_turns(world, "r0", 1.0)
    world.call("r1", *chat([user("new")], "y"), ids=([9], [8]))
    world.commit()
    out = tmp_path / "traces.jsonl"
    write(world, "training-trace", out)
    reads = (
        "import json, sys; from openenv.core.harness.training import TrainingTrace;"
        " print([len(TrainingTrace.model_validate(json.loads(line)).turns) for line in open(sys.argv[1])])"
    )
    python = peer_environment("openenv") / "python"
    assert subprocess.run([python, "-c", reads, out], capture_output=True, text=True, check=True).stdout == "[2, 1]\n"


def test_export_preferences_pairs_best_and_worst(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-pairs")
    best = two_turns(world, "a", 1.0)
    worst = two_turns(world, "b", -1.0, "no idea")
    two_turns(world, "c", 0.0)
    world.call("d", *chat([user("other")], "y"), reward=-5.0)
    for group, rollouts in {
        "tie": [("e", "x", 1.0), ("f", "x", 1.0)],
        "one": [("h", "x", 1.0)],
        "apart": [("i", "x", 0.0), ("j", "z", 1.0)],
    }.items():
        for rollout, text, reward in rollouts:
            world.call(rollout, *chat([user(text)], "y"), reward=reward, group=group)
    world.call("k", dropped="call_failed", group="lost")
    world.commit()
    done = write(world, "preferences", tmp_path / "pairs.jsonl")
    (row,) = lines(tmp_path / "pairs.jsonl")
    meta = row.pop("meta")
    assert row == {
        "prompt": [SYSTEM, user("rome?")],
        "chosen": [ASKS, ANSWERS, assistant("sunny in rome")],
        "rejected": [ASKS, ANSWERS, assistant("no idea")],
        "chosen_return": 1.0,
        "rejected_return": -1.0,
        "tools": [TOOL],
        "prompt_ids": [1, 2],
        "chosen_ids": [3, 4, 5, 6, 7],
        "chosen_mask": [1, 1, 0, 1, 1],
        "rejected_ids": [3, 4, 5, 6, 7],
        "rejected_mask": [1, 1, 0, 1, 1],
    }
    assert [(meta[side]["rollout"], meta[side]["calls"]) for side in ("chosen", "rejected")] == [("a", best), ("b", worst)]
    assert dict(done.tally.groups_left_out) == {"tie": 1, "group_of_one": 1, "prompts_differ": 1, "no_usable_rollout": 1}
    assert dict(done.tally.left_out) == {"not_in_a_pair": 3, "tie": 2, "group_of_one": 1, "prompts_differ": 2, "dropped: call_failed": 1}
    done = write(world, "preferences", tmp_path / "pairs.jsonl", force=True, min_margin=2.0)
    assert (lines(tmp_path / "pairs.jsonl"), done.tally.groups_left_out["tie"]) == ([], 2)


def test_export_preferences_leave_out_rollouts_that_began_with_dropped_call(store: StoreSettings, tmp_path: Path) -> None:
    """Calls of another agent follow, which begin with the same messages."""
    world = StoredRollouts(store, "ex-pairs-began")
    for rollout, reply, reward in (("r0", "good", 1.0), ("r1", "bad", 0.0)):
        world.call(rollout, *chat([user("rome?")], reply), dropped="no_token_ids")
        world.call(rollout, *chat([user("rate it")], reply), reward=reward, Turn=1)
    world.commit()
    done = write(world, "preferences", tmp_path / "pairs.jsonl")
    assert lines(tmp_path / "pairs.jsonl") == []
    assert dict(done.tally.left_out) == {"other_branch": 2, "dropped: no_token_ids": 2}
    write(world, "preferences", tmp_path / "pairs.jsonl", force=True, selection=Selection(agents="planner"))
    assert [row["prompt"] for row in lines(tmp_path / "pairs.jsonl")] == [[user("rate it")]]


def test_export_verl_prompts_load_in_verl_dataset(store: StoreSettings, tmp_path: Path, tiny_model: Path) -> None:
    omegaconf, transformers = pytest.importorskip("omegaconf"), pytest.importorskip("transformers")
    rl_dataset = verl_module("verl.utils.dataset.rl_dataset")
    world = StoredRollouts(store, "ex-verl")
    first = two_turns(world, "r0", 1.0)[0]
    two_turns(world, "r1", 0.0)
    other = world.call("r2", *chat([user("say oslo")], "y"), reward=0.5, group="g2", task="t2")
    world.commit()
    done = write(world, "verl", tmp_path / "prompts.parquet")
    config = omegaconf.OmegaConf.create(
        {"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 64, "filter_overlong_prompts_workers": 1}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    read = rl_dataset.RLHFDataset([str(tmp_path / "prompts.parquet")], tokenizer, config)
    rows = [
        {key: read[place][key] for key in ("raw_prompt", "data_source", "ability", "reward_model", "extra_info", "index")}
        for place in range(len(read))
    ]
    same = {"data_source": "ex-verl", "ability": "agent"}
    extra = {"split": "train", "run": "ex-verl"}
    assert rows == [
        {
            "raw_prompt": [SYSTEM, user("rome?")], **same, "index": 0, "reward_model": {"style": "rule", "ground_truth": "t"},
            "extra_info": {**extra, "index": 0, "task": "t", "group": "g", "rollout": "r0", "call": first, "return": 1.0},
        },
        {
            "raw_prompt": [user("say oslo")], **same, "index": 1, "reward_model": {"style": "rule", "ground_truth": "t2"},
            "extra_info": {**extra, "index": 1, "task": "t2", "group": "g2", "rollout": "r2", "call": other, "return": 0.5},
        },
    ]  # fmt: skip
    assert dict(done.tally.left_out) == {"later_call": 2, "same_prompt": 1}


def test_export_verl_leaves_out_prompt_whose_rollout_began_with_dropped_call(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-verl-began")
    world.call("r0", *chat([SYSTEM, user("rome?")], ASKS, tools=[TOOL]), dropped="no_token_ids")
    world.call("r0", *chat([SYSTEM, user("rome?"), ASKS, ANSWERS], "sunny", tools=[TOOL]), reward=1.0, Turn=1)
    world.call("r1", *chat([user("oslo?")], "rain"), reward=0.0)
    world.commit()
    done = write(world, "verl", tmp_path / "prompts.parquet")
    assert [row["prompt"] for row in pq.read_table(tmp_path / "prompts.parquet").to_pylist()] == [[user("oslo?")]]
    assert dict(done.tally.left_out) == {"later_call": 1, "dropped: no_token_ids": 1}


def test_export_verl_sft_replies_are_trained_by_verl_dataset(store: StoreSettings, tmp_path: Path, tiny_model: Path) -> None:
    omegaconf, transformers = pytest.importorskip("omegaconf"), pytest.importorskip("transformers")
    sft_dataset = verl_module("verl.utils.dataset.multiturn_sft_dataset")
    world = StoredRollouts(store, "ex-verl-sft")
    connect_with = [user("say rome")]
    world.call("r0", *chat(connect_with, "clock rome"))
    world.call(
        "r0",
        *chat([*connect_with, assistant("clock rome"), {"role": "tool", "content": "error", "tool_call_id": "c"}], "weather rome"),
        reward=1.0,
    )
    world.call("r1", *chat([user("say"), assistant("oslo"), user("say")], "lima"), reward=1.0)
    world.call("r2", *chat([user([{"type": "image_url", "image_url": {"url": "x"}}])], "lima"), reward=1.0)  # type: ignore[arg-type]
    two_tools = [TOOL, {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {}}}}}]
    world.call("r3", *chat([user("say")], "lima", tools=two_tools), reward=1.0)
    world.call("r4", *chat([user("say")], "paris", tools=[TOOL]), reward=1.0)
    world.commit()
    done = write(world, "verl-sft", tmp_path / "sft.parquet")
    assert dict(done.tally.left_out) == {"foreign_replies": 1, "not_text": 1, "tools_differ": 1}
    table = pq.read_table(tmp_path / "sft.parquet")
    assert table.column("tools").to_pylist() == [[], [TOOL]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    config = omegaconf.OmegaConf.create({"max_length": 64, "pad_mode": "no_padding"})
    read = sft_dataset.MultiTurnSFTDataset([str(tmp_path / "sft.parquet")], tokenizer, config)
    assert len(read) == 2
    row = read[0]
    trained = [
        word for word, kept in zip(tokenizer.convert_ids_to_tokens(row["input_ids"]), row["loss_mask"].tolist(), strict=True) if kept
    ]
    assert trained == ["clock", "rome", "<|im_end|>", "weather", "rome", "<|im_end|>"]
    assert tokenizer.decode(row["input_ids"]) == (
        "<|im_start|> user say rome <|im_end|> <|im_start|> assistant clock rome <|im_end|> <|im_start|> tool error <|im_end|> "
        "<|im_start|> assistant weather rome <|im_end|>"
    )


def test_export_json_lines_load_in_spangrad_dataset_classes(store: StoreSettings, tmp_path: Path, tiny_model: Path) -> None:
    omegaconf, transformers = pytest.importorskip("omegaconf"), pytest.importorskip("transformers")
    load = verl_module("verl.trainer.sft_trainer").create_sft_dataset
    world = StoredRollouts(store, "ex-verl-lines")
    world.call("r0", *chat([user("say"), assistant("oslo"), user("say")], "lima", tools=[TOOL]), ids=([3, 4], [5, 6]), reward=1.0)
    world.commit()
    write(world, "sft", tmp_path / "sft.jsonl")
    write(world, "sft-tokens", tmp_path / "tokens.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)

    def row(file: str, name: str, **config: Any) -> dict[str, Any]:
        path = verl_datasets_file()
        settings = omegaconf.OmegaConf.create({"custom_cls": {"path": path, "name": name}, "max_length": 32, **config})
        (example,) = list(load([str(tmp_path / file)], settings, tokenizer, None))
        return {key: value.tolist() for key, value in example.items()}

    texts = row("sft.jsonl", "Conversations", pad_mode="no_padding")
    words = tokenizer.convert_ids_to_tokens(texts["input_ids"])
    assert " ".join(words) == (
        "<|im_start|> user say <|im_end|> <|im_start|> assistant oslo <|im_end|> <|im_start|> user say <|im_end|> "
        "<|im_start|> assistant lima <|im_end|>"
    )
    assert [place for place, kept in enumerate(texts["loss_mask"]) if kept] == [14, 15]
    assert row("tokens.jsonl", "EngineTokens", pad_mode="no_padding") == {
        "input_ids": [3, 4, 5, 6],
        "loss_mask": [0, 0, 1, 1],
        "position_ids": [0, 1, 2, 3],
    }
    assert row("tokens.jsonl", "EngineTokens", max_length=6) == {
        "input_ids": [3, 4, 5, 6, 0, 0],
        "loss_mask": [0, 0, 1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 0],
        "attention_mask": [1, 1, 1, 1, 0, 0],
    }
    assert row("tokens.jsonl", "EngineTokens", pad_mode="no_padding", max_length=3, truncation="left")["input_ids"] == [4, 5, 6]


def verl_module(name: str) -> ModuleType:
    """A module of verl's, which is told first on which platform the other tests of this run train."""
    choose_platform()
    return import_module(name)


def verl_datasets_file() -> str:
    import transition_builder.export.writers

    return str(Path(transition_builder.export.writers.__file__).with_name("verl_datasets.py"))


def test_export_of_built_rollout_gives_its_calls(store: StoreSettings, tmp_path: Path) -> None:
    spans = SpanFactory(run="ex-built")
    root = spans.root(calls=2)
    spans.evaluation(root, 0.5)
    request, answer = chat([user("rome?")], "sunny")
    for place, span in enumerate([spans.call(root), spans.call(root, ErrorType="APIError", HttpStatus=500)]):
        row = next(row for row in spans.spans if row["SpanId"] == span)
        row["Attributes"] = {
            "spangrad.request.json": json.dumps(request),
            "spangrad.response.json": json.dumps(answer if not place else {}),
        }
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(
        urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", spans.otlp(), headers, method="POST"), timeout=30
    ).close()
    builder = BuilderSettings(dataset="ex-built", selection=Selection(agents=".*|ex-built"))
    build_once(Settings(store=store, builder=builder))
    done = export(connect(store), "sft", ExportSelection("ex-built", runs=("ex-built",)), tmp_path / "sft.jsonl")
    (row,) = lines(tmp_path / "sft.jsonl")
    assert (row["messages"], row["meta"]["return"]) == ([user("rome?"), {**assistant("sunny"), "weight": 1}], 0.5)
    assert (done.tally.calls, dict(done.tally.left_out)) == (2, {"dropped: call_failed": 1})


def spangrad(store: StoreSettings, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("SPANGRAD_")} | {"SPANGRAD_STORE__URL": store.url}
    return run_spangrad(*arguments, directory=directory, env=env)


def test_export_command_prints_written_and_left_out_counts(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-command")
    two_turns(world, "r0", 1.0)
    two_turns(world, "r1", -1.0)
    world.call("r1", dropped="call_failed")
    world.commit()
    done = spangrad(store, tmp_path, "export", "sft", "--dataset", "ex-command", "--out", "a/sft.jsonl", "--min-return", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rsplit(None, 1) for line in done.stdout.splitlines()[1:]] == [
        ["rows", "1"],
        ["trained messages", "2"],
        ["calls written", "2"],
        ["calls left out, below_return", "2"],
        ["calls left out, dropped: call_failed", "1"],
        ["calls in all", "5"],
        ["rollouts", "2"],
        ["ex-command@1 ->", "a/sft.jsonl"],
    ]
    assert len(lines(tmp_path / "a" / "sft.jsonl")) == 1


def test_export_command_default_dataset_is_that_of_training(store: StoreSettings, tmp_path: Path) -> None:
    builder = BuilderSettings(dataset="ex-default", selection=Selection(agents=".*|ex-default"))
    same = ["--set", "builder.dataset=ex-default", "--set", "builder.selection.agents=.*|ex-default", "--run", "ex-default"]
    world = StoredRollouts(store, "ex-default")
    later, world.spec = world.spec, builder.spec
    own = two_turns(world, "r0", 1.0)
    world.commit()
    world.spec = later
    backfilled = [world.call("r1", *chat([user("x")], "y"), reward=1.0)]
    world.commit()

    def calls(*options: str) -> list[str]:
        done = spangrad(store, tmp_path, "export", "parquet", "--out", "out.parquet", "--force", *same, *options)
        assert (done.returncode, done.stderr) == (0, "")
        return pq.read_table(tmp_path / "out.parquet").column("CallId").to_pylist()

    assert calls() == own
    assert calls("--set", "trainer.dataset=ex-default") == backfilled
    assert calls("--dataset", "ex-default") == backfilled
    done = spangrad(store, tmp_path, "export", "parquet", "--out", "none", *same, "--set", "builder.max_tokens=9")
    assert (done.returncode, done.stderr, (tmp_path / "none").exists()) == (
        1,
        f"spangrad: the store at {store.url} holds no revision of ex-default that was built with these settings. "
        "Name one with --dataset: ex-default@1, ex-default@2; or `spangrad build` with them first.\n",
        False,
    )


def test_export_command_that_wrote_nothing_warns(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-nothing")
    two_turns(world, "r0", 1.0)
    world.call("r1", dropped="call_failed")
    world.commit()
    world.spec = "otherspec-ex-nothing"
    world.commit()

    def warned(*options: str) -> tuple[int, str]:
        done = spangrad(store, tmp_path, "export", "sft", "--out", "sft.jsonl", "--force", *options)
        return done.returncode, done.stderr

    assert warned("--dataset", "ex-nothing", "--run", "ex-nothing") == (
        0,
        "nothing was written: ex-nothing@2 holds no call of the rollouts that were asked for. "
        "Rollouts of these runs by dataset: ex-nothing@1: 2.\n",
    )
    assert warned("--dataset", "ex-nothing@1", "--run", "elsewhere") == (
        0,
        "nothing was written: ex-nothing@1 holds no call of the rollouts that were asked for.\n",
    )
    assert warned("--dataset", "ex-nothing@1", "--min-return", "2") == (
        0,
        "nothing was written: every call was left out, as the table says.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["sft", "--dropped", "tired"], 2, "--dropped 'tired' is no reason of a drop."),
        (["sft", "--as-of", "noon"], 2, "--as-of 'noon' is no time."),
        (["sft", "--min-margin", "1"], 2, "--min-margin is of preferences, and sft compares no returns."),
        (["sft", "--dataset", "ex-nowhere"], 1, "has no dataset 'ex-nowhere'"),
        (["parquet", "--dropped", "no_token_ids"], 1, "parquet has no place for calls that were dropped."),
    ],
)
def test_export_command_user_errors_are_one_sentence(
    store: StoreSettings, tmp_path: Path, arguments: list[str], code: int, sentence: str
) -> None:
    done = spangrad(store, tmp_path, "export", *arguments, "--out", "x")
    assert (done.returncode, done.stderr.count("\n"), list(tmp_path.iterdir())) == (code, 1, [])
    assert sentence in done.stderr


def test_export_doc_examples_run(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-docs")
    two_turns(world, "r0", 1.0)
    two_turns(world, "r1", -1.0)
    then = world.commit()
    page = (Path(__file__).parents[2] / "docs" / "guides" / "exports.md").read_text()
    commands = re.findall(r"^spangrad (export .*)$", page, re.M)
    assert len(commands) > 6
    for command in commands:
        words = shlex.split(command.replace("default@2", "ex-docs@1").replace("2026-11-01", then.isoformat()), comments=True)
        if "--dataset" not in words:
            words += ["--dataset", "ex-docs"]
        done = spangrad(store, tmp_path, *words)
        assert (command, done.returncode, done.stderr) == (command, 0, "")
    assert {name for name in FORMATS if f"| `{name}` |" not in page} == set()
    reasons = {reason.value for reason in LeftOut} | {"no_usable_rollout"}
    assert {name for name in reasons if f"| `{name}` |" not in page} == set()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.S)
    work = f"import os\nos.chdir({str(tmp_path)!r})\n{snippet}"
    exec(compile(work, "docs/guides/exports.md", "exec"), {})


def test_export_existing_output_is_kept_unless_forced(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-force")
    two_turns(world, "r0", 1.0)
    world.commit()
    (tmp_path / "out.parquet").write_text("mine")
    with pytest.raises(BuilderError, match=r"out.parquet exists. Name another place with --out, or pass --force to replace it."):
        write(world, "parquet", tmp_path / "out.parquet")
    with pytest.raises(StoreError):
        write(world, "parquet", tmp_path / "out.parquet", dataset="ex-force@9", force=True)
    assert ((tmp_path / "out.parquet").read_text(), [path.name for path in tmp_path.iterdir()]) == ("mine", ["out.parquet"])
    write(world, "huggingface", tmp_path / "hf")
    (tmp_path / "hf" / "notes").touch()
    with pytest.raises(BuilderError, match=r"hf holds files that no export wrote\."):
        write(world, "huggingface", tmp_path / "hf", force=True)
    (tmp_path / "hf" / "notes").rename(tmp_path / "hf" / "data" / "old.parquet")
    write(world, "huggingface", tmp_path / "hf", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out.parquet"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["README.md", "data"]
    assert [path.name for path in (tmp_path / "hf" / "data").iterdir()] == ["train-00000.parquet"]


def test_export_with_missing_rows_raises(store: StoreSettings, tmp_path: Path) -> None:
    world = StoredRollouts(store, "ex-missing")
    two_turns(world, "r0", 1.0)
    world.builds["r0"]["Calls"] = 3
    world.commit()
    with pytest.raises(BuilderError, match="of 3 calls 2 were written and 0 left out: 1 are not accounted for"):
        write(world, "parquet", tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []
