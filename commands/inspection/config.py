"""`spangrad config`: the resolved settings."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, flag_values


def config(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print every setting with its resolved value and the source of the value; those that are not defaults in bold."""
    from rich.table import Table

    from commands.console import plain_console
    from spangrad.settings.sources import explain_settings

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for origin in explain_settings(flag_values(set_), file=config):
        table.add_row(origin.key, str(origin.value), origin.source, style=None if origin.source == "default" else "bold")
    plain_console().print(table)
