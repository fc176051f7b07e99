"""`spangrad down`: the end of what `spangrad up` started."""

from __future__ import annotations

import os
import signal
import sys

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import SpangradError

_SECONDS = 60.0
"""Time beyond the graces of all services, in seconds."""


def down(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Stop the services that `spangrad up` started in this directory, the last started first.

    Workers let attempts in progress continue for up to runner.drain_seconds, all at the same time, before the services that they call end.
    """
    from spangrad.leases import is_here, pid_of, shown
    from spangrad.processes import wait_until
    from spangrad.supervisor.run_directory import none_runs, owner_of, status_of
    from spangrad.supervisor.service import stop_seconds

    directory = resolve(config, set_).up.directory
    owner = owner_of(directory)
    if owner is None:
        raise none_runs(directory)
    if not is_here(owner):
        raise SpangradError(f"`spangrad up` in {directory} is {shown(owner)}, on another machine or in another container. Call this there.")
    services = (status_of(directory) or {"services": []})["services"]
    seconds = stop_seconds((service["name"], service["grace_seconds"]) for service in services) + _SECONDS
    try:
        os.kill(pid_of(owner), signal.SIGTERM)
        os.kill(pid_of(owner), signal.SIGCONT)  # after Ctrl-Z
    except PermissionError:
        raise SpangradError(f"`spangrad up` in {directory}, {shown(owner)}, belongs to another user. Call this as that user.") from None
    except ProcessLookupError:
        pass  # it has just ended
    names = [service["name"] for service in services if service["pid"] is not None]
    print(f"stopping {', '.join(reversed(names)) or shown(owner)}", file=sys.stderr, flush=True)
    wait_until(lambda: owner_of(directory) is None, seconds, f"the end of {shown(owner)}")
    print("every service has ended")
