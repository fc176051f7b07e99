"""Which rollouts a task is given: its group, and what the group is compared with.

In: tasks, how many rollouts each gets. Out: `Rollout`s, a group a task. Invariant: rollouts of a group share its id and nothing else
does; a greedy rollout is not counted in the group's size, which is that of what may be trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.ids import ordered_ids
from spangrad.types import Mode, Rollout, RolloutKey, Task


def rollouts_of(tasks: Sequence[Task], run_id: str, mode: Mode, group_size: int, *, greedy: bool = False) -> list[Rollout]:
    """Rollouts of tasks, each with a new group.

    Args:
        tasks: what to ask the agent.
        run_id: that they belong to.
        mode: what they are for.
        group_size: rollouts a task.
        greedy: one more of each task, at temperature 0: what ReMax compares the others with.

    Returns:
        By task; a task's greedy rollout first, since all others wait for its return.
    """
    groups, ids = ordered_ids(), ordered_ids()
    found: list[Rollout] = []
    for task, group in zip(tasks, groups, strict=False):
        if greedy:
            found.append(Rollout(RolloutKey(run_id, next(ids), 0), task, Mode.GREEDY, group, 1))
        found += [Rollout(RolloutKey(run_id, next(ids), 0), task, mode, group, group_size) for _ in range(group_size)]
    return found
