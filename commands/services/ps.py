"""`spangrad ps`: the services that `spangrad up` runs."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, resolve


def ps(*, json: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Show the services that `spangrad up` runs in this directory, with their state, restarts and logs; exit code 1 if none runs.

    Args:
        json: print the status as JSON.
    """
    from json import dumps

    from commands.console import plain_console
    from commands.services.progress import ProgressReader
    from spangrad.supervisor.run_directory import none_runs, status_of
    from spangrad.supervisor.status_text import status_table

    settings = resolve(config, set_)
    status = status_of(settings.up.directory)
    if status is None:
        raise none_runs(settings.up.directory)
    if json:
        print(dumps(status))
        return
    # In a cluster the store listens elsewhere than these settings say.
    reader = ProgressReader(resolve(config, set_, status.get("addresses")))
    progress = reader.read() if status.get("ready") else None
    plain_console().print(status_table(status["services"], progress))
