"""Placement of the services of a training loop on the nodes of a cluster, and their addresses there.

In: settings, services, nodes. Out: groups of bundles, the values of settings that name nodes, and what the cluster lacks. Invariant:
pure. What keeps state on a disk runs on the home node, that of the supervisor, and never moves: with it the supervisor ends as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from spangrad.errors import SettingsError
from spangrad.http.service import in_url
from spangrad.probing.parallel import parallel_sizes
from spangrad.processes import LOOPBACK
from spangrad.settings import Settings
from spangrad.supervisor.service import ServiceSpec, kind_of

NODE = "{node}"
"""Text in a service's command, environment and URL in whose place the address of its node is put."""
CLUSTER = "{cluster}"
"""Text in a service's environment in whose place the address of the Ray cluster is put, as its node knows it."""
RANKS = "ranks"
"""Name of the trainer's ranks, which the trainer places by itself."""
_AT_HOME = ("store", "queue", "gateway")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one service, on one node."""

    service: str
    cpus: int = 1
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources by Ray's names."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


@dataclass(frozen=True, slots=True)
class BundleGroup:
    """Bundles that are reserved together."""

    bundles: tuple[Bundle, ...]
    strategy: Literal["STRICT_PACK", "SPREAD"] = "STRICT_PACK"
    """STRICT_PACK: all on one node. SPREAD: on as many as there are."""
    home: bool = False
    """True: on the node of the supervisor."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]
    """Resources by Ray's names, in use or not."""

    def __str__(self) -> str:
        """Return the address, CPUs and GPUs."""
        return f"{self.address} ({self.resources.get('CPU', 0):g} CPU, {self.resources.get('GPU', 0):g} GPU)"


def cluster_values(settings: Settings, home: str) -> dict[str, object]:
    """Return the values of settings that change in a cluster whose home node has an address, by dotted key.

    Servers bind the address of their node, and engines register themselves. A URL that names another machine stays.
    """
    store, queue, gateway, engine, trainer = settings.store, settings.queue, settings.gateway, settings.engine, settings.trainer
    values: dict[str, object] = {}
    if _is_loopback(store.url):
        values |= {"store.host": home, "store.url": _at(store.url, home)}
        if _is_loopback(store.otlp_endpoint):
            values["store.otlp_endpoint"] = _at(store.otlp_endpoint, home)
    if queue.url and _is_loopback(queue.url):
        values |= {"queue.host": home, "queue.url": _at(queue.url, home)}
    if _is_loopback(gateway.url):
        values |= {"gateway.host": home, "gateway.url": _at(gateway.url, home)}
    engine_url = gateway.engine_url or engine.url or ""
    if _is_loopback(engine_url) and urlsplit(engine_url).port == engine.port:
        values |= {"gateway.engine_url": "", "engine.host": NODE, "engine.url": f"http://{NODE}:{engine.port}"}
    if trainer.workers.per_node and trainer.workers.ray_address is None:
        values["trainer.workers.ray_address"] = CLUSTER
    if trainer.weight_sync.method == "transfer" and trainer.weight_sync.transfer_host in LOOPBACK:
        values["trainer.weight_sync.transfer_host"] = NODE
    return values


def require_tokens(settings: Settings, services: Sequence[ServiceSpec]) -> None:
    """Refuse services that would bind beyond loopback without a token.

    Raises:
        SettingsError: with all tokens that are missing.
    """
    sections = {"store": settings.store, "queue": settings.queue, "gateway": settings.gateway, "engine": settings.engine}
    started = [(name, section) for name, section in sections.items() if any(kind_of(service.name) == name for service in services)]
    missing = [f"{name}.token" for name, section in started if section.host not in LOOPBACK and not section.token]
    if missing:
        raise SettingsError(
            f"{', '.join(missing)} not set: in a cluster, services listen at the addresses of their nodes, which others may reach. Set "
            "each to a secret of your own, in the settings file or the environment."
        )


def placement(settings: Settings, services: Sequence[ServiceSpec], *, gpus: bool) -> tuple[BundleGroup, ...]:
    """Return the groups of bundles of the services, in the order in which they are reserved.

    Engines have as many GPUs as workers, on one node; in a cluster without GPUs as many CPUs. The ranks of the trainer come first, so
    that engines leave them whole nodes.
    """
    workers, groups = settings.trainer.workers, list[BundleGroup]()
    names = [service.name for service in services]
    trainer = Bundle("train", gpus=int(gpus and not workers.per_node))
    if workers.per_node and "train" in names:
        rank = Bundle(RANKS, cpus=workers.per_node, gpus=workers.per_node if gpus else 0)
        groups += [BundleGroup((rank,)) for _ in range(workers.nodes)]
    at_home = [Bundle(name) for name in names if name in _AT_HOME]
    if "train" in names and not trainer.gpus:
        at_home.append(trainer)
    if at_home:
        groups.append(BundleGroup(tuple(at_home), home=True))
    if "train" in names and trainer.gpus:
        groups.append(BundleGroup((trainer,)))
    size = parallel_sizes(settings.engine.extra_args).workers
    engine = (1, size) if gpus else (size, 0)
    groups += [BundleGroup((Bundle(name, *engine),)) for name in names if kind_of(name) == "engine"]
    groups += [BundleGroup((Bundle(name),)) for name in names if name == "build"]
    agents = tuple(Bundle(name) for name in names if kind_of(name) in {"worker", "run"})
    return (*groups, *([BundleGroup(agents, "SPREAD")] if agents else []))


def lacking(groups: Sequence[BundleGroup], nodes: Sequence[Node], home: str) -> list[Bundle]:
    """Return the bundles for which the nodes are too few or too small, even if nothing else ran on them.

    The groups are in the order in which they are reserved; `home` is the id of the home node.
    """
    free = {node.id: dict(node.resources) for node in nodes}
    missing: list[Bundle] = []
    for group in groups:
        candidates = [left for node_id, left in free.items() if not group.home or node_id == home]
        for bundle in group.bundles:
            fitting = [left for left in candidates if all(left.get(kind, 0) >= need for kind, need in bundle.resources.items())]
            if not fitting:
                missing.append(bundle)
                continue
            # Ray, too, prefers a node without GPUs for what needs none.
            chosen = min(fitting, key=lambda left: (left.get("GPU", 0), -left.get("CPU", 0)))
            for kind, need in bundle.resources.items():
                chosen[kind] -= need
    return missing


def lack_text(missing: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    """Return a clause with the resources that the cluster lacks, and those that it has."""
    needs = ", ".join(
        f"{bundle.service} ({' and '.join(f'{amount:g} {kind}' for kind, amount in bundle.resources.items())} on one node)"
        for bundle in missing
    )
    return f"no node has room for {needs}; the cluster has {', '.join(str(node) for node in nodes)}"


def shared_paths(settings: Settings, groups: Sequence[BundleGroup]) -> list[str]:
    """Return the settings whose paths services on several nodes read or write, and which must be the same disk on all of them."""
    engine, trainer = settings.engine, settings.trainer
    away = {kind_of(bundle.service) for group in groups if not group.home for bundle in group.bundles}
    engine_is_away, trainer_is_away = "engine" in away, bool({"train", RANKS} & away)
    paths = {
        # Without trainer.model, training begins with the engine's.
        "engine.model": engine.model if engine_is_away or (trainer_is_away and not trainer.model) else None,
        "trainer.model": trainer.model if trainer_is_away else None,
        "trainer.directory": trainer.directory
        if trainer_is_away or (engine_is_away and trainer.weight_sync.method != "transfer")
        else None,
    }
    return [f"{key} = {path}" for key, path in paths.items() if path]


def _is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in LOOPBACK


def _at(url: str, host: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{in_url(host)}:{parts.port}" if parts.port else in_url(host)))
