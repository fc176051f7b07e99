"""The engine's handles, as requests borrow them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from collector.auth import TokenRole
from collector.database import EmbeddedDatabase, EngineRefusedError, Handle, QueryAnswer, make_directory
from collector.sql.external_data import ExternalTable
from collector.sql.request import Statement
from collector.sql.sessions import SessionPool


class StubbornHandle:
    """A handle that refuses statements which begin with a word."""

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def query(self, sql: str, *_: object) -> QueryAnswer:
        if sql.startswith(self.refused):
            raise EngineRefusedError("Code: 394. DB::Exception: Query was cancelled. (QUERY_WAS_CANCELLED)", 394)
        return QueryAnswer(b"0" if sql.startswith("SELECT") else b"")


def pool_of_handles() -> tuple[SessionPool, list[StubbornHandle]]:
    """A pool, and the handles that it has opened."""
    opened: list[StubbornHandle] = []

    def new_handle() -> Handle:
        opened.append(StubbornHandle("nothing"))
        return cast(Handle, opened[-1])

    return SessionPool(new_handle), opened


def select(session: str | None, seconds: float, tables: tuple[ExternalTable, ...] = ()) -> Statement:
    """A statement in a session that is kept for some seconds."""
    return Statement("SELECT 1", None, "CSV", "default", {}, {}, session, seconds, False, tables)


def test_session_pool_releases_session_after_any_failure() -> None:
    handles = SessionPool(lambda: cast(Handle, StubbornHandle("DROP")))
    tables = (ExternalTable("t", "a UInt8", "CSV", b""),)
    statement = select("session", 60.0, tables)

    for _ in range(2):
        with pytest.raises(EngineRefusedError, match="Query was cancelled"), handles.borrow(statement, TokenRole.WRITER):
            pass


def test_session_pool_closes_expired_session_with_request_of_no_session() -> None:
    handles, opened = pool_of_handles()
    for session, seconds in (("over", 0.0), ("goes on", 60.0), (None, 0.0)):
        with handles.borrow(select(session, seconds), TokenRole.WRITER):
            pass
    assert [handle.closed for handle in opened] == [True, False, False]

    opened.clear()
    with handles.borrow(select("last", 0.0), TokenRole.WRITER):
        pass
    with handles.borrow(select(None, 0.0), TokenRole.READER):
        pass
    assert [handle.closed for handle in opened] == [True, False]


def test_session_pool_keeps_session_that_a_request_waits_for() -> None:
    handles, opened = pool_of_handles()
    statement = select("session", 0.0)
    first = handles.borrow(statement, TokenRole.WRITER)
    first.__enter__()
    session = handles._sessions["session"]  # pyright: ignore[reportPrivateUsage]
    lock = session.lock

    def acquire(timeout: float) -> bool:
        """Let the first request end, and one without a session come, before the request that waits gets the session."""
        first.__exit__(None, None, None)
        with handles.borrow(select(None, 0.0), TokenRole.WRITER):
            pass
        return lock.acquire(timeout=timeout)

    session.lock = cast(threading.Lock, SimpleNamespace(acquire=acquire, locked=lock.locked, release=lock.release))
    with handles.borrow(statement, TokenRole.WRITER):
        assert not opened[0].closed


def test_session_pool_closes_reader_handle_that_is_not_read_only() -> None:
    handle = StubbornHandle("SET readonly")
    handles = SessionPool(lambda: cast(Handle, handle))
    statement = select(None, 60.0)

    with pytest.raises(EngineRefusedError, match="Query was cancelled"), handles.borrow(statement, TokenRole.READER):
        pass
    assert handle.closed


@pytest.mark.parametrize(("ask", "refused"), [(EmbeddedDatabase.kill, "KILL"), (EmbeddedDatabase.query_id, "SELECT query_id")])
def test_database_closes_handle_of_refused_statement(ask: Callable[[EmbeddedDatabase, str], object], refused: str) -> None:
    handle = StubbornHandle(refused)
    database = cast(EmbeddedDatabase, SimpleNamespace(handle=lambda: handle))

    with pytest.raises(EngineRefusedError, match="Query was cancelled"):
        ask(database, "name")
    assert handle.closed


def test_make_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    make_directory(tmp_path / "data" / "store")
    assert (tmp_path / "data" / "store").stat().st_mode & 0o077 == 0
