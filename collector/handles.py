"""Sessions for requests: who runs which statement with which settings, at the same time.

In: a statement's session name, database and settings. Out: a handle of the engine, set up so.
Invariant: a handle serves one request at a time, and nothing that a request without a session sets outlives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from collector.clickhouse_request import BadRequestError, Statement
from collector.engine import Handle

MAX_IDLE = 16
"""Handles kept for requests without a session."""
MAX_SESSIONS = 256


class _Equipped:
    """A handle and what was set on it by requests."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.lock = threading.Lock()
        self.database = ""
        self.settings: dict[str, str] = {}
        self.expires = 0.0

    def equip(self, database: str, settings: Mapping[str, str]) -> None:
        """Bring database and settings to what the request names: only the differences cost anything."""
        if self.database != database:
            self.handle.query(f"USE `{database.replace('`', '``')}`")
            self.database = database
        for key in [key for key in self.settings if key not in settings]:
            self.handle.query(f"SET {key} = DEFAULT")
            del self.settings[key]
        for key, value in settings.items():
            if self.settings.get(key) != value:
                quoted = value.replace("\\", "\\\\").replace("'", "\\'")
                self.handle.query(f"SET {key} = '{quoted}'")
                self.settings[key] = value


class Handles:
    """All handles that requests use."""

    def __init__(self, open_handle: Callable[[], Handle]) -> None:
        self._open = open_handle
        self._idle: list[_Equipped] = []
        self._sessions: dict[str, _Equipped] = {}
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, statement: Statement) -> Generator[Handle]:
        """A handle for one statement, waiting while its session is busy.

        Raises:
            BadRequestError: the session must exist and does not, or there are too many.
            EngineRefusedError: the database or a setting is unknown.
        """
        if statement.session is None:
            equipped = self._take(statement)
            keep = False
            try:
                equipped.equip(statement.database, statement.settings)
                keep = not statement.leaves_traces
                yield equipped.handle
            finally:
                self._put(equipped, keep)
        else:
            equipped = self._session(statement.session, statement.session_must_exist)
            with equipped.lock:
                equipped.equip(statement.database, statement.settings)
                try:
                    yield equipped.handle
                finally:
                    equipped.expires = time.monotonic() + statement.session_seconds

    def close(self) -> None:
        """Close every handle."""
        with self._lock:
            for equipped in (*self._idle, *self._sessions.values()):
                equipped.handle.close()
            self._idle.clear()
            self._sessions.clear()

    def _take(self, statement: Statement) -> _Equipped:
        with self._lock:
            for place, equipped in enumerate(self._idle):
                if equipped.database == statement.database and equipped.settings == statement.settings:
                    return self._idle.pop(place)
            if len(self._idle) >= MAX_IDLE:
                return self._idle.pop(0)
        return _Equipped(self._open())

    def _put(self, equipped: _Equipped, keep: bool) -> None:
        if not keep:
            equipped.handle.close()
            return
        with self._lock:
            self._idle.append(equipped)

    def _session(self, name: str, must_exist: bool) -> _Equipped:
        now = time.monotonic()
        with self._lock:
            for other in [key for key, one in self._sessions.items() if one.expires < now and not one.lock.locked()]:
                self._sessions.pop(other).handle.close()
            equipped = self._sessions.get(name)
            if equipped is None and must_exist:
                raise BadRequestError(f"Code: 372. DB::Exception: Session {name} not found. (SESSION_NOT_FOUND)", 372)
            if equipped is None and len(self._sessions) >= MAX_SESSIONS:
                raise BadRequestError(f"Code: 202. DB::Exception: more than {MAX_SESSIONS} sessions. (TOO_MANY_SIMULTANEOUS_QUERIES)", 202)
            if equipped is None:
                equipped = self._sessions[name] = _Equipped(self._open())
            # Held from now on, so that nobody closes it before it is used.
            equipped.expires = now + 60
            return equipped
