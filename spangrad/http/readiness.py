"""Wait of a command for the services that it needs, which may still be starting.

In: names and URLs. Out: nothing, once all answer. Invariant: a service that does not answer is named in the log at once, with its URL and
what starts it; an answer that is an error ends the wait, since the caller words it better.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from spangrad.errors import SpangradError
from spangrad.http.json_http import status_of
from spangrad.http.service import without_userinfo
from spangrad.settings import Settings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_REMINDER_SECONDS = 30.0
_NOT_READY = 503


@dataclass(frozen=True, slots=True)
class NeededService:
    """A service that a command needs."""

    name: str
    """Its name at the beginning of a sentence, such as `the gateway`."""
    url: str
    """URL that answers once the service is ready; status 503 means that it is not."""
    command: str
    """Command that starts it."""
    setting: str
    """Setting of its address."""


def needs_of_rollouts(settings: Settings) -> list[NeededService]:
    """Return the services that rollouts need: store, gateway, and the queue where there is one."""
    url = settings.queue.url
    gateway = NeededService("the gateway's engine", f"{settings.gateway.url.rstrip('/')}/readyz", "gateway", "gateway.url")
    queue = NeededService("the queue", f"{(url or '').rstrip('/')}/readyz", "queue", "queue.url")
    store = NeededService("the span store", settings.store.otlp_endpoint, "store", "store.otlp_endpoint")
    return [store, *([gateway] if settings.runner.gateway else []), *([queue] if url else [])]


def need_of_store(settings: Settings) -> list[NeededService]:
    """Return the span store, as builder and trainer need it."""
    return [NeededService("the span store", f"{settings.store.url.rstrip('/')}/ping", "store", "store.url")]


def await_services(services: Iterable[NeededService], timeout_seconds: float) -> None:
    """Wait until every service answers, all of them within the time limit.

    Raises:
        SpangradError: one does not answer in time.
    """
    end = time.monotonic() + timeout_seconds
    for service in services:
        reminder = 0.0
        while status_of(service.url) in {None, _NOT_READY}:
            now = time.monotonic()
            remedy = f"Start it with `spangrad {service.command}`, or everything with `spangrad up`, or set {service.setting}."
            if now > end:
                raise SpangradError(
                    f"{service.name} at {without_userinfo(service.url)} does not answer after {timeout_seconds:g} s. {remedy}"
                )
            if now >= reminder:
                logger.warning("waiting for %s, which does not answer at %s. %s", service.name, without_userinfo(service.url), remedy)
                reminder = now + _REMINDER_SECONDS
            time.sleep(_POLL_SECONDS)
