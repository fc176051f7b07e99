"""Tasks from files, rows and datasets: each row one task, or an error that names source, row and remedy."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.client.task_files import read_tasks, tasks_of
from spangrad.errors import AgentError
from spangrad.types import PromptVersion, SandboxRung, Task

ROWS: list[dict[str, Any]] = [
    {"task_id": "a", "input": {"text": "one", "answer": [1, 2]}},
    {"task_id": "b", "input": {"text": "", "answer": []}},
]
TASKS = [Task(row["task_id"], row["input"]) for row in ROWS]
QUESTIONS = [{"question": "1 + 1", "answer": 2}, {"question": "2 + 2", "answer": 4}]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_read_tasks_same_rows_of_any_source_give_same_tasks(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "rows.jsonl").write_text(lines(ROWS) + "\n")
    pl.DataFrame(ROWS).write_parquet(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
    several = {"train": datasets.Dataset.from_list(QUESTIONS), "test": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(several).save_to_disk(tmp_path / "several")
    assert {source: read_tasks(tmp_path / source) for source in ("rows.jsonl", "rows.parquet", "rows", "several:test")} == dict.fromkeys(
        ("rows.jsonl", "rows.parquet", "rows", "several:test"), TASKS
    )
    assert read_tasks(tmp_path / "several") == [Task(f"several:{n}", row) for n, row in enumerate(QUESTIONS, 1)]
    for source, message in [
        ("several:dev", "several:dev: there is no split 'dev', only train, test. Name one: {0}/several:SPLIT."),
        ("rows:train", "rows:train: the dataset has no splits. Leave ':train' out."),
    ]:
        with pytest.raises(AgentError, match=re.escape(message.format(tmp_path))):
            read_tasks(tmp_path / source)


def test_read_tasks_demanded_sandbox_is_the_tasks() -> None:
    row = {"task_id": "a", "input": {"least_sandbox": "none"}, "least_sandbox": "bubblewrap"}
    assert tasks_of([row, {"least_sandbox": "none"}], "train") == [
        Task("a", {"least_sandbox": "none"}, least_sandbox=SandboxRung.BUBBLEWRAP),
        Task("train:2", {"least_sandbox": "none"}),
    ]


def test_read_tasks_rows_without_task_fields_are_inputs(tmp_path: Path) -> None:
    expected = [Task(f"train:{n}", row) for n, row in enumerate(QUESTIONS, 1)]
    (tmp_path / "train.jsonl").write_text(lines(QUESTIONS))
    pl.DataFrame(QUESTIONS).write_parquet(tmp_path / "train.parquet")
    assert read_tasks(tmp_path / "train.jsonl") == read_tasks(tmp_path / "train.parquet") == tasks_of(QUESTIONS, "train") == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"task_id": 1, "input": 2}\n{"task_id": \n', ", line 2 is no JSON (Expecting value, column 13): each line is"),
        ("t.jsonl", "[" * 200_000, ", line 1 is no JSON (maximum recursion depth exceeded"),
        ("t.jsonl", "9" * 5000, ", line 1 is no JSON (Exceeds the limit (4300 digits)"),
        ("t.jsonl", '{"seen": NaN, "task_id": 1, "input": Infinity}\n', ", line 1: 'input' is inf, which JSON has no value for."),
        ("t.jsonl", "\n[1]\n", ", line 2 is list, not an object: each line is"),
        ("t.jsonl", '{"task_id": "a"}\n', ", line 1 has 'task_id' and no 'input': give both; or neither, and the whole row is the input."),
        ("t.jsonl", '{"input": 1, "x": 2}\n', ", line 1 has 'input' and no 'task_id': give both"),
        ("t.jsonl", '{"task_id": null, "input": 1}\n', ", line 1 has task_id None: give a text that is not empty, or a whole number."),
        (
            "t.jsonl",
            '{"q": 1, "x": NaN}\n',
            ", line 1: 'x' is nan, which JSON has no value for. Make it text or finite numbers, with texts as keys",
        ),
        ("t.jsonl", '{"q": "half \\ud83d"}\n', ", line 1: 'q' is 'half \\ud83d', which JSON has no value for."),
        ("t.jsonl", '{"half \\ud83d": 1}\n', ", line 1: 'half \\ud83d' is 1, which JSON has no value for."),
        ("t.jsonl", '{"task_id": "\\ud83d", "input": 1}\n', ", line 1 has task_id '\\ud83d': leave out null characters and halves of"),
        ("t.jsonl", '{"task_id": "a\\u0000", "input": 1}\n', ", line 1 has task_id 'a\\x00': leave out null characters"),
        (
            "t.jsonl",
            '{"task_id": 1, "input": 1, "least_sandbox": "jail"}\n',
            ", line 1 has least_sandbox 'jail': give one of none, remote, landlock, bubblewrap, or leave it out.",
        ),
        ("t.jsonl", "\n\n", " holds no task. Give JSON lines"),
        ("t.parquet", "PAR", " cannot be read as Parquet"),
    ],
)
def test_read_tasks_invalid_row_raises_with_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(AgentError, match=re.escape(f"{tmp_path / name}{message}")):
        read_tasks(tmp_path / name)


def test_read_tasks_unusable_source_raises(tmp_path: Path) -> None:
    pl.DataFrame([{"q": "x", "day": date(2026, 1, 1)}]).write_parquet(tmp_path / "days.parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"q": "\xe9"}')
    (tmp_path / "empty").mkdir()
    for source, message in [
        ("days.parquet", ", row 1: 'day' is datetime.date(2026, 1, 1), which JSON has no value for."),
        ("latin.jsonl", " is no text in UTF-8 (invalid continuation byte at byte 7)."),
        ("nothing.jsonl", " is neither a file nor a directory. Give JSON lines"),
        ("empty", " cannot be read as a dataset (FileNotFoundError"),
    ]:
        with pytest.raises(AgentError, match=re.escape(f"{tmp_path / source}{message}")):
            read_tasks(tmp_path / source)


def test_read_tasks_source_with_too_long_name_raises() -> None:
    with pytest.raises(AgentError, match=r'^\{"task_id": .{88}\S? cannot be read \(File name too long\)\. Give JSON lines'):
        read_tasks(json.dumps({"task_id": "a", "input": "b" * 300}))


@pytest.mark.parametrize("value", [date(2026, 1, 1), float("nan"), {1: 2, "a": 3}])
def test_tasks_of_input_without_json_value_raises(value: object) -> None:
    for row in (Task("a", {"q": value}), {"task_id": "a", "input": {"q": value}}, {"q": value}):
        with pytest.raises(AgentError, match=r"^train, row 2: '(input|q)' is .*, which JSON has no value for\."):
            tasks_of([TASKS[0], row], "train")


def test_tasks_of_returns_valid_tasks_unchanged() -> None:
    task = Task("a", [1], PromptVersion("p", 3), SandboxRung.LANDLOCK, "sums")
    assert tasks_of([task], "train") == [task]
    with pytest.raises(AgentError, match="row 1 has task_id ''"):
        tasks_of([Task("", 1)], "train")


def test_read_tasks_hub_dataset_is_loaded_by_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        if name == "mine/away":
            raise ConnectionError("no network\nand more")
        return datasets.Dataset.from_list(QUESTIONS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_tasks("hf:mine/sums:dev") == [Task(f"sums:{n}", row) for n, row in enumerate(QUESTIONS, 1)]
    with pytest.raises(
        AgentError, match=re.escape("hf:mine/away cannot be loaded, split 'train' (ConnectionError: no network). Check name")
    ):
        read_tasks("hf:mine/away")
    assert read_tasks("hf:mine/sums:hard:dev")[0].task_id == "sums:1"
    assert asked == [("mine/sums", None, "dev"), ("mine/away", None, "train"), ("mine/sums", "hard", "dev")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1)


@given(st.lists(st.tuples(NAMES, JSON), min_size=1, max_size=5))
def test_read_tasks_any_json_round_trips(rows: list[tuple[str, Any]]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8", errors="surrogatepass") as file:
        file.write(lines([{"task_id": name, "input": value} for name, value in rows]))
        file.flush()
        assert read_tasks(file.name) == [Task(name, value) for name, value in rows]
