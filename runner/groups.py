"""Groups: the rollouts of a task that share a baseline, and the greedy rollout that they may be compared with.

In: tasks, and the number of rollouts of each. Out: `Rollout`s, one group per task. Invariant: the rollouts of a group share its id, and no
other rollout has it; a greedy rollout is not counted in the group size, which is the number of rollouts that may be trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.ids import ordered_ids
from spangrad.types import Mode, Rollout, RolloutKey, Task


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
