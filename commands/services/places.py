"""Places where `spangrad up` runs its services: this machine, or the nodes of a Ray cluster.

In: settings. Out: the services, their launcher, and the settings with the addresses that they have there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from commands.options import flag_values
from spangrad.errors import SettingsError
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings, settings_variables
from spangrad.supervisor.launcher import Launcher, LocalProcess
from spangrad.supervisor.placement import cluster_values, placement, require_tokens, shared_paths
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.training_services import page_service, training_services

_LOGS = "logs"
_ADDRESSES = ("store.url", "store.otlp_endpoint", "queue.url", "gateway.url")


@dataclass(frozen=True, slots=True)
class PlacedServices:
    """Services that are ready to be started."""

    settings: Settings
    services: tuple[ServiceSpec, ...]
    launch: Launcher
    addresses: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings that have other values than the settings file's, by dotted key: addresses of servers."""


@contextmanager
def on_this_machine(settings: Settings, options: Sequence[str], agent: Sequence[str]) -> Generator[PlacedServices]:
    """Yield services that become children of this process.

    Raises:
        SettingsError: there are to be several engines.
    """
    if settings.up.engines > 1:
        raise SettingsError(
            f"up.engines = {settings.up.engines} needs a Ray cluster that knows the GPUs: `spangrad up --ray auto`. On this machine alone, "
            "start further engines with `spangrad engine`."
        )
    logs = settings.up.directory / _LOGS
    services = (*training_services(settings, logs, options, agent), page_service(settings, logs, options))
    yield PlacedServices(settings, services, LocalProcess)


@contextmanager
def on_ray(
    address: str, config: Path | None, overrides: list[str], agent: Sequence[str], on_event: Callable[[str], None]
) -> Generator[PlacedServices]:
    """Yield services that run on the nodes of a Ray cluster, for as long as the block; progress is reported by `on_event`."""
    from spangrad.supervisor.ray_services import RayCluster

    given = flag_values(overrides)
    with RayCluster(address) as cluster:
        values = cluster_values(load_settings(given, file=config), cluster.home.address)
        settings = load_settings({**given, **values}, file=config)
        variables = settings_variables({**given, **values}, file=config)
        services = training_services(settings, settings.up.directory / _LOGS, (), agent, variables)
        require_tokens(settings, services)
        groups = placement(settings, services, gpus=any(node.resources.get("GPU") for node in cluster.nodes))
        cluster.reserve(groups, on_event)
        if len(cluster.nodes) > 1 and (paths := shared_paths(settings, groups)):
            on_event(f"on one disk that all nodes share, or nothing is found: {', '.join(paths)}")
        addresses = {key: values[key] for key in _ADDRESSES if key in values}
        yield PlacedServices(settings, services, cluster.launch, addresses)
