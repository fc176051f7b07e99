"""`spangrad environments`: serve environments for agents to work in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def environments(
    *,
    factory: str,
    instances: Annotated[int, Parameter(help="How many there are.")] = 1,
    directory: Path = Path(),
    port: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Serve environments, each leased to one attempt at a time and reset between two, until told to end.

    Args:
        factory: MODULE:CLASS, called without arguments, whose objects have begin(input), and may have reset(), health() and close().
        instances: how many there are.
        directory: where its modules are.
        port: where it listens; runner.environments_port by default.
    """
    settings = resolve(config, set_, {"runner.environments_port": port})
    log_to_stderr()
    from runner.environments.server import serve
    from spangrad.callables import load
    from spangrad.errors import SettingsError

    if instances < 1:
        raise SettingsError(f"--instances {instances} leaves nothing to serve. Give 1 or more.")
    sys.path.insert(0, str(directory.resolve()))
    serve(settings.runner, load(factory), instances)
