"""Messages from clients and workers to the queue: new rollouts, and the demand for groups.

In, out: frozen structs. Invariant: an unknown field is refused, and so is a value without a meaning.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Raw

from spangrad.http.announcements import NO_LIMITS, OWN_SAMPLING, CallLimits, SamplingParameters
from spangrad.types import Mode, PromptVersion, SandboxRung

ID_CHARACTERS = 512
"""Length of the longest id or name that requests may hold, in characters."""
NO_NULL = r"^[^\x00]*$"
"""Pattern of texts without a null character, which PostgreSQL cannot store: it would fail the transaction of all requests that share it."""
Name = Annotated[str, Meta(min_length=1, max_length=ID_CHARACTERS, pattern=NO_NULL)]
OptionalName = Annotated[str, Meta(max_length=ID_CHARACTERS, pattern=NO_NULL)]
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the messages."""


class PinnedPrompt(Struct, frozen=True):
    """Prompt version that attempts fetch under the prompt's name."""

    name: Name
    version: Annotated[int, Meta(ge=1, lt=2**31)]
    """Number of the version, from 1."""

    @classmethod
    def of(cls, prompt: PromptVersion | None) -> Self | None:
        """Return a prompt version in this form. None: there is none."""
        return prompt and cls(prompt.name, prompt.version)


class TaskRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task."""

    task_id: Name
    input: Raw
    """Input of the agent: any JSON value, kept as it was written."""
    prompt: PinnedPrompt | None = None
    """Prompt version that attempts fetch under the prompt's name. None: the one that the whole request names, else the published one."""
    least_sandbox: SandboxRung | None = None
    """Weakest kind of sandbox that attempts may run in; a worker that has a weaker one refuses. None: any, and none as well."""
    data_source: OptionalName = ""
    """Source of the task, which selects the handler of its attempts. Empty: none is named, and its worker's only one is meant."""


class NewRollout(TaskRow, frozen=True, kw_only=True):
    """A rollout to enqueue."""

    group_id: Name
    group_size: Count = 1
    mode: Mode = Mode.TRAIN
    rollout_id: Name | None = None
    """None: the queue assigns an id, and a request that is sent twice enqueues twice. A rollout with a known id stays as it is; a request
    that gives that id to another task or input is refused."""
    priority: Priority = 0
    """Rollouts with the highest priority go first; among equals the oldest."""
    timeout_seconds: Seconds | None = None
    """Time limit of one agent run, in seconds, from its begin, else its hand-out. None: its handler's or runner.timeout_seconds."""
    max_attempts: Count | None = None
    """Largest number of attempts. None: runner.max_attempts of the server."""
    sampling: SamplingParameters = OWN_SAMPLING
    """Sampling parameters of its calls to engines, which the gateway sets."""
    limits: CallLimits = NO_LIMITS
    """Limits of each attempt's calls. None of one: runner.max_calls and runner.max_output_tokens of its worker."""
    image: OptionalName = ""
    """Container image of its agent, which runner.container.images of its worker must allow. Empty: the handler's own."""


def new_rollout(task_id: str, task_input: object, group_id: str, **facts: Any) -> NewRollout:
    """Create a rollout to enqueue; its input is any value that `json` writes, `facts` are further fields of NewRollout."""
    return NewRollout(task_id=task_id, input=Raw(json.dumps(task_input, ensure_ascii=False).encode()), group_id=group_id, **facts)


class DemandRequest(Struct, frozen=True, kw_only=True):
    """Body of PUT /v1/runs/{run}/demand: the demand of one branch."""

    policy: Name
    branch: Name
    groups: Annotated[int, Meta(ge=0, lt=2**53)]
    """Demanded groups of mode train, in total since the run's beginning."""
    oldest_version: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """Oldest policy version whose calls the branch can still train. None: the branch does not report it."""
    filled: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    """Groups that the trainer has spent or received whole. Equal to `groups`: the demand is met."""


class DemandState(Struct, frozen=True, kw_only=True):
    """Demand for a run: response to PUT and GET /v1/runs/{run}/demand."""

    groups: int
    """Largest demand of all branches, in groups."""
    enqueued: int
    """Groups of mode train that were enqueued in the run, except those with a cancelled rollout."""
    cancelled: int
    """Groups of mode train with a cancelled rollout."""
    branches: list[DemandRequest]
