"""Services of environments for tests, on free ports."""

from __future__ import annotations

from typing import Any

from spangrad.processes import free_ports
from spangrad.settings import RunnerSettings


def service_settings(**changes: Any) -> RunnerSettings:
    """Settings of a service of environments."""
    (port,) = free_ports(1)
    return RunnerSettings(environments_port=port, **changes)
