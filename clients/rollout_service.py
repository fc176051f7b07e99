"""Client of `POST /v1/process` with the standard library alone: copy this file beside your trainer (docs/guides/process.md).

In: the queue's URL, requests for rollouts. Out: their trajectories, as dictionaries, each as soon as it is ready. Invariant: a request that
breaks off is sent again under its key, which enqueues nothing; each trajectory is yielded once.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WAIT_SECONDS = 600.0
"""Longest wait of one request, in seconds: the server's limit."""
_PAUSES = (0.5, 15.0)
"""First and longest pause after a failure, in seconds; each is twice the one before."""
_SPARE_SECONDS = 60.0
"""Time of a response beyond its wait, in seconds."""
_MAY_PASS = frozenset({408, 429, 502, 503, 504})
"""Statuses of a server that is busy or away."""


class RolloutServiceError(Exception):
    """The service refuses a request, or stays away."""


class RolloutService:
    """A queue that answers with trajectories."""

    def __init__(self, url: str, token: str | None = None, *, retry_seconds: float = 300.0) -> None:
        """Store the arguments; no request is sent yet.

        Args:
            url: URL of the queue, such as http://127.0.0.1:8190.
            token: value of queue.token. None: the queue asks for none.
            retry_seconds: time for which a service that is away is asked again, in seconds; each new trajectory shows that it is not.
        """
        self._url = url.rstrip("/") + "/v1/process"
        self._headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._retry_seconds = retry_seconds

    def process(
        self, run_id: str, key: str, tasks: Sequence[Mapping[str, Any]], *, seconds: float | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Enqueue rollouts, and yield the trajectory of each as soon as it is ready.

        Args:
            run_id: run of the rollouts.
            key: name of the request within the run: the same one again yields the same trajectories.
            tasks: each with `task_id`, `input` and maybe `rollouts`, `data_source` and `image`.
            seconds: time after which no more is waited for, in seconds; the rollouts go on. None: until all have ended.
            fields: further fields of the request, such as `mode`, `sampling` and `limits`.

        Raises:
            RolloutServiceError: the service refuses the request, or stays away.
        """
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        yielded: set[str] = set()
        pause, away_since = _PAUSES[0], None
        while True:
            wait = max(0.0, min(WAIT_SECONDS, end - time.monotonic()))
            body = json.dumps({"run_id": run_id, "key": key, "tasks": list(tasks), **fields, "wait_seconds": wait}).encode()
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with urllib.request.urlopen(request, timeout=wait + _SPARE_SECONDS) as response:
                    for line in response:
                        message: dict[str, Any] = json.loads(line)
                        if "error" in message:
                            raise ConnectionError(message["error"])
                        if "pending" in message:
                            if not message["pending"] or time.monotonic() >= end:
                                return
                            pause, away_since = _PAUSES[0], None
                            break
                        if message["rollout_id"] not in yielded:
                            yielded.add(message["rollout_id"])
                            pause, away_since = _PAUSES[0], None
                            yield message
                    else:
                        raise ConnectionError("the response broke off")
                continue
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_text(error)[:500]}"
                if error.code not in _MAY_PASS:
                    raise RolloutServiceError(f"{self._url} refuses the request ({reason})") from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
            now = time.monotonic()
            away_since = now if away_since is None else away_since
            if now - away_since >= self._retry_seconds or now >= end:
                raise RolloutServiceError(f"{self._url} does not answer ({reason}). The rollouts go on: send the request again.")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])


def _text(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
