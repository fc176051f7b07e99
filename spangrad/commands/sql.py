"""`spangrad sql`."""

from __future__ import annotations

from spangrad.commands.options import ConfigFile, Overrides, resolve


def sql(statement: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Ask the span store a question in SQL, and print the answer as a table.

    Args:
        statement: one SELECT, SHOW or DESCRIBE; tables live in the database `otel`.
    """
    from rich.console import Console
    from rich.table import Table

    from spangrad.clickhouse import connect, store_errors

    settings = resolve(config, set_)
    client = connect(settings.store)
    with store_errors(settings.store.url):
        answer = client.query(statement)
    table = Table(*(str(name) for name in answer.column_names), box=None, pad_edge=False)
    for row in answer.result_rows:
        table.add_row(*(str(value) for value in row))
    Console(soft_wrap=True).print(table)
