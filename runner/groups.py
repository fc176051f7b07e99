"""Groups: the rollouts of a task that share a baseline, and the greedy rollout that they may be compared with.

In: tasks, and the number of rollouts of each. Out: `Rollout`s, one group per task, and their form in the queue. Invariant: the rollouts
of a group share its id, and no other rollout has it; a greedy rollout is not counted in the group size, which is the number of rollouts
that may be trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.ids import ordered_ids
from runner.queue.client import new_rollout
from runner.queue.wire import NewRollout
from spangrad.errors import SettingsError
from spangrad.http.announcements import OWN_SAMPLING, SamplingParameters
from spangrad.settings import RunnerSettings, Settings
from spangrad.settings.trainer_learning import Estimator
from spangrad.types import Mode, Rollout, RolloutKey, Task

_NOT_COMPARED: frozenset[Estimator] = frozenset({"gae", "reinforce_plus_plus"})
"""Estimators that compare no rollouts of a group with each other."""


def cannot_be_trained(estimator: Estimator, group_size: int, dead: Mapping[Mode, int]) -> bool:
    """Return whether nothing of a group can be trained, whatever becomes of its rollouts that have not ended.

    A dead rollout has no calls to train and no return. Two others must be left to be compared with each other, or one, where it is compared
    with none or with the greedy rollout. Equal returns decide nothing before the last rollout ends, which may differ.

    Args:
        estimator: trainer.credit.estimator.
        group_size: number of rollouts that may be trained.
        dead: number of rollouts whose attempts all failed, by mode.
    """
    left = group_size - dead.get(Mode.TRAIN, 0)
    if estimator == "remax":
        return left < 1 or dead.get(Mode.GREEDY, 0) > 0
    return left < (1 if estimator in _NOT_COMPARED else 2)


def rollouts_of(tasks: Sequence[Task], run_id: str, mode: Mode, group_size: int, *, greedy: bool = False) -> list[Rollout]:
    """Return the rollouts of tasks, each task with a new group.

    Args:
        tasks: inputs of the agent.
        run_id: run of the rollouts.
        mode: purpose of the rollouts.
        group_size: rollouts per task.
        greedy: add one rollout per task at temperature 0, the baseline of ReMax.

    Returns:
        By task; a task's greedy rollout first, since all others wait for its return.
    """
    groups, ids = ordered_ids(), ordered_ids()
    rollouts: list[Rollout] = []
    for task, group in zip(tasks, groups, strict=False):
        if greedy:
            rollouts.append(Rollout(RolloutKey(run_id, next(ids), 0), task, Mode.GREEDY, group, 1))
        rollouts += [Rollout(RolloutKey(run_id, next(ids), 0), task, mode, group, group_size) for _ in range(group_size)]
    return rollouts


def queued(rollout: Rollout, settings: Settings) -> NewRollout:
    """Convert a rollout to the queue's form."""
    return new_rollout(
        rollout.task.task_id,
        rollout.task.input,
        rollout.group_id,
        group_size=rollout.group_size,
        mode=rollout.mode,
        rollout_id=rollout.key.rollout_id,
        timeout_seconds=settings.runner.timeout_of(rollout.task.data_source),
        max_attempts=settings.runner.max_attempts,
        prompt=rollout.task.prompt,
        least_sandbox=rollout.task.least_sandbox,
        data_source=rollout.task.data_source,
        sampling=_sampling(settings.runner, rollout.mode),
    )


def _sampling(runner: RunnerSettings, mode: Mode) -> SamplingParameters:
    """Return the sampling parameters that the gateway sets.

    Raises:
        SettingsError: there is no gateway to set them.
    """
    sampling = SamplingParameters(**runner.validation_sampling.model_dump()) if mode is Mode.VALIDATE else OWN_SAMPLING
    if sampling != OWN_SAMPLING and not runner.gateway:
        raise SettingsError(
            "runner.validation_sampling needs the gateway, which alone sets an agent's parameters. Set runner.gateway = true."
        )
    return sampling
