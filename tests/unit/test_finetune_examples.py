"""Rows of files as token sequences: whose ids, where the loss is, and what is left out for which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import TrainerError
from spangrad.settings import FinetuneSettings
from tests.support.trainers import meta, tokens, write_policy, write_rows
from trainer.sft.examples import Examples, LengthLimits, Method, batches, digest_of, read_examples
from trainer.sft.files import find_sources
from trainer.sft.rendering import Renderer, UnfitRowError

ASKED = [1, 4, 7, 11, 2, 1, 5]
"""`say paris` by the user, and the template's generation prompt."""
USER = {"role": "user", "content": "say paris"}
RIGHT, WRONG = ({"role": "assistant", "content": f"{tool} paris"} for tool in ("weather", "clock"))
NONE = FinetuneSettings(held_out=0.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "model")


def read(policy: Path, file: Path, method: Method = "sft", settings: FinetuneSettings = NONE, **options: Any) -> Examples:
    limits = LengthLimits.of(policy, "tok", settings, options.pop("device", 1000))
    return read_examples(find_sources([file]), method, Renderer(policy), limits, settings, **options)


def trained(examples: Examples) -> list[list[tuple[list[int], list[int]]]]:
    return [[(one.ids, one.mask) for one in example.sequences] for example in examples.trained]


def test_read_examples_each_form_of_sft_row_gives_token_sequences(policy: Path, tmp_path: Path):
    rows = [
        {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]},
        {"PromptIds": [3, 4], "ResponseIds": [5, 6]},
        {"PromptIds": [3, 4], "ResponseIds": [5, 6], "TokenizerHash": ""},
        {"messages": [USER, RIGHT]},
        {"messages": [USER, {**WRONG, "weight": 0}, {"role": "tool", "content": "error"}, {**RIGHT, "weight": 1}, USER]},
        {"messages": [USER, WRONG, {"role": "tool", "content": [{"type": "text", "text": "error"}]}, RIGHT], "score": 1},
        {"prompt": "say paris", "completion": "weather paris"},
        {"prompt": [USER], "completion": [RIGHT]},
        {"messages": [WRONG, USER, RIGHT]},
    ]
    examples = read(policy, write_rows(tmp_path / "rows.jsonl", rows))
    again = [1, 6, 8, 2, 1, 5]
    assert trained(examples) == [
        [([3, 4, 5], [0, 1, 1])],
        [([3, 4, 5, 6], [0, 0, 1, 1])],
        [([3, 4, 5, 6], [0, 0, 1, 1])],
        [([*ASKED, 9, 11, 2], [0] * 7 + [1] * 3)],
        [([*ASKED, 10, 11, 2, *again, 9, 11, 2], [0] * 16 + [1] * 3)],
        [([*ASKED, 10, 11, 2, *again, 9, 11, 2], [0] * 7 + [1] * 3 + [0] * 6 + [1] * 3)],
        [([7, 11, 9, 11, 2], [0, 0, 1, 1, 1])],
        [([*ASKED, 9, 11, 2], [0] * 7 + [1] * 3)],
        [([1, 5, 10, 11, 2, *ASKED, 9, 11, 2], [0] * 12 + [1] * 3)],  # a greeting is no reply
    ]
    assert (examples.rows, examples.with_ids, examples.rendered, dict(examples.left_out), examples.unread) == (9, 3, 6, {}, {"score"})


def test_read_examples_arguments_nested_too_deep_stay_text(policy: Path, tmp_path: Path):
    called = {**RIGHT, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}]}
    examples = read(policy, write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, called]}]))
    assert trained(examples) == [[([*ASKED, 9, 11, 2], [0] * 7 + [1] * 3)]]


def test_read_examples_each_form_of_dpo_pair_gives_token_sequences(policy: Path, tmp_path: Path):
    ids = {"prompt_ids": [3, 4], "chosen_ids": [5, 6], "chosen_mask": [1, 1], "rejected_ids": [7], "rejected_mask": [1]}
    texts = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
    rows = [
        {**texts, **ids},
        texts,
        {"prompt": "say paris", "chosen": "weather", "rejected": "clock"},
        {"input": {"messages": [USER]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {**texts, **ids, "meta": {side: meta(side, tokenizers=["another"])["meta"] for side in ("chosen", "rejected")}},
        {**texts, "prompt_ids": ids["prompt_ids"]},
    ]
    examples = read(policy, write_rows(tmp_path / "pairs.jsonl", rows), "dpo")
    rendered = [([*ASKED, 9, 11, 2], [0] * 7 + [1] * 3), ([*ASKED, 10, 11, 2], [0] * 7 + [1] * 3)]
    assert trained(examples) == [
        [([3, 4, 5, 6], [0, 0, 1, 1]), ([3, 4, 7], [0, 0, 1])],
        rendered,
        [([7, 11, 9, 2], [0, 0, 1, 1]), ([7, 11, 10, 2], [0, 0, 1, 1])],
        rendered,
        rendered,
        rendered,  # ids of another tokenizer are no ids of this policy
        rendered,  # a prompt's ids are no pair's
    ]
    assert (examples.with_ids, examples.rendered, dict(examples.left_out)) == (1, 6, {})
    assert [one.rollout_id for one in examples.trained[5].origins] == ["chosen", "rejected"]


def test_read_examples_untrainable_rows_are_counted_by_reason(policy: Path, tmp_path: Path):
    good = tokens(3, 4)
    bad = {
        "no_reply": [
            {"messages": [USER]},
            {"messages": [USER, {**RIGHT, "weight": 0}]},
            {"input_ids": [3, 4], "loss_mask": [1, 0]},
            {"input_ids": [], "loss_mask": []},
            {"prompt": "say", "completion": ""},
        ],
        "too_long": [tokens(*[3] * 25)],
        "unknown_token": [tokens(3, 15), tokens(-1, 3), *({"input_ids": [3, odd], "loss_mask": [0, 1]} for odd in ("4", 4.0, [4], True))],
        "unknown_columns": [{"text": "weather"}, {"input_ids": [3, 4]}, {"prompt": "say", "chosen": "a", "rejected": "b"}],
        "unknown_messages": [
            {"messages": ["say paris"]},
            {"messages": [{"from": "human", "value": "say"}]},
            {"messages": [USER, {**RIGHT, "tool_calls": 3}]},
        ],
        "unknown_tools": [
            {"messages": [USER, RIGHT], "tools": tools} for tools in (["search"], "search", '"search"', {"name": "search"}, 3)
        ],
        "unknown_origin": [
            {**good, "meta": {"rollout": "x", "attempt": attempt}} for attempt in ("first", [1], {"number": 1}, float("inf"))
        ]
        + [{**good, "meta": {"rollout": "\ud800"}}, {**good, "RolloutId": "x", "Revision": "last"}],
        "mask_of_other_length": [{"input_ids": [3, 4, 5], "loss_mask": [0, 1]}],
        "mask_not_0_or_1": [{"input_ids": [3, 4], "loss_mask": [0, odd]} for odd in (0.5, [1], "1")],
        "not_text": [
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, RIGHT]},
            {"messages": [{"role": "user", "content": "say \ud800"}, RIGHT]},
            {"messages": [USER, {"role": "assistant", "content": "\udc00 paris"}]},
            {"prompt": "say \ud800", "completion": "weather"},
            {"prompt": "say", "completion": "\ud800"},
        ],
        "mode_not_trained": [{**good, **meta("r", mode=mode)} for mode in ("greedy", "trial")],
        "other_tokenizer": [{**good, **meta("r", tokenizers=names)} for names in (["another"], ["tok", "another"], "another", 3)],
    }
    examples = read(policy, write_rows(tmp_path / "rows.jsonl", [good, *(row for rows in bad.values() for row in rows)]))
    assert dict(examples.left_out) == {reason: len(rows) for reason, rows in bad.items()}
    assert (len(examples.trained), examples.rows) == (1, 1 + sum(map(len, bad.values())))
    assert examples.unread == {"text"}


def test_read_examples_invalid_pairs_are_left_out(policy: Path, tmp_path: Path):
    row = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
    rows = [
        row,
        {**row, "rejected": [RIGHT]},
        {**row, "rejected": []},
        {**row, "rejected": "clock"},
        {"messages": [USER, RIGHT]},
        {"prompt_ids": [3], "chosen_ids": [4], "rejected_ids": [5]},
        {"prompt_ids": [3], "chosen_ids": [4] * 13, "chosen_mask": [1] * 13, "rejected_ids": [5] * 13, "rejected_mask": [1] * 13},
    ]
    examples = read(policy, write_rows(tmp_path / "pairs.jsonl", rows), "dpo", device=27)
    assert dict(examples.left_out) == {"chosen_is_rejected": 1, "no_reply": 1, "unknown_columns": 3, "too_long": 1}
    assert len(examples.trained) == 1


def test_read_examples_invalid_files_raise(policy: Path, tmp_path: Path):
    empty, broken, deep = (tmp_path / f"{name}.jsonl" for name in ("empty", "broken", "deep"))
    good = write_rows(tmp_path / "good.jsonl", [tokens(3, 4)])
    empty.touch()
    broken.write_text(json.dumps(tokens(3, 4)) + '\n{"input_ids": [3,\n')
    deep.write_text('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}")
    faults = {
        r"there is no file .*missing\.jsonl": [tmp_path / "missing.jsonl"],
        r"empty\.jsonl is empty. Write it again": [empty],
        r"broken\.jsonl, line 2, is no JSON .*Fix the file": [broken],
        r"deep\.jsonl, line 1, is no JSON \(maximum recursion depth exceeded": [deep],
        r"line 1, is no JSON object": [write_rows(tmp_path / "list.jsonl", [[1, 2]])],
        r"copy\.jsonl holds the same as .*good\.jsonl": [good, write_rows(tmp_path / "copy.jsonl", [tokens(3, 4)])],
        r"holds no file named": [policy.parent],
        r"of 2 rows 1 no_reply, 1 unknown_columns\. sft reads these columns: input_ids and loss_mask": [
            write_rows(tmp_path / "bad.jsonl", [{"text": "x"}, {"messages": [USER]}])
        ],
    }
    for message, files in faults.items():
        with pytest.raises(TrainerError, match=message):
            read_examples(find_sources(files), "sft", Renderer(policy), LengthLimits(15, 24, 100, "tok"), NONE)
    damaged = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"input_ids": [[3, 4]], "loss_mask": [[0, 1]]}), damaged)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(TrainerError, match=r"damaged\.parquet is damaged after row 0"):
        read(policy, damaged)
    pq.write_table(pa.table({"prompt": ["say"], "completion": ["weather"]}), damaged, compression="none", use_dictionary=False)
    damaged.write_bytes(damaged.read_bytes().replace(b"weather", b"\xffeather"))
    with pytest.raises(TrainerError, match=r"damaged\.parquet is damaged after row 0 .*'utf-8' codec"):
        read(policy, damaged)


def test_read_examples_parquet_and_directories_equal_json_lines(policy: Path, tmp_path: Path):
    rows = [{"messages": [USER, RIGHT], **meta("r1")}, {"messages": [USER, {"role": "assistant", "content": None}, RIGHT], **meta("r2")}]
    shards = tmp_path / "hub" / "train.parquet"  # a directory, as Spark writes it
    shards.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), shards / "part-0.parquet")
    examples, lines = read(policy, tmp_path / "hub"), read(policy, write_rows(tmp_path / "rows.jsonl", rows))
    assert trained(examples) == trained(lines)
    assert [one.origins for one in examples.trained] == [one.origins for one in lines.trained]
    assert digest_of(examples.trained) == digest_of(lines.trained) != digest_of(examples.trained[:1])


def test_read_examples_template_that_rewrites_history_gives_sequence_per_reply(policy: Path, tmp_path: Path):
    model = write_policy(tmp_path / "model")
    forgets = (
        "{% for m in messages %}<|im_start|> {{ m.role }} "
        "{{ 'error' if m.role == 'assistant' and not loop.last else m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
    )
    (model / "chat_template.jinja").write_text(forgets)
    examples = read(model, write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, WRONG, USER, RIGHT]}]))
    assert trained(examples) == [
        [([*ASKED, 10, 11, 2], [0] * 7 + [1] * 3)],
        [([*ASKED, 8, 2, *ASKED, 9, 11, 2], [0] * 16 + [1] * 3)],
    ]
    pair = {"prompt": [USER], "chosen": [WRONG, USER, RIGHT], "rejected": [RIGHT]}
    with pytest.raises(TrainerError, match="1 reply_not_in_one_sequence"):
        read(model, write_rows(tmp_path / "pairs.jsonl", [pair]), "dpo")


def test_read_examples_tools_as_text_of_json_equal_list(tmp_path: Path):
    model = write_policy(tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    offered = [{"type": "function", "function": {"name": "clock"}}]
    rows = [{"messages": [USER, RIGHT], "tools": tools} for tools in (offered, json.dumps(offered), None, "[]", "")]
    without = [([4, 7, 11, 5, 9, 11], [0] * 4 + [1] * 2)]
    with_tools = [([10, *ids], [0, *mask]) for ids, mask in without]
    assert trained(read(model, write_rows(tmp_path / "rows.jsonl", rows))) == [with_tools] * 2 + [without] * 3


def test_read_examples_row_too_deep_for_template_is_left_out(tmp_path: Path):
    model = write_policy(tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% macro schema(it) %}{% if it.each %}{{ schema(it.each) }}{% endif %}{% endmacro %}"
        "{% for tool in tools or [] %}{{ schema(tool) }}{% endfor %}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"each": deep}
    rows = [{"messages": [USER, RIGHT], "tools": [tool]} for tool in (deep, {"each": {}})]
    examples = read(model, write_rows(tmp_path / "rows.jsonl", rows))
    assert (len(examples.trained), examples.left_out) == (1, {"nested_too_deep": 1})


def test_read_examples_unusable_chat_template_raises_or_leaves_out(policy: Path, tmp_path: Path):
    for name, template, reason in (
        ("refuses", "{{ raise_exception('no tools here') }}", "1 refused_by_chat_template"),
        (
            "other",
            "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
            "1 reply_not_after",
        ),
    ):
        model = write_policy(tmp_path / name)
        (model / "chat_template.jinja").write_text(template)
        with pytest.raises(TrainerError, match=reason):
            read(model, write_rows(tmp_path / f"{name}.jsonl", [{"messages": [USER, RIGHT]}]))
    model = write_policy(tmp_path / "none")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(TrainerError, match=r"has no chat template, and the rows hold messages"):
        read(model, write_rows(tmp_path / "none.jsonl", [{"messages": [USER, RIGHT]}]))


def test_renderer_tool_calls_reach_template_as_in_vllm(tmp_path: Path):
    model = write_policy(tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments.city }}"
        "{% endfor %} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
    sequences = Renderer(model).conversation([USER, {"role": "assistant", "content": None, "tool_calls": [call]}], [False, True], None)
    assert [(one.ids, one.mask) for one in sequences] == [([4, 7, 11, 5, 9, 12], [0, 0, 0, 0, 1, 1])]
    with pytest.raises(UnfitRowError, match="not_text"):
        Renderer(model).conversation([{"role": "user", "content": 3}], [True], None)


def test_read_examples_rollout_without_group_is_held_out_as_a_whole(policy: Path, tmp_path: Path):
    rows = [tokens(3 + turn, 4, **meta(f"r{number}", "")) for number in range(4) for turn in range(5)]
    rows += [tokens(3, 4, RunId="run", RolloutId=f"r{number}") for number in range(4)]
    examples = read(policy, write_rows(tmp_path / "rows.jsonl", rows), settings=FinetuneSettings(held_out=0.5))
    rollouts = [{origin.rollout_id for example in side for origin in example.origins} for side in (examples.trained, examples.held_out)]
    assert (list(map(len, rollouts)), rollouts[0] & rollouts[1]) == ([2, 2], set())
    assert (len(examples.trained), len(examples.held_out)) == (12, 12)


@given(
    groups=st.lists(st.integers(0, 8), min_size=2, max_size=30),
    modes=st.lists(st.sampled_from(["train", "validate", "production", "probe"]), min_size=30, max_size=30),
    share=st.sampled_from([0.0, 0.3, 0.5]),
)
def test_read_examples_every_row_is_trained_held_out_or_left_out(
    groups: list[int], modes: list[str], share: float, policy: Path, tmp_path_factory: pytest.TempPathFactory
):
    rows = [tokens(3 + at % 12, 4, **meta(f"r{at}", f"g{group}", mode=modes[at])) for at, group in enumerate(groups)]
    file = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", [*rows, tokens(99, 3)])
    settings = FinetuneSettings(held_out=share)
    try:
        examples = read(policy, file, settings=settings)
    except TrainerError:
        assert all(mode in {"validate", "probe"} for mode in modes[: len(groups)]) or share
        return
    assert len(examples.trained) + len(examples.held_out) + examples.left_out.total() == examples.rows == len(rows) + 1
    assert not {example.unit for example in examples.trained} & {
        example.unit for example in examples.held_out if example.origins[0].group.mode in {"train", "production"}
    }
    assert not [example for example in examples.trained if example.origins[0].group.mode in {"validate", "probe"}]
    assert digest_of(examples.trained) == digest_of(read(policy, file, settings=settings).trained), "the same files give the same examples"


@given(count=st.integers(1, 40), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_batches_epoch_contains_every_example_once(count: int, size: int, epochs: int):
    examples = read_nothing(count)
    steps = batches(examples, FinetuneSettings(epochs=epochs, batch_size=size))
    length = -(-count // size)
    assert len(steps) == epochs * length
    for epoch in range(epochs):
        part = steps[epoch * length : (epoch + 1) * length]
        assert sorted(at for step in part for at in step) == list(range(count))
    assert steps == batches(examples, FinetuneSettings(epochs=epochs, batch_size=size))


def read_nothing(count: int) -> list[Any]:
    return [None] * count
