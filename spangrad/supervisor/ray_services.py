"""Launcher of services on the nodes of a Ray cluster: an actor for each, which runs the service as its child, in a reserved bundle.

In: the address of a cluster, groups of bundles, services. Out: their processes. Invariant: when this process ends, however it does, Ray
ends the actors, and the kernel their services; the supervisor alone restarts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from spangrad.errors import SpangradError
from spangrad.leases import is_here
from spangrad.ray_connection import connect_to_ray, first_line
from spangrad.supervisor.launcher import LocalProcess
from spangrad.supervisor.placement import CLUSTER, NODE, RANKS, BundleGroup, Node, lack_text, lacking
from spangrad.supervisor.service import ServiceSpec

PLACE_SECONDS = 300.0
"""Longest wait for resources since the last node joined, in seconds: autoscalers take minutes."""
_KILLED = -9
_STOP_SECONDS = 10.0
"""Time beyond a service's grace in which its actor must have stopped it, in seconds."""
_POLL_SECONDS = 0.5
_BUSY_SECONDS = 5.0
"""Time in which a busy cluster may reserve what it has, in seconds."""
_HEAD = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class Report:
    """State of a service's process, as its actor sees it."""

    pid: int | None = None
    holder: str = ""
    node: str = ""
    exit_code: int | None = None


class ServiceActor:
    """Actor that runs a service as its child. Its only thread is the one that started the service, as `LocalProcess` requires."""

    def __init__(self, service: ServiceSpec, directory: str) -> None:
        """Start the service in a directory; its command, environment and URL may hold the texts `NODE` and `CLUSTER`."""
        import ray

        os.chdir(directory)
        self._node = ray.util.get_node_ip_address()
        texts = {NODE: self._node, CLUSTER: str(ray.get_runtime_context().gcs_address)}
        command = tuple(_replaced(word, texts) for word in service.command)
        env = {key: _replaced(value, texts) for key, value in service.env.items()}
        url = service.ready_url and _replaced(service.ready_url, texts)
        self._process = LocalProcess(replace(service, command=command, env=env, ready_url=url), inherit_settings=False)

    def report(self) -> Report:
        """Return the state of the service's process; this is called often, and keeps its log from growing without bound."""
        self._process.rotate_log()
        return Report(self._process.pid, self._process.holder, self._node, self._process.exit_code)

    def log_end(self) -> str:
        """Return the end of the log that it has written since its start."""
        return self._process.log_end()

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting."""
        self._process.ask_to_end()

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, then end it and its children."""
        self._process.stop(grace_seconds)


class RayProcess:
    """Process of a service on a node of the cluster, seen through its actor."""

    def __init__(self, service: ServiceSpec, actor: Any) -> None:
        """Store a service and its actor, which may have no place yet."""
        self._service = service
        self._actor = actor
        self._pending = actor.report.remote()
        self._report = Report()
        self._failure = ""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None: it runs, or is about to. An actor that died counts as a process that was killed."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        if self._report.exit_code is None and ray.wait([self._pending], timeout=0)[0]:
            try:
                self._report = cast("Report", ray.get(self._pending))
            except ActorUnavailableError:
                pass  # the network may be back at the next look
            except RayError as error:
                self._failure = str(error) if self.pid is None else f"spangrad: its actor on {self.node} died: {first_line(error)}"
                self._report = replace(self._report, exit_code=_KILLED)
            if self._report.exit_code is None:
                self._pending = self._actor.report.remote()
        return self._report.exit_code

    @property
    def pid(self) -> int | None:
        """Return its id on its node; None: it has no place yet."""
        return self._report.pid

    @property
    def holder(self) -> str:
        """Return the process as `spangrad.leases.is_dead` knows it; empty: its node is another machine."""
        return self._report.holder if is_here(self._report.holder) else ""

    @property
    def node(self) -> str:
        """Return the address of its node; empty: it has none yet."""
        return self._report.node

    @property
    def ready_url(self) -> str | None:
        """Return the URL that answers with status 200 once it is ready. None: it is ready when it runs."""
        return self._service.ready_url.replace(NODE, self.node) if self._service.ready_url else None

    def log_end(self) -> str:
        """Return the end of the log that it has written since its start, or the cause of its actor's death."""
        import ray
        from ray.exceptions import RayError

        try:
            return self._failure or ray.get(self._actor.log_end.remote(), timeout=_STOP_SECONDS)
        except RayError as error:
            return str(error)

    def rotate_log(self) -> None:
        """Do nothing: its actor does, at each report."""

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting; idempotent."""
        if self.pid is not None and not self._failure:
            self._actor.ask_to_end.remote()

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, then end it and its children; idempotent."""
        import ray
        from ray.exceptions import RayError

        if self.pid is not None and not self._failure:
            try:
                ray.get(self._actor.stop.remote(grace_seconds), timeout=grace_seconds + _STOP_SECONDS)
            except RayError:
                pass  # it dies with its actor
        ray.kill(self._actor)


class RayCluster:
    """Connection to an existing cluster, and what is reserved in it until the context ends."""

    def __init__(self, address: str) -> None:
        """Connect.

        Raises:
            SpangradError: Ray is not installed, or no cluster answers, or it refuses this process.
        """
        self._groups: list[Any] = []
        self._places: dict[str, tuple[Any, int, BundleGroup]] = {}
        try:
            connect_to_ray(address)
        except ImportError as error:
            raise SpangradError(f"--ray needs Ray ({error}). Install spangrad-server[trainer], or leave --ray out.") from error
        except ConnectionError as error:
            raise SpangradError(
                f"no Ray cluster let this process in at --ray {address} ({error}). Start one with `ray start --head`, and give this "
                "process its token (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, docs/start/scaling.md)."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import ray

        self._remove(self._groups)
        ray.shutdown()

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        import ray

        return [Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]

    @property
    def home(self) -> Node:
        """Return the node of this process; the head where this process is on none, as with ray://."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        nodes = self.nodes
        return next((node for node in nodes if node.id == own), None) or next(node for node in nodes if _HEAD in node.resources)

    def reserve(self, groups: Sequence[BundleGroup], on_event: Callable[[str], None], seconds: float = PLACE_SECONDS) -> None:
        """Reserve the bundles of all groups, in order, and report where they are; those of the trainer's ranks are released again.

        Raises:
            SpangradError: the cluster lacks resources, and no node has joined for so many seconds.
        """
        from ray.util.placement_group import placement_group, placement_group_table

        home, ranks = self.home, list[Any]()
        addresses = dict[str, str]()
        for at, group in enumerate(groups):
            pin = [{"ray.io/node-id": home.id} if group.home else {}] * len(group.bundles)
            # By default it ends with this process.
            reserved = placement_group([bundle.resources for bundle in group.bundles], strategy=group.strategy, bundle_label_selector=pin)
            self._groups.append(reserved)
            self._await(reserved, groups[: at + 1], home, on_event, seconds)
            addresses |= {node.id: node.address for node in self.nodes}
            places = placement_group_table(reserved)["bundles_to_node_id"]
            for index, bundle in enumerate(group.bundles):
                amounts = " ".join(f"{amount:g} {kind}" for kind, amount in bundle.resources.items())
                on_event(f"{bundle.service}: {amounts} on {addresses.get(places[index], places[index])}")
                if bundle.service == RANKS:
                    ranks.append(reserved)
                else:
                    self._places[bundle.service] = (reserved, index, group)
        self._remove(ranks)

    def _await(self, reserved: Any, groups: Sequence[BundleGroup], home: Node, on_event: Callable[[str], None], seconds: float) -> None:
        known, reported, began = set[str](), "", time.monotonic()
        end = began + seconds
        while not reserved.wait(_POLL_SECONDS):
            nodes = self.nodes
            if known != (now := {node.id for node in nodes}):
                known, end = now, time.monotonic() + seconds
            missing = lacking(groups, nodes, home.id)
            busy = ", ".join(bundle.service for bundle in groups[-1].bundles)
            reason = lack_text(missing, nodes) if missing else f"other processes hold the resources of {busy} (`ray status` lists them)"
            if time.monotonic() > end:
                raise SpangradError(
                    f"--ray: {reason}. Add nodes, or lower up.engines, up.workers, trainer.workers or the parallel sizes of "
                    "engine.extra_args."
                )
            if reason != reported and (missing or time.monotonic() - began > _BUSY_SECONDS):
                on_event(f"waiting for the cluster: {reason}")
                reported = reason

    def launch(self, service: ServiceSpec) -> RayProcess:
        """Start a service in its bundle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reserved, index, group = self._places[service.name]
        bundle = group.bundles[index]
        actor = ray.remote(ServiceActor).options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, index),
        )
        return RayProcess(service, actor.remote(service, str(Path.cwd())))

    def _remove(self, groups: Sequence[Any]) -> None:
        from ray.exceptions import RayError
        from ray.util.placement_group import remove_placement_group

        for reserved in groups:
            try:
                remove_placement_group(reserved)
            except RayError:
                pass  # a cluster that is gone holds nothing
        self._groups = [group for group in self._groups if group not in groups]


def _replaced(text: str, texts: dict[str, str]) -> str:
    for name, value in texts.items():
        text = text.replace(name, value)
    return text
