"""Services, their states, and the decision whether one that ended is started again.

In: exit codes and times. Out: states, delays and verdicts. Invariant: pure; no process, file or clock is touched here.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class ServiceState(StrEnum):
    """State of a service under the supervisor."""

    WAITING = "waiting"
    """Not started: a service that it needs is not ready yet."""
    STARTING = "starting"
    READY = "ready"
    SILENT = "no answer"
    """It runs and was ready, and does not answer now."""
    RESTARTING = "restarting"
    """It ended and is started again after a delay."""
    FAILED = "failed"
    """It ended and is not started again."""
    DONE = "done"
    """It ended by itself with exit code 0, and is one that may: there was nothing left to do."""
    STOPPING = "stopping"
    """It is asked to end, and has its grace to do so."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process that the supervisor runs."""

    name: str
    command: tuple[str, ...]
    log: Path
    ready_url: str | None = None
    """URL that answers with status 200 once the service is ready. None: it is ready when it runs."""
    needs: tuple[str, ...] = ()
    """Names of services that are ready before this one is started."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables added to the environment."""
    port_setting: str = ""
    """Setting of the port at which it listens for its URL. Empty: it has none, or the URL is a proxy's, which may answer without it."""
    ends: bool = False
    """True for a command that ends by itself: services that need it are started once it is done."""
    may_finish: bool = False
    """True for a service that may have nothing left to do one day: it is done then, and not started again."""
    grace_seconds: float = 15.0
    """Time that it has to end once it is asked to, in seconds; then it is killed."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Rule for services that end."""

    first_seconds: float = 1.0
    """Delay of the first restart, in seconds; each further one doubles it."""
    longest_seconds: float = 30.0
    """Longest delay, in seconds."""
    settled_seconds: float = 60.0
    """Time in operation after which earlier failures are forgotten, in seconds."""
    health_seconds: float = 1.0
    """Interval of the health checks of a service that is ready, in seconds."""
    tries: int = 3
    """Starts of a service that never became ready, or ends before all services were, after which it has failed."""

    def delay(self, failures: int) -> float:
        """Return the delay before the next start, in seconds, after so many failures in a row."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 32), self.longest_seconds)

    def restarts(self, exit_code: int, failures: int, *, was_ready: bool) -> bool:
        """Return whether a service that ended is started again."""
        # 2 means wrong settings, which no restart corrects.
        first_start = exit_code != 2 and failures < self.tries
        return self.tries > 0 and (was_ready or first_start)


_CAUSE_LINES = 12
"""Largest number of lines of a cause."""
NEVER = RestartPolicy(tries=0, health_seconds=math.inf)
"""Policy under which a service that ends has failed, and one that is ready is asked no more."""


def start_order(services: tuple[ServiceSpec, ...]) -> list[ServiceSpec]:
    """Return the services so that each comes after those that it needs.

    Raises:
        ValueError: services need each other in a circle, or need one that is not there.
    """
    ordered: list[ServiceSpec] = []
    left = list(services)
    while left:
        names = {service.name for service in ordered}
        free = [service for service in left if set(service.needs) <= names]
        if not free:
            raise ValueError(f"services need each other, or one that is missing: {', '.join(service.name for service in left)}")
        ordered += free
        left = [service for service in left if service not in free]
    return ordered


def kind_of(name: str) -> str:
    """Return the kind of a service, which replicas share: `worker` for `worker-2`."""
    return name.partition("-")[0]


def stop_order(services: tuple[ServiceSpec, ...]) -> list[list[ServiceSpec]]:
    """Return groups of services that are stopped together: replicas of a kind, the last started first."""
    groups: list[list[ServiceSpec]] = []
    for service in reversed(services):
        last = groups[-1] if groups else []
        if last and kind_of(last[0].name) == kind_of(service.name) and not any(service.name in replica.needs for replica in last):
            last.append(service)
        else:
            groups.append([service])
    return groups


def stop_seconds(graces: Iterable[tuple[str, float]]) -> float:
    """Return the longest time in which services end, in seconds, kind after kind, from the name and the grace of each."""
    longest = dict[str, float]()
    for name, grace in graces:
        longest[kind_of(name)] = max(grace, longest.get(kind_of(name), 0.0))
    return sum(longest.values())


def cause_of(log: str, exit_code: int) -> str:
    """Return the cause of a service's end from the text of its log, and from its exit code: below 0 the number of a signal.

    It is the sentence of one of our own errors, else the last exception of a traceback, else the last line. A log does not name a signal.
    """
    text = [line.rstrip() for line in log.splitlines() if line.strip()]
    error_lines = [number for number, line in enumerate(text) if line.startswith("spangrad: ")]
    if error_lines:
        return "\n".join([text[error_lines[-1]].removeprefix("spangrad: "), *text[error_lines[-1] + 1 : error_lines[-1] + _CAUSE_LINES]])
    last = text[-1] if text else "its log is empty"
    if exit_code >= 0:
        return last
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    reason = ", as the kernel does where memory runs out" if number == signal.SIGKILL else ""
    return f"it was killed by {name}{reason}; the end of its log: {last}"
