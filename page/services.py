"""Services as the overview shows them: whether each answers, and by how much the builder lags.

In: the settings' addresses, the status of `spangrad up`. Out: plain values for JSON. Invariant: a service that does not answer delays the
others by no more than `_ANSWER_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spangrad.errors import SpangradError
from spangrad.http.json_http import status_of, text_of
from spangrad.processes import LOOPBACK
from spangrad.settings import Settings
from spangrad.store.rollout.record import counted
from spangrad.supervisor import run_directory

_ANSWER_SECONDS = 1.0
_LAG, _WAITING = "spangrad_builder_lag_seconds", "spangrad_builder_waiting_rollouts"
_COVERED = frozenset({"store", "gateway", "queue", "page"})
"""Services that are asked over HTTP, or are this one."""
_NAMES = {"build": "builder", "train": "trainer"}
"""Command of a service -> its name, where they differ."""
_RUNNING = frozenset({"ready", "done"})


def services_of(settings: Settings) -> list[dict[str, Any]]:
    """Return the services that the settings name and those that `spangrad up` runs here: name, whether it answers, and a detail."""
    requests: dict[str, Callable[[], dict[str, Any]]] = {
        "store": lambda: _answering(f"{settings.store.url}/ping"),
        "gateway": lambda: _answering(f"{settings.gateway.url}/readyz"),
    }
    if settings.queue.url:
        requests["queue"] = lambda: _answering(f"{settings.queue.url}/healthz")
    if address := settings.builder.metrics_address:
        token = None if address.rpartition(":")[0] in LOOPBACK else settings.store.password
        requests["builder"] = lambda: _builder(f"http://{address}/metrics", token)
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = {name: threads.submit(request) for name, request in requests.items()}
    answered = [{"name": name, **answer.result()} for name, answer in answers.items()]
    supervised = map(_supervised, _status(settings.up.directory)["services"])
    return answered + [service for service in supervised if service["name"] not in _COVERED | requests.keys()]


def _status(directory: Path) -> Mapping[str, Any]:
    try:
        return run_directory.status_of(directory) or {"services": []}
    except SpangradError:  # of another user, whose services are asked over HTTP alone
        return {"services": []}


def _answering(url: str) -> dict[str, Any]:
    # One that asks for its token answers as well.
    status = status_of(url, _ANSWER_SECONDS)
    return {"answers": status is not None and status < 500, "detail": ""}


def _builder(url: str, token: str | None) -> dict[str, Any]:
    text = text_of(url, _ANSWER_SECONDS, token)
    try:
        return {"answers": text is not None, "detail": _lags(text or "")}
    except (KeyError, ValueError):  # another program listens at the address
        return {"answers": False, "detail": f"what {url} answers is no builder's metrics. Fix builder.metrics_address"}


def _lags(metrics: str) -> str:
    """Return the builder's lag by mode, where something waits; empty where nothing does.

    Raises:
        KeyError: a sample lacks its mode.
        ValueError: the text is not in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    lags, waiting = (
        {sample.labels["mode"]: sample.value for sample in samples if sample.name == name and sample.value} for name in (_LAG, _WAITING)
    )
    return ", ".join(f"{mode}: {waiting.get(mode, 0):.0f} wait, the oldest for {lags[mode]:.1f} s" for mode in sorted(lags))


def _supervised(service: Mapping[str, Any]) -> dict[str, Any]:
    name = str(service["name"])
    state = str(service.get("state", ""))
    restarts = service.get("restarts", 0)
    parts = [state if state not in _RUNNING else "", f"restarted {counted(restarts, 'time')}" if restarts else "", service.get("cause", "")]
    return {"name": _NAMES.get(name, name), "answers": state in _RUNNING, "detail": ", ".join(filter(None, parts))}
