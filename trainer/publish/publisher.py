"""Client that publishes committed versions to the gateway, which alone controls engines.

In: a committed version, and optionally its weights, which are then sent when the gateway requests them. Out: the gateway serves it.
Invariant: a version is published by path and checksum, so that an engine loads the weights that the ledger committed; publishing the
version that is served already changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from spangrad.errors import GatewayError
from spangrad.http.json_http import ask
from spangrad.http.service import gateway_service
from spangrad.settings import GatewaySettings, Settings
from spangrad.types import PolicyVersion
from trainer.publish.offers import WeightSource
from trainer.publish.sender import WeightsSender

_REFUSALS = {400, 401, 403, 405, 409, 413, 422}
"""HTTP statuses of permanent refusals; others, such as those of a proxy before a gateway that starts, are transient."""
_REMEDY = (
    "The version stays committed and is published when `spangrad train` starts again; trainer.weight_sync.publish = false trains without "
    "a gateway."
)


class GatewayRefusedError(GatewayError):
    """The gateway refuses permanently: it does not accept the version, the token or the request."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Time of a policy's engines since the gateway began."""

    seconds: float
    """Seconds that the engines were in the gateway's pool, summed over engines."""
    busy: float
    """Seconds of these in which they had a call in flight."""

    def idle_share_since(self, before: EngineUsage) -> float | None:
        """Return the idle share of the engines' time since an earlier state.

        None: there was no time, the gateway began anew, or it never saw a call, as in direct mode.
        """
        seconds, busy = self.seconds - before.seconds, self.busy - before.busy
        return 1 - busy / seconds if self.busy and seconds > 0 and 0 <= busy <= seconds else None


class Publisher:
    """HTTP client of the gateway's administration of policies."""

    stages: Mapping[str, float] = {}
    """Seconds of each stage of the last publication, of the engine that took the longest; `files`: reading before it. Empty: no engine had
    to load anything."""

    sent: Mapping[str, int] = {}
    """Bytes that engines were sent in the last publication, as words (`full`) and as differences (`delta`). Empty: none."""

    usage: EngineUsage | None = None
    """Time of the policy's engines when the gateway was last asked for the version that it serves. None: it was not."""

    def __init__(
        self,
        gateway: GatewaySettings,
        remedy: str = _REMEDY,
        sender: WeightsSender | None = None,
        calls: Mapping[str, object] | None = None,
    ) -> None:
        """Send requests to gateway.url, with gateway.token when there is one; the remedy is the last sentence of an error's text.

        Without a sender of weights engines read files. `calls` has the publication's `in_flight` and `drain_seconds`; without, they are the
        gateway's defaults.
        """
        self._service = gateway_service(gateway.url, gateway.token)
        self._seconds = gateway.request_timeout_seconds
        self._remedy = remedy
        self._sender = sender
        self._calls = calls or {}

    def served(self, policy: str) -> int | None:
        """Return the version that the gateway serves. None: it has not admitted its engine yet.

        Raises:
            GatewayError: it does not answer, or does not know the policy.
        """
        state = self._ask("GET", f"/admin/policies/{quote(policy, safe='')}")
        self.usage = EngineUsage(float(state.get("engine_seconds", 0.0)), float(state.get("busy_seconds", 0.0)))
        version = state["version"]
        return None if version is None else int(version)

    def publish(self, version: PolicyVersion, *, again: bool = False, weights: WeightSource | None = None) -> float:
        """Make the gateway serve a version, and wait until its engines do.

        Args:
            version: the version to serve.
            again: True to serve it even if it is older than the served one, or was rolled back.
            weights: where the version's weights are, for the sender if there is one. None: engines read files.

        Returns:
            Seconds that the gateway took.

        Raises:
            GatewayRefusedError: it refuses permanently.
            GatewayError: it does not answer, or cannot now.
        """
        body: dict[str, object] = {"version": version.version, "path": version.path, "checksum": version.checksum, **self._calls}
        if again:
            body["again"] = True
        with self._sender.offering(weights) if self._sender and weights else contextlib.nullcontext() as sender:
            if sender:
                body["sender"] = sender
            response = self._ask("POST", f"/admin/policies/{quote(version.policy, safe='')}/versions", body)
        self.sent = self._sender.sent if sender and self._sender else {}
        seconds = float(response["seconds"])
        engines: list[dict[str, float]] = list(response.get("stages", {}).values())
        slowest = max(engines, key=lambda stages: sum(stages.values()), default={})
        self.stages = {"files": max(seconds - sum(slowest.values()), 0.0), **slowest} if slowest else {}
        return seconds

    def sleep(self, policy: str, level: int, seconds: float, *, renew: bool = False) -> None:
        """Have all engines of a policy free their memory, once the calls in flight have ended.

        Args:
            policy: whose engines.
            level: 1 to keep the weights in main memory, 2 to forget them.
            seconds: time after which the gateway wakes them, from now on.
            renew: True to give engines that sleep more time, and to send none to sleep.

        Raises:
            GatewayRefusedError: it refuses permanently.
            GatewayError: it does not answer, or no engine serves.
        """
        self._ask("POST", f"/admin/policies/{quote(policy, safe='')}/sleep", {"level": level, "seconds": seconds, "renew": renew})

    def wake_up(self, policy: str) -> None:
        """Have all engines of a policy that sleep serve again, with the version that is served.

        Raises:
            GatewayError: it does not answer, or an engine does not wake.
        """
        self._ask("POST", f"/admin/policies/{quote(policy, safe='')}/wake_up")

    def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        try:
            return ask(self._service, method, path, body, seconds=self._seconds)
        except GatewayError as error:
            kind = GatewayRefusedError if error.http_status in _REFUSALS else GatewayError
            raise kind(f"{error} {self._remedy}") from error


def publisher_of(settings: Settings) -> Publisher | None:
    """Return the publisher of the settings. None: versions are not published.

    Raises:
        SettingsError: this process cannot listen at trainer.weight_sync.transfer_host.
    """
    if not settings.trainer.weight_sync.publish:
        return None
    trainer = settings.trainer
    calls: dict[str, object] = {"in_flight": trainer.weight_sync.in_flight}
    if trainer.weight_sync.in_flight == "drain":
        calls["drain_seconds"] = trainer.weight_sync.drain_seconds
    return Publisher(settings.gateway, sender=WeightsSender(trainer) if trainer.weight_sync.method == "transfer" else None, calls=calls)
