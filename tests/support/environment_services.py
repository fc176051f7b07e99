"""Services of environments for tests, on free ports."""

from __future__ import annotations

from typing import Any

from spangrad.processes import free_ports
from spangrad.settings import EnvironmentServiceSettings


def service_settings(**changes: Any) -> EnvironmentServiceSettings:
    """Settings of a service of environments."""
    (port,) = free_ports(1)
    return EnvironmentServiceSettings(port=port, **changes)
