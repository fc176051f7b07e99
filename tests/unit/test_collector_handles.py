"""The engine's handles, as requests borrow them."""

from __future__ import annotations

from typing import cast

import pytest

from collector.auth import TokenRole
from collector.database import EngineRefusedError, Handle, QueryAnswer
from collector.sql.external_data import ExternalTable
from collector.sql.request import Statement
from collector.sql.sessions import SessionPool


class StubbornHandle:
    """A handle that drops no table."""

    def query(self, sql: str, *_: object) -> QueryAnswer:
        if sql.startswith("DROP"):
            raise EngineRefusedError("Code: 394. DB::Exception: Query was cancelled. (QUERY_WAS_CANCELLED)", 394)
        return QueryAnswer(b"0" if sql.startswith("SELECT") else b"")


def test_session_pool_releases_session_after_any_failure() -> None:
    handles = SessionPool(lambda: cast(Handle, StubbornHandle()))
    tables = (ExternalTable("t", "a UInt8", "CSV", b""),)
    statement = Statement("SELECT 1", None, "CSV", "default", {}, {}, "session", 60.0, False, tables)

    for _ in range(2):
        with pytest.raises(EngineRefusedError, match="Query was cancelled"), handles.borrow(statement, TokenRole.WRITER):
            pass
