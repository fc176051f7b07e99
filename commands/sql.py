"""`spangrad sql`."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_store


def sql(statement: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Ask the span store a question in SQL, and print the answer as a table.

    Asks the store at store.url. When nobody answers there, the data of a store that has stopped (store.path, else the last
    demo's) is opened for the time of the question.

    Args:
        statement: one SELECT, SHOW or DESCRIBE; tables live in the database `otel`.
    """
    from rich.table import Table

    from commands.console import plain_console
    from spangrad.clickhouse import connect, store_errors

    with answering_store(resolve(config, set_).store) as store:
        client = connect(store)
        with store_errors(store.url):
            answer = client.query(statement)
        client.close()
    table = Table(*(str(name) for name in answer.column_names), box=None, pad_edge=False)
    for row in answer.result_rows:
        table.add_row(*(str(value) for value in row))
    plain_console(10_000).print(table)
