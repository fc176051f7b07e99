"""Supervisor: starts services in the order of their needs, watches them, restarts them with back-off, and stops them in reverse.

In: services. Out: running processes, a status of each, events as lines of text. Invariant: when the context ends, or this process dies in
any way, no service goes on; a service is never started before those that it needs are ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from spangrad.errors import SpangradError
from spangrad.http.json_http import answer_of
from spangrad.http.service import without_userinfo
from spangrad.supervisor.launcher import Launcher, LocalProcess, ServiceProcess
from spangrad.supervisor.service import NEVER, RestartPolicy, ServiceSpec, ServiceState, cause_of, start_order, stop_order

_PROVEN_SECONDS = 20.0
"""Time in operation after which a service without a URL counts as one that was ready, in seconds."""
_ENDED = {ServiceState.FAILED, ServiceState.DONE, ServiceState.STOPPED}


@dataclass
class _Supervised:
    """A service and what the supervisor knows of it."""

    service: ServiceSpec
    state: ServiceState = ServiceState.WAITING
    process: ServiceProcess | None = None
    failures: int = 0
    """Failures in a row."""
    restarts: int = 0
    was_ready: bool = False
    since: float = field(default_factory=time.monotonic)
    """Time at which the state began."""
    checked: float = 0.0
    due: float = 0.0
    """Time of the next start, where it is restarted."""
    cause: str = ""
    """Cause of its last failure."""
    obstacle: str = ""
    """Reason why it is not ready yet: that with which it refuses the request for its state, else the last line of its log."""
    holder: str = ""
    """Process that was started last, as `spangrad.leases.is_dead` knows it; empty: none was, or it is not on this machine."""

    @property
    def serves(self) -> bool:
        """Return whether services that need this one may start."""
        return self.state in {ServiceState.READY, ServiceState.SILENT, ServiceState.DONE}


class Supervisor:
    """Services, wherever their launcher starts them; a context manager that stops them at its end.

    All calls come from one thread, since Linux ends the services with the thread that started them.
    """

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        on_event: Callable[[str], None],
        *,
        policy: RestartPolicy = NEVER,
        launch: Launcher = LocalProcess,
    ) -> None:
        """Store the arguments; `start` or `poll` starts the services. A line of text about each change goes to `on_event`."""
        self._all = {service.name: _Supervised(service) for service in start_order(tuple(services))}
        self._on_event = on_event
        self._policy = policy
        self._launch = launch
        self.were_ready = False
        """True once every service was ready, or done, at the same time."""

    def __enter__(self) -> Self:
        """Start nothing yet, so that `__exit__` stops what an interrupted start has started."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop_all()

    @property
    def failed(self) -> list[str]:
        """Return the names of the services that have failed for good."""
        return [name for name, supervised in self._all.items() if supervised.state is ServiceState.FAILED]

    @property
    def are_ready(self) -> bool:
        """Return whether every service is ready, or done."""
        return all(supervised.serves for supervised in self._all.values())

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each service: its state since when, its process and node, its obstacle, its failures, its log and grace."""
        now = time.monotonic()
        return [
            {
                "name": name,
                "state": supervised.state.value,
                "pid": supervised.process.pid if supervised.process and supervised.process.exit_code is None else None,
                "node": supervised.process.node if supervised.process else "",
                "holder": supervised.holder,
                "seconds": round(now - supervised.since, 1),
                "restarts": supervised.restarts,
                "waits_for": self._missing(supervised) if supervised.state is ServiceState.WAITING else [],
                "obstacle": supervised.obstacle,
                "cause": supervised.cause,
                "log": str(supervised.service.log),
                "grace_seconds": supervised.service.grace_seconds,
            }
            for name, supervised in self._all.items()
        ]

    def start(self, timeout_seconds: float, poll_seconds: float = 0.1) -> None:
        """Start every service, and wait until all are ready.

        Raises:
            SpangradError: a service failed, or is not ready in time.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            self.check()
            if self.are_ready:
                return
            if time.monotonic() > end:
                not_ready = [supervised for supervised in self._all.values() if not supervised.serves]
                names = ", ".join(f"{supervised.service.name} ({supervised.service.log})" for supervised in not_ready)
                raise SpangradError(f"not ready after {timeout_seconds:g} s: {names}. Look into the log, or raise the time limit.")
            time.sleep(poll_seconds)

    def check(self) -> None:
        """Do as `poll`, and raise if a service has failed for good.

        Raises:
            SpangradError: with the cause of the failure, and the service's log.
        """
        self.poll()
        for name in self.failed:
            raise SpangradError(self.failure(name))

    def failure(self, name: str) -> str:
        """Return a sentence with the cause of a service's last failure, and its log."""
        supervised = self._all[name]
        return f"{name} failed: {supervised.cause}\nIts log: {supervised.service.log}"

    def poll(self) -> None:
        """Notice what has changed, and start what is due."""
        for supervised in self._all.values():
            if supervised.state in _ENDED:
                continue
            process = supervised.process
            if process and (code := process.exit_code) is not None:
                self._ended(supervised, process, code)
            elif self._is_due(supervised):
                self._spawn(supervised)
            elif process:
                process.rotate_log()
                supervised.holder = process.holder
                self._check_health(supervised, process)
        self.were_ready = self.were_ready or self.are_ready

    def stop(self, name: str) -> None:
        """Stop one service for good, and wait until it has ended."""
        self._stop([self._all[name]])

    def stop_all(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Stop every service, the last started first, and replicas of a kind at once; call `on_change` whenever some are asked to end."""
        for group in stop_order(tuple(supervised.service for supervised in self._all.values())):
            self._stop([self._all[service.name] for service in group], on_change)

    def _stop(self, group: Sequence[_Supervised], on_change: Callable[[], None] = lambda: None) -> None:
        began = time.monotonic()
        for supervised in group:
            if supervised.process:
                supervised.process.ask_to_end()
                self._enter(supervised, ServiceState.STOPPING)
        on_change()
        for supervised in group:
            if supervised.process:
                supervised.process.stop(max(began + supervised.service.grace_seconds - time.monotonic(), 0))
                supervised.process = None
            if supervised.state not in _ENDED:
                self._enter(supervised, ServiceState.STOPPED)

    def _is_due(self, supervised: _Supervised) -> bool:
        delayed = supervised.state is ServiceState.RESTARTING and time.monotonic() >= supervised.due
        return (supervised.state is ServiceState.WAITING or delayed) and not self._missing(supervised)

    def _missing(self, supervised: _Supervised) -> list[str]:
        return [name for name in supervised.service.needs if not self._all[name].serves]

    def _spawn(self, supervised: _Supervised) -> None:
        service = supervised.service
        supervised.restarts += supervised.state is ServiceState.RESTARTING
        self._on_event(f"starting {service.name}")
        self._enter(supervised, ServiceState.STARTING)
        try:
            supervised.process = self._launch(service)
        except (OSError, SpangradError) as error:
            self._failed(supervised, 1, "did not start", str(error))
            return
        supervised.holder = supervised.process.holder

    def _check_health(self, supervised: _Supervised, process: ServiceProcess) -> None:
        if supervised.service.ends or process.pid is None:
            return
        now = time.monotonic()
        url = process.ready_url
        if supervised.state is not ServiceState.STARTING and now - supervised.checked < self._policy.health_seconds:
            return
        supervised.checked = now
        status, refusal = (200, "") if url is None else answer_of(url)
        healthy = status == 200
        supervised.obstacle = "" if healthy else refusal or _last_line(process)
        if healthy and supervised.state is not ServiceState.READY:
            self._on_event(f"{supervised.service.name} is ready ({now - supervised.since:.1f} s)")
            supervised.was_ready = supervised.was_ready or url is not None
            self._enter(supervised, ServiceState.READY)
        elif not healthy and supervised.state is ServiceState.READY:
            self._on_event(f"{supervised.service.name} does not answer at {without_userinfo(url or '')}")
            self._enter(supervised, ServiceState.SILENT)
        elif healthy and not supervised.was_ready:
            supervised.was_ready = now - supervised.since > _PROVEN_SECONDS
        elif healthy and supervised.failures and now - supervised.since > self._policy.settled_seconds:
            supervised.failures = 0

    def _ended(self, supervised: _Supervised, process: ServiceProcess, code: int) -> None:
        # Most services end with exit code 0, too, when a user or a system sends SIGTERM.
        is_done = code == 0 and (supervised.service.ends or supervised.service.may_finish)
        # With the process on another machine goes its log.
        cause = "" if is_done else cause_of(process.log_end(), code)
        process.stop(0)  # what is left of its group
        supervised.process = None
        if is_done:
            self._on_event(f"{supervised.service.name} is done ({time.monotonic() - supervised.since:.1f} s)")
            self._enter(supervised, ServiceState.DONE)
            return
        self._failed(supervised, code, f"ended (exit code {code})", cause)

    def _failed(self, supervised: _Supervised, code: int, failure: str, cause: str) -> None:
        supervised.failures += 1
        supervised.cause = cause
        # Before all were ready, what answered at the URL may have been another program, which took the port first.
        was_ready = supervised.was_ready and self.were_ready
        if self._policy.restarts(code, supervised.failures, was_ready=was_ready):
            delay = self._policy.delay(supervised.failures)
            supervised.due = time.monotonic() + delay
            self._on_event(f"{supervised.service.name} {failure}, and is started again in {delay:g} s: {cause}")
            self._enter(supervised, ServiceState.RESTARTING)
        else:
            self._on_event(self.failure(supervised.service.name))
            self._enter(supervised, ServiceState.FAILED)

    def _enter(self, supervised: _Supervised, state: ServiceState) -> None:
        supervised.state = state
        supervised.obstacle = ""
        supervised.since = time.monotonic()


def _last_line(process: ServiceProcess) -> str:
    """Return the last whole line of a log that is not empty; on another node the log is not read at each look."""
    text = "" if process.node else process.log_end()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
