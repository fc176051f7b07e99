"""Repositories to repair: one bug each that its tests find, nothing held out is shown, hidden tests know the same operations."""

from __future__ import annotations

import random
from dataclasses import replace

from examples.code_repair.model import SimulatedRepository, transcript
from examples.code_repair.repository import OPERATIONS, Repository, agrees
from examples.code_repair.task import WORDS, hidden_tests, is_held_out, prompt, questions, repository


def drawn(count: int, *, held_out: bool) -> list[Repository]:
    rng = random.Random(1)
    return [repository(rng, held_out=held_out) for _ in range(count)]


def test_repository_has_one_bug_that_its_tests_find() -> None:
    for drawn_repository in drawn(300, held_out=False):
        broken = drawn_repository.broken
        assert [function.name for function in drawn_repository.functions if not function.passes] == [broken.name]
        assert broken.module.splitlines()[broken.line - 1] == f"    return {broken.written.code}"
        assert all(agrees(replace(function, written=function.right), (1, 2, 3)) for function in drawn_repository.functions)
    kinds = {
        (drawn_repository.broken.written.operation == drawn_repository.broken.right.operation)
        for drawn_repository in drawn(50, held_out=False)
    }
    assert kinds == {True, False}


def test_questions_depend_on_seed_and_hold_comments_out() -> None:
    asked, again, other = questions(1, 200), questions(1, 200), questions(2, 200)
    assert asked == again
    assert asked.train != other.train
    assert asked.held_out == other.held_out
    for part, held_out in ((asked.train, False), (asked.held_out, True)):
        comments = [line.strip(" #") for one in part for text in one["files"].values() for line in text.splitlines() if "    #" in line]
        assert len(comments) == 3 * len(part)
        assert {is_held_out(comment) for comment in comments} == {held_out}


def test_transcripts_have_known_words_and_nothing_held_out() -> None:
    rng = random.Random(1)
    shown = [message["content"] for _ in range(300) for message in transcript(rng)]
    assert {word for text in shown for word in text.split()} <= {*WORDS}
    assert any("passed" in text for text in shown)
    listings = [text for text in shown if " # " in text]
    assert not [text for text in listings if is_held_out(text.partition(" # ")[2].rpartition(" return ")[0].rsplit(" ", 1)[0])]


def test_simulated_repository_passes_after_the_repair() -> None:
    for drawn_repository in drawn(50, held_out=True):
        simulated = SimulatedRepository(drawn_repository.functions)
        assert simulated.check() == f"fail {drawn_repository.broken.name}.py [exit code 1]"
        simulated.edit(drawn_repository.broken.name, drawn_repository.broken.right)
        assert simulated.check() == "passed"
        assert prompt(drawn_repository).split()[1:] == [f"{function.name}.py" for function in drawn_repository.functions]


def test_hidden_tests_equal_the_values_of_each_operations_code() -> None:
    for name, operation in OPERATIONS.items():
        cases, values = hidden_tests(random.Random(1), ["a", "b", "c"], name, ["c", "a"])
        assert [1, 1, 1] in cases
        assert values == [eval(operation.code.format(c, a)) for a, _, c in cases]
