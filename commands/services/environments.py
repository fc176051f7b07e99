"""`spangrad environments`: the service that leases environments to agents."""

from __future__ import annotations

import sys
from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, require_directory, resolve


def environments(
    *,
    factory: str,
    instances: int = 1,
    directory: Path = Path(),
    port: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Serve environments to agents until SIGTERM or Ctrl-C. An instance is leased to one attempt at a time, and reset between two attempts.

    Args:
        factory: MODULE:CLASS, called without arguments; its objects have begin(input), and optionally reset(), health() and close().
        instances: number of instances that are served.
        directory: directory of the factory's modules.
        port: TCP port to listen on; default: environments.port.
    """
    require_directory("--directory", directory, "the directory of the factory's modules")
    settings = resolve(config, set_, {"environments.port": port})
    log_to_stderr()
    from runner.environments.server import serve
    from spangrad.callables import load
    from spangrad.errors import SettingsError

    if instances < 1:
        raise SettingsError(f"--instances {instances} leaves nothing to serve. Give 1 or more.")
    sys.path.insert(0, str(directory.resolve()))
    serve(settings.environments, load(factory), instances)
