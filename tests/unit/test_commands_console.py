"""Console output of texts that users, agents and models wrote: rich prints them unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commands
from commands import console
from commands.prompts import prompt
from commands.training import run, train_plan
from prompts.compare import Gain
from prompts.search import Candidate, Question, SearchResult
from runner.runner import Outcome
from spangrad.agent.prompt_store import Edit, PromptText
from spangrad.errors import PromptError, SettingsError
from spangrad.settings import Settings
from spangrad.types import AttemptFailure, Mode, RolloutKey, Task
from trainer.data.plan import GroupOutcome, PlannedGroup, TrainPlan

ODD = "[INST] :key: [bold]be[/bold] list[int] [/INST]"
"""Markup, the name of an emoji, and a tag that closes nothing."""
START = PromptText("greeting", 1, ODD, "c", 0.0, True)
QUESTION = Question("s", START, (Task("a", 1),), (Task("b", 1),))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the console's width to 200 columns, independent of the terminal."""
    build_console = console.plain_console
    monkeypatch.setattr(console, "plain_console", lambda *given, **more: build_console(*given, **{**more, "width": 200}))


def search_result(gain: float = 0.8) -> SearchResult:
    """A search that has found a better version."""
    first = Candidate(1, ODD, 0.1, {"b": 0.1}, 0, None)
    edit = Edit("s", 1, 1, 0, ODD, 2)
    second = Candidate(2, f"{ODD} kindly", 0.1 + gain, {"b": 0.1 + gain}, 0, edit)
    return SearchResult(QUESTION, (first, second), ((first,), (second,)), Gain(gain, 0.01))


def test_console_is_made_in_one_module() -> None:
    makes = re.compile(r"Console\(|\b(Progress|Bars|Live)\(\)")
    files = Path(commands.__file__).parent.rglob("*.py")
    assert [file.name for file in files if makes.search(file.read_text())] == ["console.py"]


def test_run_and_train_plan_print_names_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    run._show([Outcome(RolloutKey("run", "r0", 0), ODD, Mode.TRAIN, None, AttemptFailure.EXIT_CODE, ODD, 0.0, None)])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{ODD}  1 ")
    groups = (PlannedGroup("train", ODD, 1, 2, GroupOutcome.WAITING),)
    train_plan.show(TrainPlan(ODD, "main", ODD, "spec", 1, 1, 1, groups, 0, (), best=ODD))
    first, _, row, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{ODD}/main, run {ODD}, from version 1 ({ODD})"
    assert ODD in row


class CountedReads(list[Outcome]):
    """Outcomes, with the number of times that all of them are read."""

    reads = 0

    def __iter__(self) -> Iterator[Outcome]:
        self.reads += 1
        return super().__iter__()


def test_run_table_reads_outcomes_as_often_for_many_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    def reads(tasks: int) -> int:
        keys = [(RolloutKey("run", f"r{number}", 0), f"task {number % tasks}") for number in range(100)]
        outcomes = CountedReads(Outcome(key, task, Mode.TRAIN, {"reward": 1.0}, None, "", 0.0, 2) for key, task in keys)
        run._show(outcomes)
        return outcomes.reads

    assert reads(1) == reads(50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["task", "0", "100", "+1.000", "0", "200"]
    assert lines[-1].split() == ["task", "49", "2", "+1.000", "0", "4"]


class CountedName(str):
    """Id of a task, with the number of comparisons with others."""

    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        type(self).comparisons += 1
        return str.__eq__(self, other)


def test_prompt_tasks_are_compared_in_linear_time() -> None:
    tasks = [Task(CountedName(number), number) for number in range(500)]
    learn, held_out = prompt._split(tasks[:300], tasks[300:], Settings())
    assert (len(learn), len(held_out)) == (300, 200)
    assert CountedName.comparisons < 2 * len(tasks)
    with pytest.raises(PromptError, match="task 7 is there twice"):
        prompt._split(tasks[:300], [*tasks[300:], Task("7", 7)], Settings())


def test_prompt_show_prints_text_without_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(
        edits=lambda name: [search_result().best.edit], versions=lambda name: [START, PromptText("greeting", 2, "b", "d", 0.0, False)]
    )
    monkeypatch.setattr(prompt, "_store", lambda *_: store)
    prompt._show("greeting", history=True)
    assert ODD in capsys.readouterr().out.splitlines()[-1]


def test_prompt_show_refuses_history_of_one_version() -> None:
    with pytest.raises(PromptError, match=r"^--history shows all versions, and --version one: leave one of them out\.$"):
        prompt._show("greeting", version=9, history=True)


def test_prompt_search_refuses_default_directory_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").touch()
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "input": 1}\n{"task_id": "b", "input": 2}\n')
    monkeypatch.setattr(prompt, "_store", lambda settings: SimpleNamespace(get=lambda name: START))
    monkeypatch.setattr(prompt, "_search", lambda *_: pytest.fail("the search has begun"))
    with pytest.raises(SettingsError, match=r"^--out: data/prompts/greeting-\w+/result\.json cannot be written"):
        prompt._optimise("greeting", "true", tasks=Path("tasks.jsonl"), set_=["queue.url=http://127.0.0.1:9"])


def test_prompt_search_publishes_better_prompt_before_it_prints_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[tuple[Any, ...]] = []
    put_now = SimpleNamespace(put=lambda *given: put.append((*given, capsys.readouterr().out)))
    monkeypatch.setattr(prompt, "_store", lambda *_: put_now)
    prompt._finish(Settings(), search_result(), tmp_path, publish=True)
    assert put == [("greeting", f"{ODD} kindly", "")]
    rows = [line.rstrip().split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()[:3]]
    assert rows == ["begins", f"{ODD} kindly", ODD]
