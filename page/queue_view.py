"""The queue of rollouts as the page shows it: runs by state, and the rollouts of a state.

In: the queue's HTTP API. Out: plain values for JSON. Invariant: a page that names no queue says so, and shows the rest.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from spangrad.errors import QueueError
from spangrad.http.json_http import ask
from spangrad.http.service import queue_service
from spangrad.settings import QueueSettings

ROWS = 200
_ANSWER_SECONDS = 10.0
STATES = ("queued", "running", "succeeded", "failed", "dead", "cancelled")
"""States of rollouts in the queue."""
UNNAMED = "queue.url is not set: this page reaches no queue. `spangrad run` without it has a queue of its own."


def queue_view(settings: QueueSettings, run: str, state: str, order: str, after: int) -> dict[str, Any]:
    """Return runs with their counts, and rollouts of a run and a state (empty: any), `newest` or `oldest` first; later pages lack the runs.

    Raises:
        QueueError: the queue refuses, or does not answer.
    """
    if settings.url is None:
        return {"problem": UNNAMED, "runs": [], "rows": [], "after": None}
    query = {"limit": ROWS, "after": after, "order": order, **({"run": run} if run else {}), **({"state": state} if state else {})}
    page = _ask(settings, f"/v1/rollouts?{urlencode(query)}")
    rollouts = page["rollouts"]
    runs = [] if after else _ask(settings, "/v1/runs")["runs"]
    return {"runs": runs, "rows": rollouts, "after": page["cursor"] if len(rollouts) == ROWS else None}


def queued_rollout(settings: QueueSettings, rollout: str) -> dict[str, Any]:
    """Return a rollout as the queue has it; without a state where the queue does not know it, or none is named.

    Raises:
        QueueError: the queue refuses, or does not answer.
    """
    if settings.url is None:
        return {"state": None}
    try:
        return _ask(settings, f"/v1/rollouts/{quote(rollout, safe='')}")
    except QueueError as error:
        if error.http_status == 404:
            return {"state": None}
        raise


def _ask(settings: QueueSettings, path: str) -> Any:
    return ask(queue_service(settings.url or "", settings.token), "GET", path, seconds=_ANSWER_SECONDS)
