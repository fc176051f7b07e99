"""`spangrad env serve`: environments with reset and step, served by OpenEnv's protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, require_directory, resolve

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROUTES = ("ws", "reset", "step", "state", "health", "healthz", "schema", "metadata", "v1", "readyz", "metrics")
"""First parts of the server's own paths, which name no environment."""

env = App(name="env", help="Serve environments with reset and step, by OpenEnv's protocol.")


@env.command(name="serve")
def _serve(
    *environments: Annotated[str, Parameter(name="ENVIRONMENT")],
    shards: Annotated[int, Parameter(help="number of processes of each; a crash of one ends its own sessions alone.")] = 1,
    sessions: Annotated[int, Parameter(help="largest number of sessions of each at once; a session has an environment of its own.")] = 256,
    directory: Path = Path(),
    port: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Serve environments to clients of OpenEnv, and to `spangrad run --environment URL`, until SIGTERM or Ctrl-C.

    Args:
        environments: [NAME=]MODULE:CLASS or [NAME=]FILE.py:CLASS with reset(task) and step(action); without a name, that of the class. One
            is served at URL, each of several at URL/NAME.
        directory: directory of the environments' modules.
        port: TCP port to listen on; default: environments.port.
    """
    require_directory("--directory", directory, "the directory of the environments' modules")
    settings = resolve(config, set_, {"environments.port": port})
    log_to_stderr()
    from commands.training.agents import located
    from runner.sessions.server import serve
    from runner.sessions.shards import ShardCommand
    from runner.workers.agents import exporter_variables
    from spangrad.errors import SettingsError

    for name, value in (("--shards", shards), ("--sessions", sessions)):
        if value < 1:
            raise SettingsError(f"{name} {value} leaves nothing to serve. Give 1 or more.")
    references = named_environments(environments)
    commands = {
        name: ShardCommand(located(reference, directory), directory, exporter_variables(settings.store))
        for name, reference in references.items()
    }
    serve(settings.environments, commands, shards, sessions)


def named_environments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the environments' references, each with `NAME=` before it or without, by name.

    Raises:
        SettingsError: there is none; or a name is given twice, cannot be a part of a URL, or is one of the server's own.
    """
    from spangrad.errors import SettingsError

    if not arguments:
        raise SettingsError("no environment is named. Give MODULE:CLASS, or several as NAME=MODULE:CLASS.")
    references: dict[str, str] = {}
    for argument in arguments:
        given, equals, rest = argument.partition("=")
        name, reference = (given, rest) if equals else (argument.rpartition(":")[2], argument)
        if (equals or len(arguments) > 1) and (not _NAME.fullmatch(name) or name in _ROUTES):
            raise SettingsError(
                f"{argument}: {name!r} cannot name an environment in a URL. Write NAME={reference}, with a NAME of letters, digits, "
                f"'.', '_' and '-' that is none of {', '.join(_ROUTES)}."
            )
        if name in references:
            raise SettingsError(f"{argument}: {name} names {references[name]} already. Write ANOTHER={reference}.")
        references[name] = reference
    return references
