"""A search over scripted parts: what it asks, what it reads back after it was killed, what it refuses."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.exchanges import Exchange, read_exchange
from prompts.prompt_texts import Messages, ask_for_critique, choose, read_edit, shown
from prompts.search import Question, Search, SearchResult, search_id
from prompts.trials import Trial, Trials
from spangrad import semconv
from spangrad.agent.prompt_store import Edit, PromptStore, PromptText
from spangrad.errors import PromptError
from spangrad.settings import PromptSettings, Settings
from spangrad.types import Task

START = PromptText("p", 1, "0", "c", 0.0, True)
QUESTION = Question("s", START, tuple(Task(f"learn {i}", i) for i in range(4)), tuple(Task(f"held {i}", i) for i in range(3)))


class Killed(Exception):  # noqa: N818  # it is what happens, not an error
    """The search's process has died."""


@dataclass
class World(PromptStore):
    """Everything that outlives a search: prompts, edits, trials; it dies at the `dies_at`-th thing that is done."""

    texts: dict[int, str] = field(default_factory=lambda: {1: "0"})
    recorded: list[Edit] = field(default_factory=list[Edit])
    trials: list[Trial] = field(default_factory=list[Trial])
    dies_at: int = -1
    done: int = 0
    answers: Counter[str] = field(default_factory=Counter[str])
    failing: frozenset[str] = frozenset()
    seed: int = 0

    def alive(self) -> None:
        self.done += 1
        if self.done == self.dies_at:
            raise Killed

    def get(self, name: str, version: int | None = None) -> PromptText:
        return replace(START, version=version or 1, text=self.texts[version or 1])

    def edits(self, name: str, search: str | None = None) -> list[Edit]:
        return list(self.recorded)

    def edit(self, name: str, text: str | None, edit: Edit) -> int | None:
        self.alive()
        place = (edit.round, edit.parent, edit.number)
        assert place not in {(earlier.round, earlier.parent, earlier.number) for earlier in self.recorded}, "an edit was made twice"
        version = None
        if text is not None:
            version = next((number for number, known in self.texts.items() if known == text), len(self.texts) + 1)
            self.texts[version] = text
        self.recorded.append(replace(edit, version=version))
        return version

    def read(self, ids: Sequence[str] | None = None) -> list[Trial]:
        return [trial for trial in self.trials if ids is None or trial.rollout_id in ids]

    def with_exchanges(self, trials: Sequence[Trial]) -> list[Trial]:
        return [replace(trial, exchanges=(Exchange((("user", trial.input),), "said"),)) for trial in trials]

    async def run(self, tasks: Sequence[Task]) -> list[str]:
        """A prompt is worth the number that it is, in tenths."""
        ids: list[str] = []
        for task in tasks:
            self.alive()
            assert task.prompt is not None
            ids.append(f"r{len(self.trials)}")
            failed = task.task_id in self.failing
            score = None if failed else int(self.texts[task.prompt.version]) / 10
            self.trials.append(
                Trial(ids[-1], 0, task.prompt.version, task.task_id, score, "exception" if failed else "", "bad day" if failed else "")
            )
        return ids

    async def complete(self, messages: Messages) -> str:
        """Edits a number upwards or downwards, and sometimes gives none."""
        self.alive()
        if "Find out" in messages[0]["content"]:
            return "larger"
        self.answers[messages[1]["content"]] += 1
        parent = int(messages[1]["content"].split("\n")[1])
        number = self.answers[messages[1]["content"]]
        chosen = random.Random(f"{self.seed} {parent} {number}").choice([parent + 1, parent - 1, parent + 2, None])
        return "nothing" if chosen is None else f"<prompt>{chosen}</prompt>"


def search(world: World, **changes: object) -> SearchResult:
    chosen = PromptSettings.model_validate({"rounds": 3, "branch": 2, "minibatch": 3, "shown": 2, **changes})
    trials: Any = world
    return asyncio.run(Search(QUESTION, chosen, world, trials, world.run, world.complete).go())


def test_search_killed_at_any_step_resumes_and_repeats_nothing() -> None:
    for dies_at in range(1, 200):
        world = World(dies_at=dies_at)
        try:
            search(world, rounds=2, minibatch=1)
        except Killed:
            result = search(world, rounds=2, minibatch=1)
        else:
            break
        tries = Counter((trial.version, trial.task_id) for trial in world.trials)
        assert set(tries.values()) == {1}
        assert {version for version, _ in tries} == {candidate.version for candidate in result.candidates}
        scores = {candidate.version: candidate.score for candidate in result.candidates}
        assert scores == {candidate.version: pytest.approx(int(candidate.text) / 10) for candidate in result.candidates}
        assert result.best.score == max(score for score in scores.values() if score is not None)
    assert 20 < dies_at < 199
    before = world.done
    assert search(world, rounds=2, minibatch=1).best.version == max(world.texts, key=lambda version: int(world.texts[version]))
    assert world.done == before, "all is known: nothing is done"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_search_measures_every_candidate_once_and_never_gets_worse(rounds: int, beam_width: int, branch: int, seed: int) -> None:
    world = World(seed=seed)
    result = search(world, rounds=rounds, beam_width=beam_width, branch=branch, minibatch=1)
    tries = Counter((trial.version, trial.task_id) for trial in world.trials if trial.task_id.startswith("held"))
    assert tries == {(candidate.version, task.task_id): 1 for candidate in result.candidates for task in QUESTION.held_out}
    assert result.beams[0] == result.candidates[:1]
    assert len(result.beams) == rounds + 1
    for before, beam in pairwise(result.beams):
        scores = [candidate.score or 0.0 for candidate in beam]
        assert 1 <= len(beam) <= beam_width
        assert scores == sorted(scores, reverse=True)
        assert scores[0] >= (before[0].score or 0.0)
    assert result.best.score == max(candidate.score or 0.0 for candidate in result.candidates)
    done, longer = world.done, search(world, rounds=rounds + 1, beam_width=beam_width, branch=branch, minibatch=1)
    assert longer.beams[:-1] == result.beams, "a longer search of the same question goes on where a shorter one ended"
    assert world.done - done <= beam_width * (1 + 6 * branch)


class Equals(World):
    """A world whose prompts are all worth the same; the last of four edits is no new text, and version 4 cannot be compared."""

    def edit(self, name: str, text: str | None, edit: Edit) -> int | None:
        version = (9, 3, 4, 1)[edit.number]
        self.texts[version] = str(version)
        self.recorded.append(replace(edit, version=version))
        return version

    async def run(self, tasks: Sequence[Task]) -> list[str]:
        """Every prompt is worth a half, but version 4 has no reward."""
        ids = await super().run(tasks)
        scored = [replace(trial, score=None if trial.version == 4 else 0.5) for trial in self.trials]
        self.trials = scored
        return ids


def test_search_keeps_older_of_equals_and_ranks_no_unmeasured_version() -> None:
    world = Equals()
    result = search(world, rounds=2, beam_width=3, branch=4)
    # Older is who entered first: version 3 is another search's, and older than 9 as a text alone.
    assert [[candidate.version for candidate in beam] for beam in result.beams] == [[1], [1, 9, 3], [1, 9, 3]]
    assert [candidate.version for candidate in result.candidates] == [1, 9, 3, 4]
    tries = Counter(trial.version for trial in world.trials if trial.task_id.startswith("held"))
    assert tries == dict.fromkeys((1, 9, 3, 4), len(QUESTION.held_out)), "none is measured again, with a score or without"


def test_search_changes_no_published_prompt_and_names_edits() -> None:
    result = search(World())
    first, *rest = result.candidates
    assert (first.version, first.edit) == (1, None)
    assert [candidate.edit.critique for candidate in rest if candidate.edit] == ["larger"] * len(rest)
    assert result.gain.mean == pytest.approx((result.best.score or 0) - (first.score or 0))


def test_search_start_without_rewards_raises_unless_failed_score_is_set() -> None:
    with pytest.raises(PromptError, match=r"has no reward on 1 held-out tasks \(held 1\): 1 rollouts failed.*prompts.failed_score"):
        search(World(failing=frozenset({"held 1"})))
    worst = search(World(failing=frozenset({"held 1"})), failed_score=-1.0)
    assert worst.candidates[0].by_task == {"held 0": 0.0, "held 1": -1.0, "held 2": 0.0}
    assert worst.candidates[0].failed == 1


def test_choose_includes_failed_trial_as_worst() -> None:
    trials = [Trial(f"r{i}", 0, 1, f"t{i}", float(i), "", "") for i in range(6)]
    broken = Trial("broken", 0, 1, "t", None, "timeout", "not done after 5 s")
    for seed in range(20):
        chosen = choose([*trials, broken], 3, random.Random(seed))
        assert len(chosen) == 3
        worst, better = chosen[:2], chosen[2]
        assert all(trial.score is None or trial.score <= 2 for trial in worst)
        assert better.score is not None
        assert better.score > max(trial.score or 0.0 for trial in worst)
    assert choose([broken], 3, random.Random(0)) == [broken]
    assert shown(broken, "x").splitlines() == ["task: ", "it failed: timeout. not done after 5 s"]


def test_ask_for_critique_shows_each_message_once_within_its_room() -> None:
    first = Exchange((("system", "be good"), ("user", "a")), "b")
    then = Exchange((("system", "be good"), ("user", "a"), ("assistant", "b"), ("user", "c")), "d")
    trial = Trial("r", 0, 1, "t", 0.5, "", "", '"a"', (first, then))
    assert shown(trial, "be good").splitlines() == [
        'task: "a"', "system: [the prompt]", "user: a", "reply: b", "assistant: b", "user: c", "reply: d"
    ]  # fmt: skip
    long = replace(trial, exchanges=(Exchange((("user", "x" * 10_000),), "END"),))
    message = ask_for_critique("be good", [long])[1]["content"]
    assert 4000 < len(message) < 4100
    assert "END" in message


FUNCTION_CALL = {"type": "function_call", "name": "search", "arguments": "{}", "call_id": "c"}
FUNCTION_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "rome"}


def test_read_edit_without_prompt_is_none() -> None:
    assert [read_edit(text) for text in ("a <prompt>\n b \n</prompt> c", "<prompt>  </prompt>", "nothing", "<prompt>open")] == [
        " b ", None, None, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "response", "read"),
    [
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            '{"choices": [{"message": {"content": "b"}}]}',
            Exchange((("user", "a"),), "b"),
        ),
        ('{"system": "s", "messages": []}', '{"content": "b"}', Exchange((("system", "s"),), "b")),
        ('{"input": "a"}', '{"output": "b"}', Exchange((("user", "a"),), "b")),
        ('{"prompt": "a"}', '{"choices": [{"text": "b"}]}', Exchange((("user", "a"),), "b")),
        ("no json", "an error", Exchange((), "an error")),
        (
            json.dumps({"instructions": "s", "input": [{"role": "user", "content": "a"}, FUNCTION_CALL, FUNCTION_OUTPUT]}),
            json.dumps({"output": [FUNCTION_CALL]}),
            Exchange(
                (
                    ("system", "s"),
                    ("user", "a"),
                    ("function_call", json.dumps(FUNCTION_CALL)),
                    ("function_call_output", json.dumps(FUNCTION_OUTPUT)),
                ),
                json.dumps([FUNCTION_CALL]),
            ),
        ),
        (
            '{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [1]}, {"role": "x", "y": "no"}]}',
            '{"choices": [{"message": {"content": "b", "tool_calls": [2]}}]}',
            Exchange((("user", ""), ("assistant", "[1]"), ("x", '{"role": "x", "y": "no"}')), "b [2]"),
        ),
        ('{"prompt": [1, 2]}', '{"choices": [{"text": "b"}]}', Exchange((("user", "[1, 2]"),), "b")),
        ('{"prompt": [[1, 2], "a"]}', '{"choices": [{"text": "b"}]}', Exchange((("user", "[1, 2]"), ("user", "a")), "b")),
        ('{"input": "a"}', '{"choices": ["b"]}', Exchange((("user", "a"),), '{"choices": ["b"]}')),
        ('{"input": "a"}', '{"choices": {"text": "b"}}', Exchange((("user", "a"),), "b")),
        ('{"input": "a"}', '{"choices": [{"message": "b"}]}', Exchange((("user", "a"),), "b")),
    ],
)
def test_read_exchange_in_each_dialect(request_: str, response: str, read: Exchange) -> None:
    assert read_exchange(request_, response) == read


def test_search_id_depends_on_question_only() -> None:
    def name(start: PromptText = START, agent: str = "agent", **prompts: object) -> str:
        chosen = Settings(prompts=PromptSettings.model_validate(prompts))
        return search_id(start, QUESTION.learn, QUESTION.held_out, chosen, [agent])

    assert name() == name(rounds=9, max_p=1, pin="other")
    others = {name(), name(seed=1), name(branch=1), name(agent="other"), name(replace(START, version=2))}
    assert len(others) == 5


@pytest.mark.parametrize(("scores", "score"), [(["0.5", "1"], 1.5), ([], None), (["0.5", "high"], None), (["nan"], None)])
def test_trials_reward_that_is_no_number_is_a_missing_reward(scores: list[str], score: float | None) -> None:
    root = ("r1", 0, "trace", "root", {semconv.PROMPT_VERSION: "3", semconv.TASK_ID: "held 0"}, "")
    rewards = [("r1", 0, "span", {semconv.EVALUATION_SCORE: text}) for text in scores]

    class Store:
        url = "http://store"

        def query(self, sql: str, parameters: object) -> SimpleNamespace:
            return SimpleNamespace(result_rows=[root] if semconv.PROMPT_NAME in sql else rewards)

    client: Any = Store()
    (trial,) = Trials(client, "run", "p").read()
    assert (trial.version, trial.score) == (3, score)
