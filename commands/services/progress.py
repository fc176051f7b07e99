"""Progress of the training, from the span store.

In: the address of the store. Out: `TrainingProgress`. Invariant: a store that is away makes the progress unknown, never an error,
and a supervisor does not wait for one that hangs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from spangrad.errors import StoreError
from spangrad.settings import Settings
from spangrad.store.built_rollouts import untrained_sql
from spangrad.store.clickhouse import connect, store_errors
from spangrad.supervisor.status_text import TrainingProgress

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_SECONDS = 5.0
"""Interval of the readings, in seconds."""
_STEP = """
SELECT Version, Return, Metrics['seconds_idle'] / nullIf(Metrics['seconds_idle'] + Metrics['seconds_step'], 0)
FROM spangrad.steps WHERE Policy = {policy:String} AND Branch = {branch:String}
ORDER BY Version DESC LIMIT 1"""


class ProgressReader:
    """Reader of the progress from the store."""

    def __init__(self, settings: Settings) -> None:
        """Store the settings; the first reading connects."""
        self._settings = settings
        self._client: Client | None = None
        self._due = 0.0
        self._reading: threading.Thread | None = None
        self._is_late = False
        self._progress: TrainingProgress | None = None

    def read(self) -> TrainingProgress | None:
        """Return the progress. None: the store does not answer."""
        try:
            self._progress = self._query()
        except StoreError:
            self._client, self._progress = None, None
        return self._progress

    def newest(self) -> TrainingProgress | None:
        """Return the progress as it was read last, without waiting: a thread reads it every `_SECONDS`. None: none was, or it is late."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _SECONDS
            self._is_late = bool(self._reading and self._reading.is_alive())
            if not self._is_late:
                self._reading = threading.Thread(target=self.read, name="progress", daemon=True)
                self._reading.start()
        return None if self._is_late else self._progress

    def _query(self) -> TrainingProgress:
        trainer, store = self._settings.trainer, self._settings.store
        self._client = client = self._client or connect(store)
        with store_errors(client):
            steps = client.query(_STEP, parameters={"policy": trainer.policy, "branch": trainer.branch}).result_rows
            untrained = client.query(untrained_sql(), parameters={"run": trainer.run_id}).result_rows[0][0]
        version, mean_return, idle_share = steps[0] if steps else (None, None, None)
        return TrainingProgress(untrained, version, mean_return, idle_share)
