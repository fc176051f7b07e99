"""Groups of tasks: the rollouts of a task, in the form in which the queue takes them.

In: a task, settings. Out: `Rollout`s, and requests to enqueue them. Invariant: rollouts of `spangrad run`, of a trainer's demand and of a
script are pinned, sampled and limited alike; a greedy rollout is not counted in the group size, which is the number of rollouts that may
be trained.
"""

from __future__ import annotations

from collections.abc import Iterator

from spangrad.agent.prompt_store import PromptStore
from spangrad.errors import SettingsError
from spangrad.http.announcements import OWN_SAMPLING, SamplingParameters
from spangrad.http.queue_messages import NewRollout, PinnedPrompt, new_rollout
from spangrad.settings import RunnerSettings, Settings
from spangrad.types import Mode, PromptVersion, Rollout, RolloutKey, Task


def group_of(task: Task, run_id: str, mode: Mode, size: int, *, group_id: str, ids: Iterator[str], greedy: bool = False) -> list[Rollout]:
    """Return the rollouts of a task.

    Args:
        task: input of the agent.
        run_id: run of the rollouts.
        mode: purpose of the rollouts.
        size: number of rollouts of that mode.
        group_id: id of the group, which no other rollouts have.
        ids: ids of the rollouts, of which as many are taken as there are rollouts.
        greedy: add a rollout at temperature 0, the baseline of ReMax; it is the first, since all others wait for its return.
    """
    modes = [(Mode.GREEDY, 1)] * greedy + [(mode, size)] * size
    return [Rollout(RolloutKey(run_id, next(ids), 0), task, of_mode, group_id, group_size) for of_mode, group_size in modes]


def queued(rollout: Rollout, settings: Settings, pinned: PromptVersion | None = None, *, priority: int = 0) -> NewRollout:
    """Convert a rollout to the queue's form, pinned to `pinned`, if any, where its task names no prompt version.

    Rollouts with the highest priority go first.

    Raises:
        SettingsError: `sampling_of` raises it.
    """
    task, runner = rollout.task, settings.runner
    return new_rollout(
        task.task_id,
        task.input,
        rollout.group_id,
        group_size=rollout.group_size,
        mode=rollout.mode,
        rollout_id=rollout.key.rollout_id,
        priority=priority,
        timeout_seconds=runner.timeout_of(task.data_source),
        max_attempts=runner.max_attempts,
        prompt=PinnedPrompt.of(task.prompt or pinned),
        least_sandbox=task.least_sandbox,
        data_source=task.data_source,
        sampling=sampling_of(runner, rollout.mode),
    )


def sampling_of(runner: RunnerSettings, mode: Mode) -> SamplingParameters:
    """Return the sampling parameters that the gateway sets in calls of rollouts of that mode.

    Raises:
        SettingsError: there is no gateway to set them.
    """
    sampling = SamplingParameters(**runner.validation_sampling.model_dump()) if mode is Mode.VALIDATE else OWN_SAMPLING
    if sampling != OWN_SAMPLING and not runner.gateway:
        raise SettingsError(
            "runner.validation_sampling needs the gateway, which alone sets an agent's parameters. Set runner.gateway = true."
        )
    return sampling


def pinned_prompt(settings: Settings) -> PromptVersion | None:
    """Return the published version of the prompt that prompts.pin names. None: it names none.

    Raises:
        SettingsError: there is no queue, which keeps the prompts.
        PromptError: no version is published, or the queue stays unreachable.
    """
    name, queue = settings.prompts.pin, settings.queue
    if name is None:
        return None
    if queue.url is None:
        raise SettingsError("prompts.pin needs queue.url: the queue's server keeps the prompts.")
    return PromptVersion(name, PromptStore(queue.url, queue.token).get(name).version)
