"""Demand of a trainer for groups of rollouts of a run, sent to the queue that hands rollouts out.

In: a demand, the queue's address. Out: the queue's state of it. Invariant: a demand is a level, not an event: stated twice, late or
after a crash, it requests nothing twice, and the queue keeps the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from spangrad.errors import QueueError
from spangrad.http.json_http import ask
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.http.service import queue_service, without_userinfo

if TYPE_CHECKING:
    from spangrad.settings import QueueSettings

_SECONDS = 2.0
"""Longest wait for a response, in seconds."""


def state(queue: QueueSettings, run_id: str, demand: DemandRequest) -> DemandState:
    """Send the demand to the queue at queue.url, and return its response.

    Raises:
        QueueError: the queue refuses, or does not answer.
    """
    if queue.url is None:
        raise QueueError("queue.url is not set: there is no queue to ask.")
    path = f"/v1/runs/{quote(run_id, safe='')}/demand"
    response = ask(queue_service(queue.url, queue.token), "PUT", path, msgspec.json.encode(demand), seconds=_SECONDS)
    try:
        return msgspec.convert(response, DemandState)
    except msgspec.ValidationError as error:
        raise QueueError(
            f"{without_userinfo(queue.url)} answers PUT {path} with something else than a demand ({error}). Is it the queue's?"
        ) from error
