"""Services of a training loop on this machine, from its settings.

Invariant: pure but for the settings; a service whose address lies on another machine is not started here, but for the gateway, whose
address may be a proxy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

from spangrad.errors import SettingsError
from spangrad.http.service import in_url
from spangrad.processes import LOOPBACK, own_command
from spangrad.settings import Settings
from spangrad.settings.runner import END_SECONDS
from spangrad.supervisor.service import ServiceSpec


def training_services(
    settings: Settings, logs: Path, options: Sequence[str] = (), agent: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> tuple[ServiceSpec, ...]:
    """Return the services that the settings ask for: store, queue, engine, gateway, builder, trainer and agent.

    The store, the queue and the engine are left out where their URLs name another machine or port; the queue, too, where there is no
    queue.url; the agent where it has no arguments. Without gateway.engine_url there are up.engines engines where engine.url is set.

    Args:
        settings: resolved settings.
        logs: directory of the services' logs.
        options: options of every service's command, such as `--config FILE`.
        agent: arguments of `spangrad run --follow-demand` where they name --tasks, else of `spangrad worker`. Empty: no agent is run.
        env: variables added to the environment of every service.

    Raises:
        SettingsError: there is no model; or there are arguments of an agent, and no queue.
    """
    model = settings.engine.model or settings.trainer.model
    if model is None:
        raise SettingsError(
            "engine.model is not set: there is no model to train. Write a settings file with `spangrad init --model DIRECTORY`."
        )
    queue_url = settings.queue.url
    if agent and queue_url is None:
        raise SettingsError("an agent needs a queue: set queue.url, such as http://127.0.0.1:8190.")
    service = _factory(logs, options, env or {})
    store = _is_local(settings.store.url, settings.store.host, settings.store.clickhouse_port)
    queue = queue_url is not None and _is_local(queue_url, settings.queue.host, settings.queue.port)
    after_store = ["store"] if store else []
    after_all = [*after_store, *(["queue"] if queue else []), "gateway"]
    gateway = service("gateway", f"{settings.gateway.url}/readyz", after_store)
    gateway_is_local = _is_local(settings.gateway.url, settings.gateway.host, settings.gateway.port)
    return tuple(
        started
        for started in (
            service("store", f"{settings.store.url}/ping") if store else None,
            service("queue", f"{queue_url}/healthz") if queue else None,
            *_engines(service, settings, after_store, model),
            gateway if gateway_is_local else replace(gateway, port_setting=""),
            service("build", None, after_store, ["--follow"]),
            replace(
                service("train", None, after_store, ["--follow", "--model", str(settings.trainer.model or model)]),
                may_finish=settings.trainer.max_steps > 0,
            ),
            *(_agents(service, after_all, agent, settings) if agent else ()),
        )
        if started is not None
    )


def page_service(settings: Settings, logs: Path, options: Sequence[str] = ()) -> ServiceSpec:
    """Return the web page, which no other service needs; arguments as for `training_services`."""
    store = _is_local(settings.store.url, settings.store.host, settings.store.clickhouse_port)
    url = f"http://{in_url(settings.page.host)}:{settings.page.port}/healthz"
    return _factory(logs, options, {})("page", url, ["store"] if store else [])


def agent_command(arguments: Sequence[str]) -> str:
    """Return the command whose arguments these are: `run` if they name --tasks, else `worker`."""
    options = takewhile(lambda word: word != "--", arguments)  # what follows belongs to the agent's program
    return "run" if any(word.partition("=")[0] == "--tasks" for word in options) else "worker"


def _engines(service: Callable[..., ServiceSpec], settings: Settings, needs: Sequence[str], model: Path) -> list[ServiceSpec]:
    """Return the engine of gateway.engine_url if it is local, or those that register themselves, at successive ports."""
    gateway, engine = settings.gateway, settings.engine
    if _is_local(gateway.engine_url, engine.host, engine.port):
        return [service("engine", f"{gateway.engine_url}/health", needs, ["--model", str(model)])]
    if gateway.engine_url or engine.url is None:
        return []
    count, first = settings.up.engines, engine.url.removesuffix(f":{engine.port}")
    started: list[ServiceSpec] = []
    for number in range(count):
        port, url = engine.port + number, engine.url if number == 0 else f"{first}:{engine.port + number}"
        spec = service("engine", f"{url}/health", needs, ["--model", str(model), "--port", str(port), "--set", f"engine.url={url}"])
        started.append(renamed(spec, f"engine-{number + 1}") if count > 1 else spec)
    return started


def renamed(service: ServiceSpec, name: str) -> ServiceSpec:
    """Return one of several services of a kind, with a name and a log of its own."""
    return replace(service, name=name, log=service.log.with_name(f"{name}.log"))


_PORT_SETTINGS = {"store": "store.clickhouse_port", **{name: f"{name}.port" for name in ("queue", "engine", "gateway", "page")}}
"""Service with a URL -> setting of its port."""


def _factory(logs: Path, options: Sequence[str], env: Mapping[str, str]) -> Callable[..., ServiceSpec]:
    def service(name: str, ready_url: str | None, needs: Sequence[str] = (), arguments: Sequence[str] = ()) -> ServiceSpec:
        command, log, port_setting = tuple(own_command(name, *options, *arguments)), logs / f"{name}.log", _PORT_SETTINGS.get(name, "")
        return ServiceSpec(name, command, log, ready_url, tuple(needs), env, port_setting=port_setting)

    return service


def _agents(service: Callable[..., ServiceSpec], needs: Sequence[str], arguments: Sequence[str], settings: Settings) -> list[ServiceSpec]:
    grace, count = settings.runner.drain_seconds + END_SECONDS, settings.up.workers
    if agent_command(arguments) == "run":
        return [replace(service("run", None, needs, ["--follow-demand", *arguments]), grace_seconds=grace)]
    worker = replace(service("worker", None, needs, arguments), grace_seconds=grace)
    return [worker] if count == 1 else [renamed(worker, f"worker-{number + 1}") for number in range(count)]


def _is_local(url: str, host: str, port: int) -> bool:
    """Return whether a URL names this port of this machine, or of the address that the service binds."""
    parts = urlsplit(url)
    return (parts.hostname in LOOPBACK or parts.hostname == host.strip("[]").lower()) and parts.port == port
