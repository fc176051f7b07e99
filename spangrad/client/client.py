"""Class `spangrad.Client`, which trains an agent from the user's own script.

Invariant: what was uploaded and enqueued is durable in the queue, under names that follow from the data; so a script that was killed
resumes what it had begun, and enqueues nothing twice.

This runs in the agent's own process, whose modules may have the names of our packages: it imports only `spangrad`, calls the queue over
HTTP, and starts `spangrad worker` for the rest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from spangrad.callables import is_file, reference_of
from spangrad.client.queue_http import OPEN_STATES, QueueHttp
from spangrad.client.result import ProgressLine, RolloutSummary, RolloutTally, TrainResult, Validation
from spangrad.client.task_files import read_tasks, tasks_of
from spangrad.client.task_groups import group_of, pinned_prompt, queued, sampling_of
from spangrad.client.task_store import TaskStore, digest_of
from spangrad.client.workers import Work, WorkerProcesses
from spangrad.errors import AgentError, SettingsError
from spangrad.greedy_baseline import wants_greedy
from spangrad.processes import MARK
from spangrad.settings.sources import as_variable, load_settings, variable_of
from spangrad.types import Mode, Rollout, Task

Data = str | Path | Sequence[Task | Mapping[str, object]]
"""Source of tasks as `spangrad run --tasks` accepts it, or rows."""
Reference = Callable[..., Any] | str
"""Function, or value of `--evaluator` and `--environment`: `module:function`, or the URL of a service."""
TRAIN, TEST = "train", "test"
"""Names of the data sets in the queue."""
_WAIT_SECONDS = 2.0
"""Time that one request waits for ended rollouts, in seconds; workers are checked between two requests."""


@dataclass(slots=True)
class _TrainRun:
    """State of one call of `train` or `validate`."""

    work: Work
    workers: WorkerProcesses
    progress_line: ProgressLine
    progress_total: RolloutTally
    """Tally that the progress shows."""
    train: RolloutTally = field(default_factory=RolloutTally)
    waits: dict[str, RolloutTally | None] = field(default_factory=dict[str, RolloutTally | None])
    """Rollouts that are waited for, and the tally that counts each. None: it is not counted."""
    cursor: int = 0


class Client:
    """One run of an agent, in the queue at a URL.

    Args:
        url: URL of `spangrad queue`.
        run_id: run that the rollouts belong to. None: runner.run_id.
        settings: any setting by its dotted key, for the workers, too; these override environment and spangrad.toml, which name gateway and
            store. None is a value: it resets what those set.
    """

    def __init__(self, url: str, *, run_id: str | None = None, settings: Mapping[str, object] | None = None) -> None:
        if MARK in os.environ:
            raise AgentError(
                "the agent's file makes a client while a worker loads it. Put that under `if __name__ == '__main__':`, which is "
                "false there."
            )
        self._given = {**(settings or {}), "queue.url": url}
        self.settings = load_settings(self._given if run_id is None else {**self._given, "runner.run_id": run_id})
        self.run_id = self.settings.runner.run_id
        self._queue = QueueHttp(url, self.settings.queue.token, self.run_id)
        self._store = TaskStore(self._queue)
        self._data: dict[str, tuple[str, list[Task]]] = {}

    def upload_data(self, data: Data, *, test_file: Data | None = None) -> Self:
        """Store data in the queue for the run; uploading the same data again changes nothing.

        Args:
            data: training data: a file, a directory, `hf:OWNER/NAME[:[CONFIG:]SPLIT]`, or rows.
            test_file: held-out data, run in mode `validate`. None: there is none.

        Raises:
            AgentError: a source does not exist, or a row is not a task.
            QueueError: the queue refuses, or stays unreachable.
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
    ) -> TrainResult:
        """Run the agent on the training data, with worker processes on this machine, until that is done.

        Where a trainer has sent its demand for groups of the run to the queue, these are run as it requests them and as they finish.
        Else every task is run `runner.group_size` times in each epoch. Epochs that another call has finished are not run again; those that
        it has enqueued and not finished are resumed, in place of new ones.

        Args:
            agent: a function at the top level of a file, called with a task's input, and with `endpoint=` where it has that parameter.
            n_workers: worker processes, each with `runner.workers` agent processes.
            evaluator: function whose value for (input, output) is the reward. None: the decorator's, else the agent's own value.
            environment: function that makes the agent's environment of the input. None: there is no environment.
            epochs: number of passes over the data; ignored with demand.
            groups: number of training groups after which to end, with demand. None: end when no group is requested for `idle_seconds`.
            validate_every: number of training groups between two runs of the test data. None: it is run only at the end.
            follow_demand: True to follow the trainers' demand. None: where a trainer has stated one.
            idle_seconds: time without demand after which to end, in seconds; longer than a step of the trainer.

        Raises:
            AgentError: other processes cannot find the agent, or it cannot be loaded; no data was uploaded.
            QueueError: the queue refuses, or stays unreachable.
            SettingsError: greedy rollouts or the sampling of validation are configured, and there is no gateway.
            PromptError: the prompt that prompts.pin names is not published.
            KeyboardInterrupt: Ctrl-C, after running attempts had runner.drain_seconds to end; the rest stays in the queue.
        """
        began = time.monotonic()
        work = self._work(agent, evaluator, environment)
        if validate_every is not None:
            self._required_data(TEST)
        digest, tasks = self._required_data(TRAIN)
        if TEST in self._data:
            sampling_of(self.settings.runner, Mode.VALIDATE)  # raises now what would else end the script after the training
        pinned_prompt(self.settings)  # raises before workers start
        follow = bool(self._queue.demand()["branches"]) if follow_demand is None else follow_demand
        rollouts = [] if follow else self._epochs(digest, tasks, epochs)
        counted = [rollout for rollout in rollouts if rollout.mode is Mode.TRAIN]
        validations: list[Validation] = []
        work = replace(work, follow=TRAIN if follow else None)
        with ProgressLine("training", None if follow else len(counted)) as show, self._workers(work, n_workers) as workers:
            train = RolloutTally()
            run = _TrainRun(work, workers, show, progress_total=train, train=train, cursor=self._queue.cursor())
            if rollouts and self._enqueue(rollouts):
                run.cursor = 0  # some of them may have ended before
            run.waits = {rollout.key.rollout_id: run.train if rollout.mode is Mode.TRAIN else None for rollout in rollouts}
            active_at = time.monotonic()
            while run.waits if not follow else self._continues(run, groups, active_at, idle_seconds):
                if self._count_ended(run, count_all=follow) or (follow and self._is_busy()):
                    active_at = time.monotonic()
                if validate_every and run.train.groups >= validate_every * (1 + len(validations)):
                    validations.append(self._validation(run, RolloutTally()))
            show.progress(run.train.measure, last=True)
            if TEST in self._data and not (validations and validations[-1].after_groups == run.train.groups):
                validations.append(self._validation(run, RolloutTally()))
        return TrainResult(self.run_id, run.train.groups, run.train.measure, tuple(validations), time.monotonic() - began)

    def validate(
        self, agent: Callable[..., Any], *, n_workers: int = 1, evaluator: Reference | None = None, environment: Reference | None = None
    ) -> RolloutSummary:
        """Run the test data once, in mode `validate`: measured, never trained. The arguments are those of `train`.

        Raises:
            AgentError: as `train`.
            QueueError: as `train`.
            SettingsError: as `train`.
            PromptError: as `train`.
        """
        work = self._work(agent, evaluator, environment)
        self._required_data(TEST)
        sampling_of(self.settings.runner, Mode.VALIDATE)  # as the next line, raises before workers start
        pinned_prompt(self.settings)
        with ProgressLine("test data", len(self._data[TEST][1])) as show, self._workers(work, n_workers) as workers:
            tally = RolloutTally()
            run = _TrainRun(work, workers, show, progress_total=tally, cursor=self._queue.cursor())
            return self._validation(run, tally).measure

    def _validation(self, run: _TrainRun, tally: RolloutTally) -> Validation:
        """Enqueue the test data before everything else, and wait for it."""
        after = run.train.groups
        digest, tasks = self._data[TEST]
        rollouts = self._rollouts(digest, tasks, uuid.uuid4().hex, Mode.VALIDATE)
        waited = {rollout.key.rollout_id for rollout in rollouts}
        run.waits.update(dict.fromkeys(waited, tally))
        self._enqueue(rollouts)
        while not waited.isdisjoint(run.waits):
            self._count_ended(run, count_all=run.work.follow is not None)
        run.progress_line.print_line(f"test data after {after} groups: {tally.measure}")
        return Validation(after, tally.measure)

    def _count_ended(self, run: _TrainRun, *, count_all: bool) -> int:
        """Count the rollouts that have ended meanwhile, with `count_all` also those that others enqueued; return their number."""
        run.workers.check()
        ended, run.cursor = self._queue.ended(run.cursor, _WAIT_SECONDS)
        for rollout in ended:
            tally = run.waits.pop(rollout["rollout_id"], None)
            if tally is None and count_all and rollout["mode"] == Mode.TRAIN:
                tally = run.train
            if tally is not None:
                tally.add(rollout)
        run.progress_line.progress(run.progress_total.measure)
        return len(ended)

    def _continues(self, run: _TrainRun, groups: int | None, active_at: float, idle_seconds: float) -> bool:
        if groups is not None and run.train.groups >= groups:
            return False
        return time.monotonic() - active_at < idle_seconds

    def _is_busy(self) -> bool:
        demand, states = self._queue.demand(), self._queue.states()
        return demand["enqueued"] < demand["groups"] or any(states.get(state) for state in OPEN_STATES)

    def _epochs(self, digest: str, tasks: Sequence[Task], epochs: int) -> list[Rollout]:
        """Return the rollouts of the next epochs, beginning with the first one that was begun and has not ended.

        Those of a script that is started again end with the last epoch that it enqueued before.
        """
        enqueued = 0
        while self._is_known(digest, tasks[-1:], enqueued, len(tasks) - 1):
            enqueued += 1
        # A script that was killed left them; what is open beside them, such as test data, is of no epoch.
        open_ids = self._queue.open_ids() if enqueued else set[str]()
        unfinished = (epoch for epoch in range(enqueued) if open_ids and self._has_open(open_ids, digest, tasks, epoch))
        first = next(unfinished, enqueued)
        end = first + epochs
        # A call enqueues all its epochs at its beginning. Where one was killed in the midst of that, the last epoch is still to come.
        if first < enqueued < end and epochs <= enqueued and not self._is_known(digest, tasks[:1], enqueued, 0):
            end = enqueued
        return [rollout for epoch in range(first, end) for rollout in self._rollouts(digest, tasks, epoch, Mode.TRAIN)]

    def _is_known(self, digest: str, tasks: Sequence[Task], epoch: int, index: int) -> bool:
        """Return whether the queue knows the last rollout of a task in an epoch."""
        return bool(self._queue.rollout(self._rollouts(digest, tasks, epoch, Mode.TRAIN, index)[-1].key.rollout_id))

    def _has_open(self, open_ids: set[str], digest: str, tasks: Sequence[Task], epoch: int) -> bool:
        return any(rollout.key.rollout_id in open_ids for rollout in self._rollouts(digest, tasks, epoch, Mode.TRAIN))

    def _rollouts(self, digest: str, tasks: Sequence[Task], which: object, mode: Mode, first: int = 0) -> list[Rollout]:
        """Return rollouts of tasks: a group for each task, with a greedy rollout first where it is set.

        Their ids follow from run, data, `which`, the task's index (`first` is that of the first one) and the rollout's number.
        """
        size = self.settings.runner.group_size if mode is Mode.TRAIN else 1
        greedy = wants_greedy(self.settings, mode)
        rollouts: list[Rollout] = []
        for index, task in enumerate(tasks, first):
            group = _name(self.run_id, digest, mode, which, index)
            ids = map(partial(_name, group), itertools.count())
            rollouts += group_of(task, self.run_id, mode, size, group_id=group, ids=ids, greedy=greedy)
        return rollouts

    def _enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Add rollouts to the queue, and return how many of them it knew before."""
        prompt = pinned_prompt(self.settings)
        new = [queued(rollout, self.settings, prompt, priority=int(rollout.mode is Mode.VALIDATE)) for rollout in rollouts]
        return self._queue.enqueue(new)

    def _required_data(self, name: str) -> tuple[str, list[Task]]:
        """Return digest and tasks of the data of a name, from the queue where another process has uploaded it."""
        if name not in self._data:
            tasks = self._store.read(name)
            self._data[name] = digest_of(tasks), tasks
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
                name: stage if isinstance(stage, str) else _stage_reference(name, stage, directory)
                for name, stage in (("evaluator", evaluator), ("environment", environment))
                if stage is not None
            },
            directory=directory,
            environment={variable_of(key): as_variable(value) for key, value in self._given.items()},
            logs=runner.directory / "logs",
            follow=None,
        )

    def _workers(self, work: Work, count: int) -> WorkerProcesses:
        if count < 1:
            raise SettingsError(f"n_workers = {count}: give 1 or more.")
        return WorkerProcesses(work, count, self.settings.runner.drain_seconds)


def _stage_reference(name: str, function: Callable[..., Any], directory: Path) -> str:
    """Return a function's reference in the directory where the agent's modules are looked for.

    Raises:
        AgentError: other processes cannot find it, or not in that directory.
    """
    reference, root = reference_of(function, f"the {name}")
    if root != directory and not is_file(reference):
        raise AgentError(
            f"the {name} {reference} lies below {root}, the agent's modules below {directory}: workers look in one place. Import it in "
            "the agent's file and wrap it in a function there, or name it as a text that the agent's environment can import."
        )
    return reference


def _name(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:32]
