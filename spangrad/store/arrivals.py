"""Waiting for what arrives in the span store, in place of polls.

In: the store's address, topics. Out: the topics of which something arrived. Invariant: whatever arrives after `wait` has returned ends the
next one, so that a caller that reads the store between two waits misses nothing that was visible when it arrived.

`spangrad store` answers a request when something arrives, or after the request's time. Any other ClickHouse answers 404, and is asked by a
cheap statement at intervals.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from spangrad.errors import StoreError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService, without_userinfo
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

PATH = "/arrivals"
LONGEST_SECONDS = 25.0
"""Longest time that one request waits, in seconds: shorter than proxies wait for a response."""
_RECONNECT_SECONDS = 0.5
_JUST_BEFORE_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_NOT_FOUND = 404
_NEWEST = """
SELECT toStartOfInterval(now(), INTERVAL 10 SECOND) AS bucket, count(), max({table}.IngestedAt)
FROM spangrad_internal.{table}
WHERE {table}.IngestedAt >= bucket - INTERVAL 10 SECOND
"""
"""Query whose answer differs when rows have arrived, also rows that were dated earlier; every 10 s it differs anyway."""


class Topic(StrEnum):
    """Kinds of arrivals in the store."""

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
        """Send nothing yet. A store that is not ours is asked through `client`, by a statement every `poll_seconds`."""
        self._client = client
        self._store = store
        self._topics = tuple(dict.fromkeys(topics))
        self._poll_seconds = poll_seconds
        self._positions: dict[Topic, object] = {}
        self._checked_at = self._arrived_at = float("-inf")
        self.by_events = True
        """False: the store is not ours, and is polled."""

    def wait(self, timeout: float, *topics: Topic) -> frozenset[Topic]:
        """Return the topics of which something arrived since a call returned them, as soon as something did; empty when the time is over.

        The first call returns all topics at once. So does one after the store was restarted, and one while it does not answer, after a
        pause: the caller's next statement reports that.

        Args:
            timeout: longest wait, in seconds. 0: return what has arrived.
            topics: topics to wait for now, of those of the constructor. Empty: all of them.

        Raises:
            StoreError: a statement to a store that is not ours failed.
        """
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            positions = self._ask(topics or self._topics, min(left, LONGEST_SECONDS)) if self.by_events else None
            if positions is None:
                positions = self._poll(topics or self._topics)
            new = frozenset(topic for topic, position in positions.items() if position != self._positions.get(topic))
            self._positions |= positions
            self._checked_at = time.monotonic()
            if new:
                self._arrived_at = self._checked_at
            if new or self._checked_at >= end:
                return new
            if not self.by_events:
                time.sleep(max(0.0, min(self._poll_seconds, end - time.monotonic())))

    def lately(self, seconds: float) -> bool:
        """Return whether a call returned topics within the last so many seconds; it is asked now unless that was done just before.

        Raises:
            StoreError: a statement to a store that is not ours failed.
        """
        if time.monotonic() - self._checked_at > _JUST_BEFORE_SECONDS:
            self.wait(0)
        return time.monotonic() - self._arrived_at < seconds

    def _ask(self, topics: Sequence[Topic], seconds: float) -> Mapping[Topic, object] | None:
        """Return the topics' positions, when one of them changes or the time is over. None: the store is not ours."""
        parts = urllib.parse.urlsplit(self._store.url)
        since = ",".join(str(self._positions.get(topic, "")) for topic in topics)
        query = urllib.parse.urlencode({"topics": ",".join(topics), "since": since, "seconds": f"{seconds:.3f}"})
        url = without_userinfo(urllib.parse.urlunsplit((parts.scheme, parts.netloc, "", "", "")))
        store = RemoteService("the span store", url, self._store.password, StoreError, "Start it with `spangrad store`, or set store.url.")
        try:
            answer = ask(store, "GET", f"{PATH}?{query}", seconds=seconds + _GRACE_SECONDS)
        except StoreError as error:
            self.by_events = error.http_status != _NOT_FOUND
            if not self.by_events:
                return None
            time.sleep(min(seconds, _RECONNECT_SECONDS))
            return {topic: object() for topic in topics}  # which differ from all others
        return {Topic(name): position for name, position in answer["positions"].items()}

    def _poll(self, topics: Sequence[Topic]) -> Mapping[Topic, object]:
        tables = {_TABLES[topic] for topic in topics}
        with store_errors(self._client):
            newest = {table: self._client.query(_NEWEST.format(table=table)).result_rows for table in tables}
        return {topic: newest[_TABLES[topic]] for topic in topics}
