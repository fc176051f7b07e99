"""Groups: the rollouts of a task that share a baseline, and the greedy rollout that they may be compared with.

In: tasks, and the number of rollouts of each. Out: `Rollout`s, one group per task. Invariant: the rollouts of a group share its id, and no
other rollout has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.ids import ordered_ids
from spangrad.client.task_groups import group_of
from spangrad.settings.trainer_learning import Estimator
from spangrad.types import Mode, Rollout, Task

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

    With `greedy`, a task has one rollout more, at temperature 0, the baseline of ReMax: its first, since all others wait for its return.
    """
    groups, ids = ordered_ids(), ordered_ids()
    return [
        rollout
        for task, group in zip(tasks, groups, strict=False)
        for rollout in group_of(task, run_id, mode, group_size, group_id=group, ids=ids, greedy=greedy)
    ]
