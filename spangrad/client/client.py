"""`spangrad.Client`: training an agent from a script of one's own.

In: where the queue is, data, a Python function that is the agent. Out: rollouts in the queue, worker processes that run them, counts and
mean rewards. Invariant: what was uploaded and enqueued is durable in the queue, under names that follow from the data; so a script that
was killed goes on with what it had begun, and enqueues nothing twice.

This runs in the agent's own process, whose modules may be named as our stages are: it imports the kernel alone, asks the queue over HTTP,
and starts `spangrad worker` for the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from spangrad.callables import is_file, reference_of
from spangrad.client.queue_http import QueueHttp
from spangrad.client.result import Measure, Result, Show, Tally, Validation
from spangrad.client.task_files import read_tasks, tasks_of
from spangrad.client.task_store import Stored, TaskStore
from spangrad.client.workers import Work, Workers
from spangrad.errors import AgentError, SettingsError
from spangrad.processes import MARK
from spangrad.types import Mode, Task

try:
    from spangrad.greedy_baseline import wants_greedy
    from spangrad.settings.sources import load_settings, variable_of
except ModuleNotFoundError as error:
    raise ImportError(
        f"spangrad.Client runs workers, which need the server's wheel ({error}): pip install 'spangrad-server[runner]'."
    ) from error

Data = str | Path | Sequence[Task | Mapping[str, object]]
"""A source as `spangrad run --tasks` takes it, or rows."""
Reference = Callable[..., Any] | str
"""A function, or what `--evaluator` and `--environment` take: `module:function`, or the URL of a service."""
TRAIN, TEST = "train", "test"
"""Names of the data in the queue."""
_WAIT_SECONDS = 2.0
"""For news, in one request: workers are looked at between two."""
_OPEN = ("queued", "running")


@dataclass(slots=True)
class _Course:
    """One call of `train` or `validate`."""

    work: Work
    workers: Workers
    show: Show
    shown: Tally
    """What the progress is of."""
    train: Tally = field(default_factory=Tally)
    waits: dict[str, Tally | None] = field(default_factory=dict[str, Tally | None])
    """Rollouts that are waited for, and where each is counted. None: nowhere."""
    cursor: int = 0


class Client:
    """One run of an agent, by way of the queue at a URL.

    Args:
        url: of `spangrad queue`.
        run_id: that the rollouts belong to. None: runner.run_id.
        settings: any setting by its dotted key, for the workers, too; stronger than environment and spangrad.toml, which say where gateway
            and store are. None is a value: it takes back what these say.
    """

    def __init__(self, url: str, *, run_id: str | None = None, settings: Mapping[str, object] | None = None) -> None:
        if MARK in os.environ:
            raise AgentError(
                "the agent's file makes a client while a worker loads it. Put that under `if __name__ == '__main__':`, which is "
                "false there."
            )
        self._given = {**(settings or {}), "runner.queue_url": url}
        self.settings = load_settings(self._given if run_id is None else {**self._given, "runner.run_id": run_id})
        self.run_id = self.settings.runner.run_id
        self._queue = QueueHttp(url, self.settings.runner.queue_token, self.run_id)
        self._store = TaskStore(self._queue)
        self._data: dict[str, tuple[Stored, list[Task]]] = {}

    def upload_data(self, data: Data, *, test_file: Data | None = None) -> Self:
        """Keep data in the queue for the run; the same data uploaded again is the same.

        Args:
            data: what is trained on: a file, a directory, `hf:OWNER/NAME[:SPLIT]`, or rows.
            test_file: what is held out, put in mode `validate`. None: nothing.

        Raises:
            AgentError: a source is not there, or a row is not a task.
            QueueError: the queue refuses, or stays away.
        """
        for name, source in ((TRAIN, data), (TEST, test_file)):
            if source is not None:
                tasks = read_tasks(source) if isinstance(source, str | Path) else tasks_of(source, name)
                self._data[name] = self._store.upload(name, tasks), tasks
        return self

    def train(
        self,
        agent: Callable[..., Any],
        *,
        n_workers: int = 1,
        evaluator: Reference | None = None,
        environment: Reference | None = None,
        epochs: int = 1,
        groups: int | None = None,
        validate_every: int | None = None,
        follow_demand: bool | None = None,
        idle_seconds: float = 600.0,
    ) -> Result:
        """Run the agent on the training data, with worker processes on this machine, until that is done.

        Where a trainer has told the queue how many groups it wants of the run, these are made, as it wants them and as they finish.
        Else every task is put `runner.group_size` times an epoch; an epoch that another call has finished is not run again, one that
        it has begun is gone on with.

        Args:
            agent: a function at the top level of a file, called with a task's input, and with `endpoint=` where it has that parameter.
            n_workers: worker processes, each with `runner.workers` agent processes.
            evaluator: whose value for (input, output) is the reward. None: what the decorator names, else the agent's own value.
            environment: makes of the input what the agent works in. None: nothing does.
            epochs: times that the data is put. Not for demand.
            groups: of training after which to end, in demand. None: when nothing is wanted for `idle_seconds`.
            validate_every: groups of training between two times that the test data is put. None: it is put at the end alone.
            follow_demand: None: where a trainer has stated one.
            idle_seconds: longer than a step of the trainer takes.

        Raises:
            AgentError: the agent cannot be found by other processes, or not loaded; no data was uploaded.
            QueueError: the queue refuses, or stays away.
            KeyboardInterrupt: Ctrl-C, after running attempts had runner.drain_seconds to end; the rest stays in the queue.
        """
        began = time.monotonic()
        work = self._work(agent, evaluator, environment)
        if validate_every is not None:
            self._need(TEST)
        stored, tasks = self._need(TRAIN)
        follow = bool(self._queue.demand()["branches"]) if follow_demand is None else follow_demand
        rollouts = [] if follow else self._epochs(stored, tasks, epochs)
        counted = [one for one in rollouts if one["mode"] == Mode.TRAIN]
        validations: list[Validation] = []
        work = replace(work, follow=TRAIN if follow else None)
        with Show("training", None if follow else len(counted)) as show, self._workers(work, n_workers) as workers:
            train = Tally()
            course = _Course(work, workers, show, shown=train, train=train, cursor=self._queue.cursor())
            if rollouts and self._queue.enqueue(rollouts):
                course.cursor = 0  # some of them may have ended before
            course.waits = {one["rollout_id"]: course.train if one["mode"] == Mode.TRAIN else None for one in rollouts}
            quiet = time.monotonic()
            while course.waits if not follow else self._wanted(course, groups, quiet, idle_seconds):
                if self._news(course, count_all=follow) or (follow and self._is_busy()):
                    quiet = time.monotonic()
                if validate_every and course.train.groups >= validate_every * (1 + len(validations)):
                    validations.append(self._validation(course, Tally()))
            show.progress(course.train.measure, last=True)
            if TEST in self._data and not (validations and validations[-1].after_groups == course.train.groups):
                validations.append(self._validation(course, Tally()))
        return Result(self.run_id, course.train.groups, course.train.measure, tuple(validations), time.monotonic() - began)

    def validate(
        self, agent: Callable[..., Any], *, n_workers: int = 1, evaluator: Reference | None = None, environment: Reference | None = None
    ) -> Measure:
        """Put the test data once, in mode `validate`: measured, never trained.

        Args:
            agent: as `train`.
            n_workers: as `train`.
            evaluator: as `train`.
            environment: as `train`.

        Raises:
            AgentError: as `train`.
            QueueError: as `train`.
        """
        work = self._work(agent, evaluator, environment)
        self._need(TEST)
        with Show("test data", len(self._data[TEST][1])) as show, self._workers(work, n_workers) as workers:
            tally = Tally()
            course = _Course(work, workers, show, shown=tally, cursor=self._queue.cursor())
            return self._validation(course, tally).measure

    def _validation(self, course: _Course, tally: Tally) -> Validation:
        """Put the test data before everything else, and wait for it."""
        after = course.train.groups
        stored, tasks = self._data[TEST]
        rollouts = self._rollouts(stored, tasks, uuid.uuid4().hex, Mode.VALIDATE)
        waited = {one["rollout_id"] for one in rollouts}
        course.waits.update(dict.fromkeys(waited, tally))
        self._queue.enqueue(rollouts)
        while not waited.isdisjoint(course.waits):
            self._news(course, count_all=course.work.follow is not None)
        course.show.say(f"test data after {after} groups: {tally.measure}")
        return Validation(after, tally.measure)

    def _news(self, course: _Course, *, count_all: bool) -> int:
        """Count what has ended meanwhile; how many.

        Args:
            course: what is waited for.
            count_all: every rollout of mode train, also those that others enqueued.
        """
        course.workers.check()
        ended, course.cursor = self._queue.ended(course.cursor, _WAIT_SECONDS)
        for one in ended:
            tally = course.waits.pop(one["rollout_id"], None)
            if tally is None and count_all and one["mode"] == Mode.TRAIN:
                tally = course.train
            if tally is not None:
                tally.add(one)
        course.show.progress(course.shown.measure)
        return len(ended)

    def _wanted(self, course: _Course, groups: int | None, quiet: float, idle_seconds: float) -> bool:
        """Whether there is, or may soon be, something that trainers want."""
        if groups is not None and course.train.groups >= groups:
            return False
        return time.monotonic() - quiet < idle_seconds

    def _is_busy(self) -> bool:
        """Whether groups are wanted that are not there, or are on their way."""
        demand, states = self._queue.demand(), self._queue.states()
        return demand["enqueued"] < demand["groups"] or any(states.get(state) for state in _OPEN)

    def _epochs(self, stored: Stored, tasks: Sequence[Task], epochs: int) -> list[dict[str, Any]]:
        """The rollouts of the next epochs, from the one on that was begun and has not ended."""
        first = 0
        while self._queue.rollout(self._rollouts(stored, tasks[-1:], first, Mode.TRAIN, len(tasks) - 1)[-1]["rollout_id"]):
            first += 1
        states = self._queue.states()
        if first and any(states.get(state) for state in _OPEN):
            first -= 1  # left by somebody who was killed
        return [one for epoch in range(first, first + epochs) for one in self._rollouts(stored, tasks, epoch, Mode.TRAIN)]

    def _rollouts(self, stored: Stored, tasks: Sequence[Task], which: object, mode: Mode, first: int = 0) -> list[dict[str, Any]]:
        """Rollouts of tasks, as the queue takes them: a group a task, a greedy one first where it is wanted.

        Their ids follow from run, data, `which`, the task's place (`first` is that of the first one) and the rollout's number.
        """
        runner = self.settings.runner
        size = runner.group_size if mode is Mode.TRAIN else 1
        modes = ([Mode.GREEDY] if wants_greedy(self.settings, mode) else []) + [mode] * size
        found: list[dict[str, Any]] = []
        for place, task in enumerate(tasks, first):
            group = _name(self.run_id, stored.digest, mode, which, place)
            found += [
                {
                    "rollout_id": _name(group, number),
                    "task_id": task.task_id,
                    "input": task.input,
                    "group_id": group,
                    "group_size": size if one is mode else 1,
                    "mode": one.value,
                    "priority": 0 if mode is Mode.TRAIN else 1,
                    "timeout_seconds": runner.timeout_seconds,
                    "max_attempts": runner.max_attempts,
                }
                for number, one in enumerate(modes)
            ]
        return found

    def _need(self, name: str) -> tuple[Stored, list[Task]]:
        """The data of a name, from the queue where another process has uploaded it."""
        if name not in self._data:
            tasks = self._store.read(name)
            self._data[name] = self._store.upload(name, tasks), tasks
        return self._data[name]

    def _work(self, agent: Callable[..., Any], evaluator: Reference | None, environment: Reference | None) -> Work:
        if not callable(agent):
            raise AgentError(f"the agent is {agent!r:.200}, not a function.")
        reference, directory = reference_of(agent, "the agent")
        runner = self.settings.runner
        return Work(
            run_id=self.run_id,
            agent=reference,
            stages={
                name: one if isinstance(one, str) else _found(name, one, directory)
                for name, one in (("evaluator", evaluator), ("environment", environment))
                if one is not None
            },
            directory=directory,
            environment={
                variable_of(key): str(value) if isinstance(value, str | Path) else json.dumps(value) for key, value in self._given.items()
            },
            logs=runner.directory / "logs",
            follow=None,
        )

    def _workers(self, work: Work, count: int) -> Workers:
        if count < 1:
            raise SettingsError(f"n_workers = {count}: give 1 or more.")
        return Workers(work, count, self.settings.runner.drain_seconds)


def _found(name: str, function: Callable[..., Any], directory: Path) -> str:
    """A function's name where the agent's modules are looked for.

    Raises:
        AgentError: other processes cannot find it, or not there.
    """
    reference, place = reference_of(function, f"the {name}")
    if place != directory and not is_file(reference):
        raise AgentError(
            f"the {name} {reference} lies below {place}, the agent's modules below {directory}: workers look in one place. Import it in "
            "the agent's file and wrap it in a function there, or name it as a text that the agent's environment can import."
        )
    return reference


def _name(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:32]
