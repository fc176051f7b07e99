"""Sessions for requests: who runs which statement with which settings, at the same time.

In: a statement's session name, database, settings and tables. Out: a handle of the engine, set up so.
Invariant: a handle serves one request at a time, and no setting of a request outlives it. A reader's handle can change nothing, its
own settings included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from collector.auth import Role
from collector.database import HANDLE_SETTINGS, EngineRefusedError, Handle
from collector.sql.errors import BadRequestError
from collector.sql.external_data import drop_tables, load_tables
from collector.sql.request import Statement

MAX_IDLE = 16
"""Handles kept for requests without a session; half of them for writers before one is set up anew."""
MAX_SESSIONS = 256
SESSION_WAIT_SECONDS = 1.0
"""How long a request waits for its session, which another one uses: the one before may be ending."""


class _Equipped:
    """A handle and what was set on it by requests."""

    def __init__(self, handle: Handle, role: Role) -> None:
        self.handle = handle
        self.role = role
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
            self.handle.query(f"SET {key} = {HANDLE_SETTINGS.get(key, 'DEFAULT')}")
            del self.settings[key]
        for key, value in settings.items():
            if self.settings.get(key) != value:
                self._set(key, value)
                self.settings[key] = value

    def restrict(self, readonly: str) -> None:
        """Let nothing be changed any longer: the last that is set, for nothing takes it back."""
        self._set("readonly", readonly)

    def _set(self, key: str, value: str) -> None:
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        self.handle.query(f"SET {key} = '{quoted}'")


class Handles:
    """All handles that requests use."""

    def __init__(self, open_handle: Callable[[], Handle]) -> None:
        self._open = open_handle
        self._idle: list[_Equipped] = []
        self._sessions: dict[str, _Equipped] = {}
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, statement: Statement, role: Role) -> Generator[Handle]:
        """A handle for one statement. A reader has no session: there is nothing that it could keep there.

        Raises:
            BadRequestError: the session is busy, or must exist and does not, or there are too many.
            EngineRefusedError: the database, a setting or an external table is not to be had.
        """
        if role is Role.READER:
            with self._reading(statement) as handle:
                yield handle
        elif statement.session is None:
            equipped = self._writing(statement)
            keep = False
            try:
                load_tables(equipped.handle, statement.tables)
                if readonly := statement.settings.get("readonly"):
                    equipped.restrict(readonly)
                keep = not (statement.leaves_traces or statement.tables or readonly)
                yield equipped.handle
            finally:
                self._put(equipped, keep)
        else:
            with self._in_session(statement.session, statement) as handle:
                yield handle

    @contextmanager
    def _in_session(self, name: str, statement: Statement) -> Generator[Handle]:
        """A session's handle. It is not restricted for a request that asks for `readonly`: it would stay so."""
        equipped = self._session(name, statement.session_must_exist)
        if not equipped.lock.acquire(timeout=SESSION_WAIT_SECONDS):
            raise BadRequestError(373, f"Session {name} is locked by a concurrent client.", "SESSION_IS_LOCKED")
        try:
            equipped.equip(statement.database, _revocable(statement.settings))
            try:
                load_tables(equipped.handle, statement.tables)
                yield equipped.handle
            finally:
                drop_tables(equipped.handle, statement.tables)
        finally:
            equipped.expires = time.monotonic() + statement.session_seconds
            equipped.lock.release()

    @contextmanager
    def _reading(self, statement: Statement) -> Generator[Handle]:
        if statement.session_must_exist:
            raise BadRequestError(372, f"Session {statement.session} not found.", "SESSION_NOT_FOUND")
        equipped = None if statement.tables else self._matching(Role.READER, statement.database, statement.settings)
        try:
            if equipped is None:
                equipped = _Equipped(self._open(), Role.READER)
                equipped.equip(statement.database, statement.settings)
                load_tables(equipped.handle, statement.tables)
                equipped.restrict("1")
            yield equipped.handle
        finally:
            if equipped:
                self._put(equipped, keep=not statement.tables and equipped.settings == statement.settings)

    def close(self) -> None:
        """Close every handle."""
        with self._lock:
            for equipped in (*self._idle, *self._sessions.values()):
                equipped.handle.close()
            self._idle.clear()
            self._sessions.clear()

    def _matching(self, role: Role, database: str, settings: Mapping[str, str]) -> _Equipped | None:
        with self._lock:
            for place, equipped in enumerate(self._idle):
                if (equipped.role, equipped.database, equipped.settings) == (role, database, settings):
                    return self._idle.pop(place)
        return None

    def _writing(self, statement: Statement) -> _Equipped:
        """A writer's handle with the statement's database and settings, but for `readonly`."""
        database, settings = statement.database, _revocable(statement.settings)
        if found := self._matching(Role.WRITER, database, settings):
            return found
        if used := self._used():
            try:
                used.equip(database, settings)
            except EngineRefusedError:
                # What an earlier request set may be in the way, and cannot always be taken back: a fresh handle tells.
                used.handle.close()
            else:
                return used
        fresh = _Equipped(self._open(), Role.WRITER)
        try:
            fresh.equip(database, settings)
        except EngineRefusedError:
            fresh.handle.close()
            raise
        return fresh

    def _used(self) -> _Equipped | None:
        """A writer's idle handle, whatever was set on it; None while there may be more of them."""
        with self._lock:
            writers = [equipped for equipped in self._idle if equipped.role is Role.WRITER]
            if len(writers) < MAX_IDLE // 2:
                return None
            self._idle.remove(writers[0])
            return writers[0]

    def _put(self, equipped: _Equipped, keep: bool) -> None:
        leaving = None if keep else equipped
        if keep:
            with self._lock:
                self._idle.append(equipped)
                if len(self._idle) > MAX_IDLE:
                    leaving = self._idle.pop(0)
        if leaving:
            leaving.handle.close()

    def _session(self, name: str, must_exist: bool) -> _Equipped:
        now = time.monotonic()
        with self._lock:
            for other in [key for key, one in self._sessions.items() if one.expires < now and not one.lock.locked()]:
                self._sessions.pop(other).handle.close()
            equipped = self._sessions.get(name)
            if equipped is None and must_exist:
                raise BadRequestError(372, f"Session {name} not found.", "SESSION_NOT_FOUND")
            if equipped is None and len(self._sessions) >= MAX_SESSIONS:
                raise BadRequestError(202, f"more than {MAX_SESSIONS} sessions.", "TOO_MANY_SIMULTANEOUS_QUERIES")
            if equipped is None:
                equipped = self._sessions[name] = _Equipped(self._open(), Role.WRITER)
            # Held from now on, so that nobody closes it before it is used.
            equipped.expires = now + 60
            return equipped


def _revocable(settings: Mapping[str, str]) -> dict[str, str]:
    """All settings but `readonly`, which nothing takes back."""
    return {key: value for key, value in settings.items() if key != "readonly"}
