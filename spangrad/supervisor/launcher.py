"""Launcher of services: where the process of a service runs, and what the supervisor knows of it.

In: a service. Out: its process. Invariant: a process ends with the process of the supervisor, whichever launcher started it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from spangrad.errors import SpangradError
from spangrad.http.json_http import status_of
from spangrad.leases import holder_of
from spangrad.processes import Child
from spangrad.supervisor.service import ServiceSpec

_LOG_BYTES = 1 << 18
"""Bytes at the end of a log in which the cause of a failure is searched."""
_KEPT_BYTES = 32 << 20
"""Size of a log in bytes beyond which it is rotated."""


class ServiceProcess(Protocol):
    """Process of a service, on this machine or another."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None: it runs, or is about to."""
        ...

    @property
    def pid(self) -> int | None:
        """Return its id on its machine; None: it has none yet."""
        ...

    @property
    def holder(self) -> str:
        """Return the process as `spangrad.leases.is_dead` knows it; empty: it is on another machine, whose processes are not seen."""
        ...

    @property
    def node(self) -> str:
        """Return the address of its machine; empty: this one."""
        ...

    @property
    def ready_url(self) -> str | None:
        """Return the URL that answers with status 200 once it is ready. None: it is ready when it runs."""
        ...

    def log_end(self) -> str:
        """Return the end of the log that it has written since its start."""
        ...

    def rotate_log(self) -> None:
        """Move the text of a log that has grown large to a file beside it, which replaces the one before."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting; idempotent."""
        ...

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, then end it and its children; idempotent."""
        ...


Launcher = Callable[[ServiceSpec], ServiceProcess]
"""Start of a service's process."""


class LocalProcess(Child):
    """Process of a service on this machine: a child of this process, which must be started and watched by one thread."""

    def __init__(self, service: ServiceSpec, *, inherit_settings: bool = True) -> None:
        """Start the service; it sees this process's SPANGRAD_ variables only if it is to inherit the settings.

        Raises:
            SpangradError: its URL answers already, so that another process would count as this service.
            OSError: the process cannot be started.
        """
        if service.port_setting and service.ready_url and status_of(service.ready_url) is not None:
            raise SpangradError(
                f"{service.ready_url} answers before {service.name} is started: another process listens there. Stop it, or set "
                f"{service.port_setting} to another port, with each URL that names it."
            )
        self._log_start = service.log.stat().st_size if service.log.exists() else 0
        super().__init__(service.name, service.command, service.log, service.env, inherit_settings=inherit_settings)
        self.pid = self.process.pid
        self.holder = holder_of(self.pid)
        self.node = ""
        self.ready_url = service.ready_url

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None: it runs."""
        return self.process.poll()

    def log_end(self) -> str:
        """Return the end of the log that it has written since its start."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, 2)
                start = self._log_start if self._log_start <= size else 0  # it was truncated
                log.seek(max(start, size - _LOG_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:  # it was moved or deleted
            return f"its log cannot be read ({error.strerror})"

    def rotate_log(self) -> None:
        """Move the text of a log that has grown large to a file beside it, which replaces the one before.

        The service and its children keep the log open and append to it, so that the file stays and loses its text: a line that is written
        between the end of the copy and the cut is lost.
        """
        with suppress(OSError):  # it was moved or deleted, or the disk is full
            if self.log.stat().st_size <= _KEPT_BYTES:
                return
            try:
                shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
            finally:
                os.truncate(self.log, 0)
                self._log_start = 0


def launch_without_settings(service: ServiceSpec) -> LocalProcess:
    """Start a service that does not see this process's SPANGRAD_ variables, because its settings are in a file already."""
    return LocalProcess(service, inherit_settings=False)
