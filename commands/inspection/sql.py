"""`spangrad sql`: one query in SQL."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_client
from spangrad.errors import SettingsError, StoreError

_FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_SYNTAX_ERROR = 62
_READONLY = 164


def sql(statement: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Query the span store in SQL, and print the result as a table. The query is read-only, whatever the token permits.

    Queries the store at store.url. If no store answers there, the data of a stopped store (store.path, else the last demo's) is opened
    for the time of the query.

    Args:
        statement: one SELECT, SHOW or DESCRIBE statement; tables for people are in the database `spangrad`.
    """
    from commands.console import print_table
    from spangrad.store.clickhouse import read_only_settings

    if not statement.strip():  # as `"$(cat query.sql)"` is where there is no such file
        raise SettingsError("the statement is empty. Give one SELECT, SHOW or DESCRIBE.")
    with answering_client(resolve(config, set_).store) as (client, _), _remedies(statement):
        answer = client.query(statement, settings=read_only_settings(client))
    if not answer.result_rows:
        print("no rows")
        return
    print_table(answer.column_names, answer.result_rows)


@contextmanager
def _remedies(statement: str) -> Generator[None]:
    """Replace the store's error, for a statement that this command cannot run, by one that says what to do."""
    from clickhouse_connect.driver.exceptions import Error

    try:
        yield
    except Error as error:
        form = _FORMAT.search(statement)
        if error.code == _SYNTAX_ERROR and form:
            raise StoreError(
                f"`spangrad sql` prints a table of its own. Leave FORMAT {form[1]} out, or ask the store with curl (docs/guides/sql.md)."
            ) from error
        if error.code == _READONLY and "Cannot execute query in readonly mode" in str(error):
            raise StoreError(
                "`spangrad sql` changes nothing: give one SELECT, SHOW or DESCRIBE, or send the statement with curl (docs/guides/sql.md)."
            ) from error
        raise
