"""`spangrad env serve`: an environment with reset and step, served by OpenEnv's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve

Reference = Annotated[str, Parameter(name="ENVIRONMENT")]

env = App(name="env", help="Serve environments with reset and step, by OpenEnv's protocol.")


@env.command(name="serve")
def _serve(
    environment: Reference,
    *,
    shards: Annotated[int, Parameter(help="number of processes; a crash of one ends its own sessions alone.")] = 1,
    sessions: Annotated[int, Parameter(help="largest number of sessions at once; each has an environment of its own.")] = 256,
    directory: Path = Path(),
    port: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Serve an environment to clients of OpenEnv, and to `spangrad run --environment URL`, until SIGTERM or Ctrl-C.

    Args:
        environment: MODULE:CLASS or FILE.py:CLASS with reset(task) and step(action).
        directory: directory of the environment's module.
        port: TCP port to listen on; default: environments.port.
    """
    settings = resolve(config, set_, {"environments.port": port})
    log_to_stderr()
    from commands.training.agents import located
    from runner.sessions.server import serve
    from runner.sessions.shards import ShardCommand
    from spangrad.errors import SettingsError

    for name, value in (("--shards", shards), ("--sessions", sessions)):
        if value < 1:
            raise SettingsError(f"{name} {value} leaves nothing to serve. Give 1 or more.")
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": settings.store.otlp_endpoint}
    if settings.store.token is not None:
        variables["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{quote(settings.store.token.get_secret_value(), safe='')}"
    serve(settings.environments, ShardCommand(located(environment, directory), directory, variables), shards, sessions)
