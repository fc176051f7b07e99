"""Search for a better prompt: a beam search whose steps are a model's critiques.

In: the prompt's published version, tasks to learn from and others to measure on, a function that runs trials, a critic. Out: a
`SearchResult`; versions and edits in the prompt store, trials in the span store. Invariant: recorded edits and trials are not made again,
so a search that is started again does nothing twice; the best score never decreases; the published prompt is not changed here.

The search is that of Pryzant et al. 2023 (Automatic Prompt Optimization with "Gradient Descent" and Beam Search): in each round each
prompt of the beam is criticised and edited `branch` times, and the `beam_width` best of all measured ones form the next beam. Instead of
a bandit, which spends few evaluations on poor candidates, all candidates have the same held-out tasks: they can be compared in pairs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prompts.compare import Gain, gain
from prompts.prompt_texts import Messages, ask_for_critique, ask_for_edit, choose, read_edit
from prompts.trials import Trial, Trials
from spangrad.agent.prompt_store import Edit, PromptStore, PromptText
from spangrad.errors import PromptError
from spangrad.settings import PromptSettings, Settings
from spangrad.types import PromptVersion, Task

_ARRIVAL_SECONDS = 60.0
"""Time that root spans may take from a collector's queue to the store, in seconds."""
_LOOK_SECONDS = 0.2

Run = Callable[[Sequence[Task]], Awaitable[Sequence[str]]]
"""Function that runs a rollout of mode trial of each task, with the prompt that the task names; it returns their ids, once the store has
their root spans."""
Complete = Callable[[Messages], Awaitable[str]]
"""Function that returns a chat model's reply."""


class EditPosition(NamedTuple):
    """Position of an edit in a search; its text seeds the choice of the trials that the critic is shown."""

    round: int
    """Round, from 1."""
    parent: int
    """Version that is edited."""
    number: int
    """Number among the parent's edits in the round, from 0."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt and tasks of a search."""

    id: str
    start: PromptText
    learn: tuple[Task, ...]
    """Tasks whose rollouts the critic sees."""
    held_out: tuple[Task, ...]
    """Tasks that all candidates are measured on."""


def search_id(start: PromptText, learn: Sequence[Task], held_out: Sequence[Task], settings: Settings, agent: Sequence[str]) -> str:
    """Return the id of a search: the same for the same prompt, tasks, settings and agent, so that the search can be continued."""
    deciding_settings = settings.prompts.model_dump(mode="json", exclude={"critic_key", "max_p", "pin", "rounds"})
    policy = [settings.gateway.policy, settings.runner.max_attempts, settings.runner.timeout_seconds]
    tasks = [[[task.task_id, task.input] for task in group] for group in (learn, held_out)]
    facts = [start.name, start.version, start.checksum, tasks, deciding_settings, policy, list(agent)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that was measured."""

    version: int
    text: str
    score: float | None
    """Mean over the held-out tasks. None: it cannot be compared, because a task has no reward."""
    by_task: Mapping[str, float]
    """Mean over the rollouts, by task; only tasks with a reward."""
    failed: int
    """Number of rollouts of which every attempt failed."""
    edit: Edit | None
    """First edit that led to it. None: the search began with it."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search."""

    question: Question
    candidates: tuple[Candidate, ...]
    """Candidates in the order of entry."""
    beams: tuple[tuple[Candidate, ...], ...]
    """Best candidates after each round, the best first, of equals the older first. The first beam is the start alone."""
    gain: Gain
    """Gain of the best version over the start, on the held-out tasks."""

    @property
    def best(self) -> Candidate:
        """Return the best candidate."""
        return self.beams[-1][0]


@dataclass(slots=True)
class Progress:
    """Progress of a search; a display sets `changed`."""

    changed: Callable[[Progress], None] = lambda progress: None
    round: int = 0
    doing: str = ""
    done: int = 0
    of: int = 0
    best: float | None = None
    """Highest score so far. None: nothing is measured."""

    def now(self, doing: str, done: int, of: int) -> None:
        """Update the progress, and notify the display."""
        self.doing, self.done, self.of = doing, done, of
        self.changed(self)


@dataclass(slots=True)
class Search:
    """A search that can be begun again."""

    question: Question
    settings: PromptSettings
    prompts: PromptStore
    trials: Trials
    run: Run
    complete: Complete
    """Model that criticises and edits."""
    progress: Progress = field(default_factory=Progress)
    _known: dict[str, Trial] = field(default_factory=dict[str, Trial])
    _texts: dict[int, str] = field(default_factory=dict[int, str])
    _edits: dict[EditPosition, Edit] = field(default_factory=dict[EditPosition, Edit])

    async def go(self) -> SearchResult:
        """Run the search until it ends.

        Raises:
            PromptError: the prompt store or the critic does not answer; or the prompt that the search began with cannot be measured.
            SpangradError: errors of `run` and of `trials`.
        """
        start = self.question.start
        self._texts[start.version] = start.text
        for edit in await asyncio.to_thread(self.prompts.edits, start.name, self.question.id):
            self._edits[EditPosition(edit.round, edit.parent, edit.number)] = edit
        self._take(await asyncio.to_thread(self.trials.read))
        candidates = await self._measure([start.version])
        if candidates[0].score is None:
            raise self._unmeasured(candidates[0])
        beams = [tuple(candidates)]
        for number in range(1, self.settings.rounds + 1):
            self.progress.round = number
            positions = [EditPosition(number, parent.version, edit) for parent in beams[-1] for edit in range(self.settings.branch)]
            if missing := [position for position in positions if position not in self._edits]:
                await self._expand(missing)
            edited = (self._edits[position].version for position in positions)
            entered = [*(candidate.version for candidate in candidates), *(version for version in edited if version is not None)]
            candidates = await self._measure(list(dict.fromkeys(entered)))
            ranked = sorted(candidates, key=lambda candidate: math.inf if candidate.score is None else -candidate.score)
            beams.append(tuple(candidate for candidate in ranked[: self.settings.beam_width] if candidate.score is not None))
        best = gain(candidates[0].by_task, beams[-1][0].by_task, self.settings.seed)
        return SearchResult(self.question, tuple(candidates), tuple(beams), best)

    async def _measure(self, versions: Sequence[int]) -> list[Candidate]:
        """Return versions as candidates, after the rollouts on the held-out tasks that they lack."""
        pairs = [(version, task) for version in versions for task in self.question.held_out]
        await self._try(pairs, self.settings.evaluations, "measuring")
        measured = [await self._candidate(version) for version in versions]
        self.progress.best = max((candidate.score for candidate in measured if candidate.score is not None), default=None)
        return measured

    async def _expand(self, positions: Sequence[EditPosition]) -> None:
        """Make edits of one round; each is recorded as soon as it exists."""
        batch = {position.parent: self._minibatch(position.round, position.parent) for position in positions}
        await self._try([(parent, task) for parent, tasks in batch.items() for task in tasks], 1, "rolling out")
        trials = {
            parent: await asyncio.to_thread(self.trials.with_exchanges, self._of(parent, [task.task_id for task in tasks]))
            for parent, tasks in batch.items()
        }
        self.progress.now("editing", 0, len(positions))
        try:
            async with asyncio.TaskGroup() as group:
                for position in positions:
                    group.create_task(self._edit(position, trials[position.parent]))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _edit(self, position: EditPosition, trials: Sequence[Trial]) -> None:
        text, chosen = self._texts[position.parent], self.settings
        shown = choose(trials, chosen.shown, random.Random(f"{chosen.seed} {position}"))
        critique = await self.complete(ask_for_critique(text, shown))
        edited = read_edit(await self.complete(ask_for_edit(text, critique)))
        edit = Edit(self.question.id, *position, critique, None)
        version = await asyncio.to_thread(self.prompts.edit, self.question.start.name, edited, edit)
        self._edits[position] = replace(edit, version=version)
        self.progress.now("editing", self.progress.done + 1, self.progress.of)

    async def _try(self, pairs: Sequence[tuple[int, Task]], times: int, doing: str) -> None:
        """Run the missing rollouts, so that each version and task has `times` of them."""
        measured = Counter((trial.version, trial.task_id) for trial in self._known.values())
        name = self.question.start.name
        missing = [
            replace(task, prompt=PromptVersion(name, version))
            for version, task in pairs
            for _ in range(times - measured[version, task.task_id])
        ]
        if not missing:
            return
        self.progress.now(doing, 0, len(missing))
        ids = await self.run(missing)
        end = time.monotonic() + _ARRIVAL_SECONDS
        left = list(ids)
        while left:
            self._take(await asyncio.to_thread(self.trials.read, left))
            left = [rollout_id for rollout_id in left if rollout_id not in self._known]
            if left and time.monotonic() > end:
                raise PromptError(
                    f"{len(left)} of {len(ids)} trials are not in the store {_ARRIVAL_SECONDS:g} s after they ended, rollout {left[0]} for "
                    "one. See what became of them with `spangrad rollout why`, then run the search again: it resumes."
                )
            await asyncio.sleep(_LOOK_SECONDS if left else 0)

    def _take(self, trials: Sequence[Trial]) -> None:
        inputs = {task.task_id: json.dumps(task.input, ensure_ascii=False) for task in (*self.question.learn, *self.question.held_out)}
        for trial in trials:
            if trial.task_id in inputs:
                score = self.settings.failed_score if trial.score is None else trial.score
                self._known[trial.rollout_id] = replace(trial, score=score, input=inputs[trial.task_id])

    def _minibatch(self, round: int, parent: int) -> list[Task]:
        """Draw the tasks of a round and prompt: the same ones when the search is continued."""
        rng = random.Random(f"{self.settings.seed} {round} {parent}")
        return rng.sample(self.question.learn, min(self.settings.minibatch, len(self.question.learn)))

    def _of(self, version: int, tasks: Sequence[str]) -> list[Trial]:
        ids = set(tasks)
        trials = [trial for trial in self._known.values() if trial.version == version and trial.task_id in ids]
        return sorted(trials, key=lambda trial: (trial.task_id, trial.rollout_id))

    async def _candidate(self, version: int) -> Candidate:
        if version not in self._texts:
            self._texts[version] = (await asyncio.to_thread(self.prompts.get, self.question.start.name, version)).text
        given: defaultdict[str, list[float]] = defaultdict(list)
        tasks = [task.task_id for task in self.question.held_out]
        trials = self._of(version, tasks)
        for trial in trials:
            if trial.score is not None:
                given[trial.task_id].append(trial.score)
        by_task = {task: sum(given[task]) / len(given[task]) for task in tasks if task in given}
        is_measured = len(by_task) == len(tasks)
        edit = next((edit for _, edit in sorted(self._edits.items()) if edit.version == version), None)
        return Candidate(
            version=version,
            text=self._texts[version],
            score=sum(by_task.values()) / len(by_task) if is_measured else None,
            by_task=by_task,
            failed=sum(bool(trial.failure) for trial in trials),
            edit=None if version == self.question.start.version else edit,
        )

    def _unmeasured(self, start: Candidate) -> PromptError:
        without = [task.task_id for task in self.question.held_out if task.task_id not in start.by_task]
        return PromptError(
            f"version {start.version} of prompt {self.question.start.name}, with which the search begins, has no reward on "
            f"{len(without)} held-out tasks ({', '.join(without[:3])}): {start.failed} rollouts failed. Fix the cause "
            "(`spangrad rollout why`), or say with prompts.failed_score what a failure counts."
        )
