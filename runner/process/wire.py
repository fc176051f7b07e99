"""HTTP messages of POST /v1/process: rollouts that are asked for, and their trajectories.

In, out: frozen structs. Invariant: an unknown field is refused; arrays of a turn are aligned: a logprob and a mask for each response token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from runner.queue.wire import RolloutState
from spangrad.http.announcements import NO_LIMITS, OWN_SAMPLING, CallLimits, SamplingParameters
from spangrad.http.queue_messages import Count, Name, NewRollout, OptionalName, PinnedPrompt, Priority, Seconds, Struct, TaskRow
from spangrad.types import Mode

Key = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
CallbackUrl = Annotated[str, Meta(max_length=2000, pattern=r"^https?://[^\x00\s]+$")]
ROLLOUTS_MOST = 1000
"""Largest number of rollouts of one request."""


class ProcessedTask(TaskRow, frozen=True, kw_only=True):
    """A task, and how often it is to be rolled out; its data source selects its handler, and without one it is the workers' only one."""

    rollouts: Annotated[int, Meta(ge=1, le=ROLLOUTS_MOST)] = 1
    """Rollouts of the task; together they are a group."""
    image: OptionalName = ""
    """Container image of the agent, which runner.container.images of the workers must allow. Empty: the handler's own."""


class RolloutOptions(Struct, frozen=True, kw_only=True):
    """Options that all rollouts of a request or a demand have in common."""

    mode: Mode = Mode.TRAIN
    priority: Priority = 0
    timeout_seconds: Seconds | None = None
    """Time limit of one agent run, in seconds. None: that of the handler of its data source, or runner.timeout_seconds, of the server."""
    max_attempts: Count | None = None
    """Largest number of attempts of a rollout. None: runner.max_attempts of the server."""
    sampling: SamplingParameters = OWN_SAMPLING
    """Sampling parameters that the gateway sets in the policy calls, whatever the agents ask for."""
    limits: CallLimits = NO_LIMITS
    """Limits of each attempt's calls. None of one: the setting of the same name of the worker's runner."""

    def group(
        self, task: TaskRow, group_id: str, ids: Sequence[str], *, image: str = "", prompt: PinnedPrompt | None = None
    ) -> list[NewRollout]:
        """Return the rollouts of a group, by their ids."""
        options = {name: getattr(self, name) for name in RolloutOptions.__struct_fields__}
        of_task: dict[str, Any] = {name: getattr(task, name) for name in TaskRow.__struct_fields__}
        of_task["prompt"] = task.prompt or prompt
        return [NewRollout(**options, **of_task, rollout_id=id_, group_id=group_id, group_size=len(ids), image=image) for id_ in ids]


class ProcessRequest(RolloutOptions, frozen=True, kw_only=True):
    """Body of POST /v1/process."""

    run_id: Name
    key: Key
    """Name of the request: the same one sent again continues to wait for the same rollouts."""
    tasks: Annotated[list[ProcessedTask], Meta(min_length=1, max_length=ROLLOUTS_MOST)]
    prompt: PinnedPrompt | None = None
    """Prompt version that the attempts fetch where their task names none. None: the published one."""
    callback: CallbackUrl | None = None
    """URL that each trajectory is posted to as soon as it is ready, whether or not a client waits. None: there is none."""
    wait_seconds: Annotated[float, Meta(ge=0, le=600)] = 60.0
    """Longest wait for rollouts that have not ended, in seconds; the others are answered as `pending`."""

    def rollouts(self) -> list[NewRollout]:
        """Return the rollouts to enqueue; their ids follow from run, key and place, so that a request sent again enqueues nothing."""
        groups = (
            self.group(
                task,
                f"{self.key}/{place}",
                [f"{self.run_id}/{self.key}/{place}/{number}" for number in range(task.rollouts)],
                image=task.image,
                prompt=self.prompt,
            )
            for place, task in enumerate(self.tasks)
        )
        return [rollout for group in groups for rollout in group]


class TaskDemand(RolloutOptions, frozen=True, kw_only=True):
    """Body of PUT /v1/runs/{run}/tasks/{name}/demand: rollouts of stored tasks, which the server enqueues by itself."""

    groups: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """Number of groups in all, each of the next task, after the last one of the first again. It may rise later. None: each task once."""
    rollouts: Annotated[int, Meta(ge=1, le=ROLLOUTS_MOST)] = 1
    """Rollouts of a group."""


class TaskDemandState(Struct, frozen=True, kw_only=True):
    """Response to PUT and GET /v1/runs/{run}/tasks/{name}/demand."""

    digest: str
    """Digest of the tasks."""
    tasks: int
    groups: int
    """Groups that are demanded in all."""
    enqueued: int
    """Groups that are enqueued by now."""
    rollouts: int
    """Rollouts of a group."""


class TrajectoryReward(Struct, frozen=True):
    """A reward of a rollout."""

    name: str
    role: str
    """Empty: it is that of all roles."""
    value: float
    source: str
    """Origin: `runner`, `evaluation_event`, or a rule."""
    call_id: str
    """Call that earned it. Empty: the rollout as a whole."""


class TrajectoryTurn(Struct, frozen=True):
    """A policy call that may be trained, with the tokens that the engine read and sampled."""

    call_id: str
    turn: int
    agent: str
    policy: str
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """Log probability of each response token under the policy and the temperature that sampled it."""
    loss_mask: list[int]
    """1 for each response token that the policy sampled."""
    versions: list[tuple[int, int]]
    """Response token from which on a policy version sampled, and the version."""
    temperature: float
    finish_reason: str
    tokenizer_hash: str
    trace_id: str
    span_id: str


class TrajectoryDrop(Struct, frozen=True):
    """A policy call that is in no turn."""

    call_id: str
    reason: str
    """One of docs/reference/drops.md."""
    detail: str


class Trajectory(Struct, frozen=True, kw_only=True):
    """A rollout that has ended, with what the store knows of its newest build."""

    rollout_id: str
    run_id: str
    task_id: str
    group_id: str
    group_size: int
    mode: Mode
    state: RolloutState
    failure: str
    """Reason for which the last attempt failed; empty: it succeeded, or there was none."""
    detail: str
    """Explanation of the failure, for people."""
    attempts: int
    built: bool
    """False: the store has no build, since no attempt began, or none came in time; then the turns are not known."""
    build_spec: str
    turns: list[TrajectoryTurn]
    """Turns in the order of the calls; several choices of a call, and calls of several agents, are turns of their own."""
    drops: list[TrajectoryDrop]
    rewards: list[TrajectoryReward]
    total_reward: float | None
    """Sum of the rewards. None: it has none."""
    seconds: float | None
    """Duration of the last attempt, in seconds. None: not known."""
    stage_seconds: dict[str, float]
    """Seconds by stage: init, run and evaluate."""


class ProcessAnswer(Struct, frozen=True, kw_only=True):
    """Response to POST /v1/process."""

    trajectories: list[Trajectory]
    """Trajectories of the rollouts that have ended, in the order of the tasks."""
    pending: list[str]
    """Ids of those that have not: send the same request again."""


class Refusal(Struct, frozen=True):
    """Response to a request that is refused, and the last line of a stream that ends early."""

    error: str
    """Sentence that says what is wrong."""


class StreamEnd(Struct, frozen=True):
    """Last line of a stream."""

    pending: list[str]
    """Ids of the rollouts that have not ended: send the same request again."""


class TrajectoriesQuery(Struct, frozen=True):
    """Query of GET /v1/runs/{run}/tasks/{name}/trajectories."""

    first: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    """First group, from 0."""
    limit: Annotated[int, Meta(ge=1, le=ROLLOUTS_MOST)] = ROLLOUTS_MOST
    """Largest number of groups; 1000 rollouts in all."""
    wait: Annotated[float, Meta(ge=0, le=600)] = 0
    """Longest wait for rollouts that have not ended, in seconds."""
