"""`spangrad config`: the resolved settings."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, flag_values


def config(*, explain: Annotated[str | None, Parameter("--explain")] = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print every setting with its resolved value and the source of the value; those that are not defaults in bold.

    Args:
        explain: print the meaning, unit, type, default, value and source of this setting alone; of a section, its settings.
    """
    from commands.console import plain_console, plain_table
    from spangrad.settings.sources import explain_settings

    if explain is not None:
        from spangrad.settings.explain import explain_key

        print("\n".join(explain_key(explain, flag_values(set_), file=config)))
        return
    table = plain_table("setting", "value", "from")
    for origin in explain_settings(flag_values(set_), file=config):
        table.add_row(origin.key, origin.text, origin.source, style=None if origin.source == "default" else "bold")
    plain_console().print(table)
