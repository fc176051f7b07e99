"""Registration of an engine with its gateway, from the engine's own process.

In: engine.url, and where the gateway is. Out: a backend of the gateway as long as the engine runs. Invariant: the gateway learns of the
engine whenever both are up, whichever started first or was restarted; an engine that ends in good order is a backend no more, unless the
gateway's settings name it; an engine that an order removed is a backend again only after a restart of its process.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlencode

import msgspec

from spangrad.errors import GatewayError
from spangrad.http.json_http import ask
from spangrad.http.service import gateway_service
from spangrad.settings import Settings

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 5.0
"""Time between two registrations: how late a gateway that has forgotten the engine learns of it again."""
_ANSWER_SECONDS = 10.0
_REFUSED = 409
"""Status of a registration that the gateway refuses, such as that of an engine which was removed."""


class _Registered(msgspec.Struct):
    name: str
    configured: bool


class Registration:
    """Backend of the gateway at gateway.url, while the block runs; nothing where engine.url is not set."""

    def __init__(self, settings: Settings, renewal_seconds: float = RENEWAL_SECONDS) -> None:
        """Register nothing yet."""
        engine = settings.engine
        self._gateway = gateway_service(settings.gateway.url, settings.gateway.token)
        self._where = settings.gateway.url
        self._body: dict[str, object] = {"url": engine.url, "policy": settings.gateway.policy, "renew": True}
        if engine.token:
            self._body["key"] = engine.token.get_secret_value()
        self._renewal_seconds = renewal_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="registration", daemon=True) if engine.url else None
        self._name = ""
        """Name of the backend to remove at the end; empty: there is none."""
        self._registered = False
        """True once it was registered."""
        self._failure = ""

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        if self._name:
            # Since the last renewal the name may have become another engine's: the URL says whose it must be.
            query = urlencode({"now": "true", "url": self._body["url"]})
            try:
                ask(self._gateway, "DELETE", f"/admin/backends/{quote(self._name, safe='')}?{query}", seconds=_ANSWER_SECONDS)
            except GatewayError as failure:
                log.warning("the engine may still be a backend of the gateway: %s", failure)

    def _renew(self) -> None:
        while True:
            try:
                backend = self._register()
            except GatewayError as failure:
                if failure.http_status == _REFUSED:  # the name may be another backend's by now
                    self._name = ""
                if str(failure) != self._failure:  # a gateway that is away for long is logged once
                    log.warning("the engine is not registered yet: %s", failure)
                self._failure = str(failure)
            else:
                if not self._registered or self._failure:
                    log.info("the engine is backend %s of the gateway at %s", backend.name, self._where)
                self._name, self._registered, self._failure = "" if backend.configured else backend.name, True, ""
            if self._ended.wait(self._renewal_seconds):
                return

    def _register(self) -> _Registered:
        """Register the engine, which may be registered already.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        answer = ask(self._gateway, "POST", "/admin/backends", {**self._body, "again": self._registered}, seconds=_ANSWER_SECONDS)
        try:
            return msgspec.convert(answer, _Registered)
        except msgspec.ValidationError as error:
            reason = f"what answers at gateway.url = {self._where} is no gateway of this version ({error}). Set gateway.url."
            raise GatewayError(reason) from None
