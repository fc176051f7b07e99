"""The queue of rollouts, asked by code without an event loop and without the server's packages.

In: where it is, its token. Out: its answers, as JSON. Invariant: what was not answered is asked again while there is patience; everything
that is asked for here may be asked for twice.
"""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from spangrad.errors import QueueError
from spangrad.http.json_http import ask, refusal

if TYPE_CHECKING:
    from pydantic import SecretStr

PATIENCE_SECONDS = 60.0
"""That a queue may be away: long enough for it to be started again."""
_ANSWER_SECONDS = 120.0
_PAUSE_SECONDS = 0.5
_AT_ONCE = 2000
"""Rollouts in one request."""
_PAGE = 1000


class QueueHttp:
    """One queue, and one run of it."""

    def __init__(self, url: str, token: SecretStr | None, run_id: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Ask nothing yet.

        Args:
            url: where it is.
            token: that it asks for. None: nothing.
            run_id: of which all of it is asked.
            patience_seconds: how long a queue that does not answer is asked again.
        """
        self.url = url.rstrip("/")
        self.run_id = run_id
        self._token = token
        self._patience = patience_seconds

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None, *, missing: Any = None) -> Any:
        """Ask, below the run's own path (`/...`) or anywhere (`/v1/...`).

        Args:
            method: of HTTP.
            path: what to ask for.
            body: with it. None: nothing.
            missing: the answer where the queue says that there is none (404); None: that is an error.

        Raises:
            QueueError: it refuses, or stays away.
        """
        whole = path if path.startswith("/v1/") else f"/v1/runs/{quote(self.run_id, safe='')}{path}"
        end = time.monotonic() + self._patience
        while True:
            try:
                return ask(self.url, self._token, method, whole, body, _ANSWER_SECONDS)
            except urllib.error.HTTPError as error:
                if error.code == 404 and missing is not None:
                    return missing
                problem = QueueError(f"the queue at {self.url} refuses {method} {whole} ({error.code}): {refusal(error)}")
                if error.code != 503:
                    raise problem from None
            except (OSError, ValueError) as error:  # URLError, timeouts, half an answer, and something else than JSON
                said = getattr(error, "reason", error)
                problem = QueueError(f"no queue answers at {self.url} ({said}). Start it with `spangrad queue`, or name its address.")
            if time.monotonic() > end:
                raise problem
            time.sleep(_PAUSE_SECONDS)

    def enqueue(self, rollouts: Sequence[Mapping[str, object]]) -> int:
        """Add rollouts that have ids; how many of them were known before."""
        known = 0
        for start in range(0, len(rollouts), _AT_ONCE):
            body = {"run_id": self.run_id, "rollouts": list(rollouts[start : start + _AT_ONCE])}
            known += self.ask("POST", "/v1/rollouts", body)["known"]
        return known

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """How a rollout stands; empty where nobody knows it."""
        return self.ask("GET", f"/v1/rollouts/{quote(rollout_id, safe='')}", missing={})

    def states(self) -> dict[str, int]:
        """How many rollouts of the run stand how."""
        return self.ask("GET", "")["states"]

    def cursor(self) -> int:
        """The newest place in the order in which the run's rollouts ended."""
        return self.ask("GET", "")["cursor"]

    def ended(self, after: int, wait_seconds: float) -> tuple[list[dict[str, Any]], int]:
        """The run's rollouts that ended after a cursor, in order, and the next cursor; where there is none, after so long."""
        page = self.ask("GET", f"/ended?{urlencode({'after': after, 'limit': _PAGE, 'wait': wait_seconds})}")
        return page["rollouts"], page["cursor"]

    def all_ended(self) -> Iterator[dict[str, Any]]:
        """All of the run's rollouts that have ended, in order."""
        after = 0
        while True:
            page, after = self.ended(after, 0)
            if not page:
                return
            yield from page

    def demand(self) -> dict[str, Any]:
        """What trainers want of the run."""
        return self.ask("GET", "/demand")
