"""Demand of a trainer for groups of rollouts of a run, sent to the queue that hands rollouts out.

In: a `Demand`, the runner's settings. Out: the queue's state of it. Invariant: a demand is a level, not an event: stated twice, late or
after a crash, it requests nothing twice, and the queue keeps the largest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from spangrad.errors import QueueError
from spangrad.http.json_http import ask
from spangrad.http.service import queue_service, without_userinfo

if TYPE_CHECKING:
    from spangrad.settings import QueueSettings

_SECONDS = 2.0
"""Longest wait for a response, in seconds."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a branch of a policy for groups of a run."""

    policy: str
    branch: str
    groups: int
    """Number of groups of mode train, in total since the run began."""
    oldest_version: int
    """Oldest version whose calls may still be trained: calls of older ones come too late."""
    filled: int
    """Number of those groups that are spent, or complete in the trainer's hands. Equal to `groups`: no other group is waited for."""


@dataclass(frozen=True, slots=True)
class Stated:
    """State of the queue's groups of mode train of a run."""

    groups: int
    """Largest number of groups that any branch has requested; 0: none was requested."""
    enqueued: int
    """Number of groups enqueued so far, without those that were cancelled."""


def state(queue: QueueSettings, run_id: str, demand: Demand) -> Stated:
    """Send the demand to the queue at queue.url, and return its response.

    Raises:
        QueueError: the queue refuses, or does not answer.
    """
    if queue.url is None:
        raise QueueError("queue.url is not set: there is no queue to ask.")
    path = f"/v1/runs/{quote(run_id, safe='')}/demand"
    response = ask(queue_service(queue.url, queue.token), "PUT", path, asdict(demand), seconds=_SECONDS)
    try:
        return Stated(int(response["groups"]), int(response["enqueued"]))
    except (ValueError, KeyError, TypeError) as error:
        raise QueueError(
            f"{without_userinfo(queue.url)} answers PUT {path} with something else than a demand ({error!r}). Is it the queue's?"
        ) from error
