"""Session pool: handles of the embedded database for concurrent requests, each with its own settings.

Invariant: a handle serves one request at a time, and no setting of a request outlives it. A reader's handle can change nothing, not even
its own settings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from collector.auth import TokenRole
from collector.database import HANDLE_SETTINGS, EngineRefusedError, Handle, quoted_name
from collector.sql.errors import BadRequestError
from collector.sql.external_data import drop_tables, load_tables
from collector.sql.request import Statement

MAX_IDLE = 16
"""Most idle handles kept for requests without a session; half of them for writers before one is configured anew."""
MAX_SESSIONS = 256
SESSION_WAIT_SECONDS = 1.0
"""Longest time that a request waits for its session while another request uses it, which may be ending."""


class _ConfiguredHandle:
    """A handle, with the SQL database and the settings that requests set on it."""

    def __init__(self, handle: Handle, role: TokenRole) -> None:
        self.handle = handle
        self.role = role
        self.lock = threading.Lock()
        self.requests = 0
        """Number of requests that use the session or wait for it: while there are any it is not closed."""
        self.database = ""
        self.settings: dict[str, str] = {}
        self.expires = 0.0

    def configure(self, database: str, settings: Mapping[str, str]) -> None:
        """Set the SQL database and the settings that the request names; only differences cost time."""
        if self.database != database:
            self.handle.query(f"USE {quoted_name(database)}")
            self.database = database
        for key in [key for key in self.settings if key not in settings]:
            self.handle.query(f"SET {key} = {HANDLE_SETTINGS.get(key, 'DEFAULT')}")
            del self.settings[key]
        for key, value in settings.items():
            if self.settings.get(key) != value:
                self._set(key, value)
                self.settings[key] = value

    def restrict(self, readonly: str) -> None:
        """Make the handle read-only for good; must be set last, since it cannot be reset."""
        self._set("readonly", readonly)

    def _set(self, key: str, value: str) -> None:
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        self.handle.query(f"SET {key} = '{quoted}'")


class SessionPool:
    """Pool of the handles that requests use."""

    def __init__(self, open_handle: Callable[[], Handle]) -> None:
        self._open = open_handle
        self._idle: list[_ConfiguredHandle] = []
        self._sessions: dict[str, _ConfiguredHandle] = {}
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, statement: Statement, role: TokenRole) -> Generator[Handle]:
        """Lend a handle for one statement. Readers have no sessions: there is nothing that they could keep there.

        Raises:
            BadRequestError: the session is busy, or must exist and does not, or there are too many.
            EngineRefusedError: the SQL database, a setting or an external table is refused.
        """
        self._close_expired()
        if role is TokenRole.READER:
            with self._reading(statement) as handle:
                yield handle
        elif statement.session is None:
            configured = self._writing(statement)
            keep = False
            try:
                load_tables(configured.handle, statement.tables)
                if readonly := statement.settings.get("readonly"):
                    configured.restrict(readonly)
                keep = not (statement.leaves_traces or statement.tables or readonly)
                yield configured.handle
            finally:
                self._put(configured, keep)
        else:
            with self._in_session(statement.session, statement) as handle:
                yield handle

    @contextmanager
    def _in_session(self, name: str, statement: Statement) -> Generator[Handle]:
        """Lend a session's handle. A request for `readonly` does not restrict it, since that could not be reset."""
        with self._session(name, statement.session_must_exist) as configured:
            if not configured.lock.acquire(timeout=SESSION_WAIT_SECONDS):
                raise BadRequestError(373, f"Session {name} is locked by a concurrent client.", "SESSION_IS_LOCKED")
            try:
                configured.configure(statement.database, _revocable(statement.settings))
                try:
                    load_tables(configured.handle, statement.tables)
                    yield configured.handle
                finally:
                    drop_tables(configured.handle, statement.tables)
            finally:
                configured.expires = time.monotonic() + statement.session_seconds
                configured.lock.release()

    @contextmanager
    def _reading(self, statement: Statement) -> Generator[Handle]:
        if statement.session_must_exist:
            raise BadRequestError(372, f"Session {statement.session} not found.", "SESSION_NOT_FOUND")
        matching = None if statement.tables else self._matching(TokenRole.READER, statement.database, statement.settings)
        configured = matching or _ConfiguredHandle(self._open(), TokenRole.READER)
        keep = matching is not None
        try:
            if matching is None:
                configured.configure(statement.database, statement.settings)
                load_tables(configured.handle, statement.tables)
                configured.restrict("1")
                keep = not statement.tables
            yield configured.handle
        finally:
            self._put(configured, keep)

    def close(self) -> None:
        """Close every handle."""
        with self._lock:
            for configured in (*self._idle, *self._sessions.values()):
                configured.handle.close()
            self._idle.clear()
            self._sessions.clear()

    def _matching(self, role: TokenRole, database: str, settings: Mapping[str, str]) -> _ConfiguredHandle | None:
        with self._lock:
            for index, configured in enumerate(self._idle):
                if (configured.role, configured.database, configured.settings) == (role, database, settings):
                    return self._idle.pop(index)
        return None

    def _writing(self, statement: Statement) -> _ConfiguredHandle:
        """Return a writer's handle with the statement's SQL database and settings, except `readonly`."""
        database, settings = statement.database, _revocable(statement.settings)
        if matching := self._matching(TokenRole.WRITER, database, settings):
            return matching
        if used := self._used():
            try:
                used.configure(database, settings)
            except EngineRefusedError:
                # Settings of an earlier request may be the cause, and cannot always be reset: try a fresh handle.
                used.handle.close()
            else:
                return used
        new_handle = _ConfiguredHandle(self._open(), TokenRole.WRITER)
        try:
            new_handle.configure(database, settings)
        except EngineRefusedError:
            new_handle.handle.close()
            raise
        return new_handle

    def _used(self) -> _ConfiguredHandle | None:
        """Return a writer's idle handle, with any settings; None while more of them may be opened."""
        with self._lock:
            writers = [configured for configured in self._idle if configured.role is TokenRole.WRITER]
            if len(writers) < MAX_IDLE // 2:
                return None
            self._idle.remove(writers[0])
            return writers[0]

    def _put(self, configured: _ConfiguredHandle, keep: bool) -> None:
        evicted = None if keep else configured
        if keep:
            with self._lock:
                self._idle.append(configured)
                if len(self._idle) > MAX_IDLE:
                    evicted = self._idle.pop(0)
        if evicted:
            evicted.handle.close()

    @contextmanager
    def _session(self, name: str, must_exist: bool) -> Generator[_ConfiguredHandle]:
        """Hold a session, which is not closed meanwhile."""
        with self._lock:
            configured = self._sessions.get(name)
            if configured is None and must_exist:
                raise BadRequestError(372, f"Session {name} not found.", "SESSION_NOT_FOUND")
            if configured is None and len(self._sessions) >= MAX_SESSIONS:
                raise BadRequestError(202, f"more than {MAX_SESSIONS} sessions.", "TOO_MANY_SIMULTANEOUS_QUERIES")
            if configured is None:
                configured = self._sessions[name] = _ConfiguredHandle(self._open(), TokenRole.WRITER)
            configured.requests += 1
        try:
            yield configured
        finally:
            with self._lock:
                configured.requests -= 1

    def _close_expired(self) -> None:
        """Close the sessions whose time is over, with their temporary tables: with any request, as no other session may ever come."""
        now = time.monotonic()
        with self._lock:
            over = [name for name, session in self._sessions.items() if session.expires < now and not session.requests]
            expired = [self._sessions.pop(name) for name in over]
        for session in expired:
            session.handle.close()


def _revocable(settings: Mapping[str, str]) -> dict[str, str]:
    """Return all settings except `readonly`, which cannot be reset."""
    return {key: value for key, value in settings.items() if key != "readonly"}
