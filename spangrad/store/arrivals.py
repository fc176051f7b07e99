"""Waiting for what arrives in the span store, in place of polls.

In: the store's address, topics. Out: the topics of which something arrived. Invariant: whatever arrived after `wait` has returned ends the
next one, so that a caller that reads the store between two waits misses nothing that was visible when it arrived.

`spangrad store` answers a request when something arrives, or after the request's time. Any other ClickHouse answers 404, and is asked by a
cheap statement at intervals.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from spangrad.http.service import bearer
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

PATH = "/arrivals"
LONGEST_SECONDS = 25.0
"""Longest time that one request waits, in seconds: shorter than proxies wait for a response."""
_RECONNECT_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_NOT_FOUND = 404
_NEWEST = """
SELECT toStartOfInterval(now(), INTERVAL 10 SECOND) AS bucket, count(), max({table}.IngestedAt)
FROM spangrad_internal.{table}
WHERE {table}.IngestedAt >= bucket - INTERVAL 10 SECOND
"""
"""Query whose answer differs when rows have arrived, also rows that were dated earlier; every 10 s it differs anyway."""


class Topic(StrEnum):
    """What arrives in the store."""

    ROOTS = "roots"
    """Root spans of attempts, which end rollouts."""
    SPANS = "spans"
    """Any spans or log records."""
    BUILDS = "builds"
    """Builds of rollouts, with all their transitions, drops and rewards."""


_TABLES = {Topic.ROOTS: "rollout_spans", Topic.SPANS: "rollout_spans", Topic.BUILDS: "builds"}


class Arrivals:
    """Waits for arrivals of some topics; for one thread."""

    def __init__(self, client: Client, store: StoreSettings, topics: Iterable[Topic], poll_seconds: float = 0.2) -> None:
        """Send nothing yet.

        Args:
            client: client of the store, for statements where it is not ours.
            store: settings of the store.
            topics: topics to wait for.
            poll_seconds: time between two statements to a store that is not ours, in seconds.
        """
        self._client = client
        self._store = store
        self._topics = tuple(dict.fromkeys(topics))
        self._poll_seconds = poll_seconds
        self._position = ""
        self._newest: dict[str, object] = {}
        self.by_events = True
        """False: the store is not ours, and is polled."""

    def wait(self, timeout: float) -> frozenset[Topic]:
        """Return the topics of which something arrived since the last call, as soon as something did; empty when the time is over.

        The first call returns all topics at once. So does one after the store was restarted, and one while it does not answer, after a
        pause: the caller's next statement reports that.

        Args:
            timeout: longest wait, in seconds. 0: return what has arrived.

        Raises:
            StoreError: a statement to a store that is not ours failed.
        """
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            new = self._ask(min(left, LONGEST_SECONDS)) if self.by_events else self._poll(min(left, self._poll_seconds))
            if new or time.monotonic() >= end:
                return new

    def _ask(self, seconds: float) -> frozenset[Topic]:
        parts = urllib.parse.urlsplit(self._store.url)
        query = urllib.parse.urlencode({"topics": ",".join(self._topics), "since": self._position, "seconds": f"{seconds:.3f}"})
        token = self._store.token or self._store.read_token
        secret = token.get_secret_value() if token else urllib.parse.unquote(parts.password or "")
        netloc = parts.netloc.rpartition("@")[2]
        url = urllib.parse.urlunsplit((parts.scheme, netloc, PATH, query, ""))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=bearer(secret)), timeout=seconds + _GRACE_SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            self.by_events = error.code != _NOT_FOUND
            return frozenset() if error.code == _NOT_FOUND else self._pause(seconds)
        except (OSError, ValueError):
            return self._pause(seconds)
        self._position = answer["position"]
        return frozenset(Topic(name) for name in answer["topics"])

    def _pause(self, seconds: float) -> frozenset[Topic]:
        """Wait a little for a store that does not answer; all of its topics may have arrived when it does."""
        self._position = ""
        time.sleep(min(seconds, _RECONNECT_SECONDS))
        return frozenset(self._topics)

    def _poll(self, seconds: float) -> frozenset[Topic]:
        newest = {table: self._state(table) for table in {_TABLES[topic] for topic in self._topics}}
        new = frozenset(topic for topic in self._topics if newest[_TABLES[topic]] != self._newest.get(_TABLES[topic]))
        self._newest = newest
        if not new:
            time.sleep(seconds)
        return new

    def _state(self, table: str) -> object:
        with store_errors(self._store.url):
            return self._client.query(_NEWEST.format(table=table)).result_rows
