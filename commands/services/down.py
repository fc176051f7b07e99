"""`spangrad down`: the end of what `spangrad up` started."""

from __future__ import annotations

import os
import signal

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import SpangradError

_SECONDS = 120


def down(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Stop the services that `spangrad up` started in this directory, the last started first."""
    from spangrad.processes import wait_until
    from spangrad.supervisor.run_directory import owner_of

    directory = resolve(config, set_).up.directory
    owner = owner_of(directory)
    if owner is None:
        raise SpangradError(f"no `spangrad up` runs in {directory}. Call this where it was started, or name its file with --config.")
    os.kill(owner, signal.SIGTERM)
    wait_until(lambda: owner_of(directory) is None, _SECONDS, f"the end of process {owner}")
    print("every service has ended")
