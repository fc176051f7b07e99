"""Client of the queue of rollouts, for code without an event loop and without the server's packages.

Invariant: a request without a response is retried for a bounded time; every request of this module may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgspec

from spangrad.errors import QueueError
from spangrad.http.json_http import ask
from spangrad.http.queue_messages import DemandState
from spangrad.http.service import queue_service, without_userinfo

if TYPE_CHECKING:
    from pydantic import SecretStr

    from spangrad.http.queue_messages import DemandRequest, NewRollout
    from spangrad.settings import QueueSettings

RETRY_SECONDS = 60.0
"""Time for which requests are retried while the queue is unreachable, in seconds: long enough for a restart."""
OPEN_STATES = ("queued", "running")
"""States of rollouts that have not ended, in the order in which a rollout has them."""
_ANSWER_SECONDS = 120.0
_DEMAND_SECONDS = 2.0
"""Longest wait of a trainer for the answer to its demand, in seconds."""
_AT_ONCE = 2000
"""Largest number of rollouts in one request."""
_PAGE = 1000


class QueueHttp:
    """Client of one run of one queue."""

    def __init__(
        self,
        url: str,
        token: SecretStr | None,
        run_id: str,
        *,
        retry_seconds: float = RETRY_SECONDS,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        """Store the arguments; no request is sent yet.

        Args:
            url: URL of the queue; the attribute is without user and password, for texts.
            token: token that the queue requires. None: it requires none.
            run_id: run of all requests.
            retry_seconds: time for which requests are retried while the queue does not answer, in seconds.
            answer_seconds: time limit of one try, in seconds.
        """
        self.url = without_userinfo(url.rstrip("/"))
        self.run_id = run_id
        self._service = queue_service(url, token, retry_seconds)
        self._answer_seconds = answer_seconds

    def ask(self, method: str, path: str, body: Mapping[str, object] | bytes | None = None, *, missing: Any = None) -> Any:
        """Send a request below the run's own path (`/...`) or anywhere (`/v1/...`).

        The body is an object, or encoded as JSON. `missing` is the value to return for status 404; None: that is an error.

        Raises:
            QueueError: the queue refuses, or stays unreachable.
        """
        whole = path if path.startswith("/v1/") else f"/v1/runs/{quote(self.run_id, safe='')}{path}"
        try:
            return ask(self._service, method, whole, body, seconds=self._answer_seconds)
        except QueueError as error:
            if error.http_status == 404 and missing is not None:
                return missing
            raise

    def enqueue(self, rollouts: Sequence[NewRollout]) -> int:
        """Add rollouts that have ids, and return how many of them were known before."""
        known = 0
        for start in range(0, len(rollouts), _AT_ONCE):
            body = msgspec.json.encode({"run_id": self.run_id, "rollouts": rollouts[start : start + _AT_ONCE]})
            known += self.ask("POST", "/v1/rollouts", body)["known"]
        return known

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return the state of a rollout; empty where the queue does not know it."""
        return self.ask("GET", f"/v1/rollouts/{quote(rollout_id, safe='')}", missing={})

    def states(self) -> dict[str, int]:
        """Return the number of the run's rollouts in each state."""
        return self.ask("GET", "")["states"]

    def open_ids(self) -> set[str]:
        """Return the ids of the run's rollouts that have not ended."""
        ids = set[str]()
        for state in OPEN_STATES:
            after: int | None = 0
            while after is not None:
                query = {"run": self.run_id, "state": state, "after": after, "limit": _PAGE}
                page = self.ask("GET", f"/v1/rollouts?{urlencode(query)}")
                ids.update(rollout["rollout_id"] for rollout in page["rollouts"])
                after = page["cursor"] if page["rollouts"] else None
        return ids

    def cursor(self) -> int:
        """Return the newest cursor in the order in which the run's rollouts ended."""
        return self.ask("GET", "")["cursor"]

    def ended(self, after: int, wait_seconds: float) -> tuple[list[dict[str, Any]], int]:
        """Return the run's rollouts that ended after a cursor, in order, and the next cursor; waits for one at most `wait_seconds`."""
        page = self.ask("GET", f"/ended?{urlencode({'after': after, 'limit': _PAGE, 'wait': wait_seconds})}")
        return page["rollouts"], page["cursor"]

    def demand(self) -> dict[str, Any]:
        """Return the trainers' demand for groups of the run."""
        return self.ask("GET", "/demand")


def state_demand(queue: QueueSettings, run_id: str, demand: DemandRequest) -> DemandState:
    """Send a trainer's demand to the queue at queue.url, and return its state.

    A demand is a level, not an event: stated twice, late or after a crash, it requests nothing twice, and the queue keeps the largest.

    Raises:
        QueueError: the queue refuses, or does not answer.
    """
    if queue.url is None:
        raise QueueError("queue.url is not set: there is no queue to ask.")
    path = f"/v1/runs/{quote(run_id, safe='')}/demand"
    client = QueueHttp(queue.url, queue.token, run_id, retry_seconds=0, answer_seconds=_DEMAND_SECONDS)
    response = client.ask("PUT", path, msgspec.json.encode(demand))
    try:
        return msgspec.convert(response, DemandState)
    except msgspec.ValidationError as error:
        raise QueueError(f"{client.url} answers PUT {path} with something else than a demand ({error}). Is it the queue's?") from error
