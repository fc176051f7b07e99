"""Upstreams that answer calls: an engine of ours (`gateway.pool.backend`), or a frozen model that a third party serves.

In: a backend's settings, beginnings and ends of calls. Out: whether calls may go to it, and with which key. Invariant: the key is
sent to its own upstream only, and is replaced in the upstream's answers before they are recorded or read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from itertools import count

from pydantic import SecretStr

from gateway.vllm_plugin.request_fields import MESSAGES_PATH
from spangrad.errors import GatewayError
from spangrad.http.service import bearer
from spangrad.settings import BackendSettings

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
"""Longest back-off from a frozen upstream that cannot be reached; it begins at FIRST_BACKOFF_SECONDS and doubles each time."""
_IDS = count()
ANTHROPIC_VERSION = "2023-06-01"


class BackendStatus(StrEnum):
    """Status of a backend: whether it answers calls."""

    SERVING = "serving"
    """It answers calls."""
    PUBLISHING = "publishing"
    """It takes new weights: new calls wait, calls in flight go on."""
    ASLEEP = "asleep"
    """It was sent to sleep, and has freed its memory: new calls wait."""
    DRAINING = "draining"
    """It is being removed: calls in flight go on, new ones go to other backends."""
    DOWN = "down"
    """It is not admitted; `Upstream.reason` says why."""


class BackendDownError(GatewayError):
    """A call was refused because no backend with verified weights is up."""


class Upstream:
    """A backend in the pool: its address and limits, its status, and its calls in flight."""

    def __init__(self, name: str, settings: BackendSettings) -> None:
        self.name = name
        self.id = next(_IDS)
        """Number that no other backend of this process has."""
        self.settings = settings
        self.url = base_url(settings.url)
        self.policy = settings.policy
        self.kind = settings.kind
        self.limit = settings.limit
        self.model = settings.model
        """Model name to send to the upstream. None: the one that the client sent."""
        self.configured = False
        """True if the gateway's settings name it: it stays a backend when it ends."""
        self.status = BackendStatus.DOWN
        self.reason = ""
        """Reason why it is down."""
        self.in_flight = 0
        self.in_flight_elsewhere = 0
        """Calls in flight that other gateways sent, as they reported last."""
        self.calls = 0
        """Total number of calls that it was given."""
        self.idle = asyncio.Event()
        """Set while no call is in flight."""
        self.idle.set()
        self._added_at = time.monotonic()
        self._busy_since: float | None = None
        self._busy_seconds = 0.0
        """Seconds of the ended periods in which a call was in flight."""
        self._key = settings.key.get_secret_value() if settings.key else ""
        self.changed: Callable[[], None] = lambda: None
        """Callback for changes of the status."""
        self.wait_elsewhere: Callable[[Upstream], Awaitable[None]] | None = None
        """Callback that waits until other gateways send it no calls, and none of theirs is in flight. None: there are no others."""

    def take_key(self, key: SecretStr) -> None:
        """Send another key from now on."""
        self.settings = self.settings.model_copy(update={"key": key})
        self._key = key.get_secret_value()
        self.changed()

    @property
    def is_engine(self) -> bool:
        """Return whether it is one of our engines: it answers with token ids, takes orders, and can be published to."""
        return self.kind == "engine"

    @property
    def provider(self) -> str:
        """Return `gen_ai.provider.name` of its calls."""
        return "vllm" if self.is_engine else self.kind

    def refusal(self, path: str) -> str:
        """Return the reason why it does not answer calls of this path; empty: it does."""
        if self.kind == "anthropic" and path != MESSAGES_PATH:
            return f"policy {self.policy!r} is served by Anthropic's interface, which answers {MESSAGES_PATH} alone."
        return ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that carry its key."""
        if self.kind == "anthropic" and self._key:
            return {"x-api-key": self._key}
        return bearer(self._key)

    def add_headers(self, headers: MutableMapping[str, str]) -> None:
        """Add the upstream's own headers to a request's."""
        headers.update(self.headers)
        if self.kind == "anthropic":
            headers.setdefault("anthropic-version", ANTHROPIC_VERSION)

    @property
    def seconds_in_pool(self) -> float:
        """Return the seconds since it was added."""
        return time.monotonic() - self._added_at

    @property
    def busy_seconds(self) -> float:
        """Return the seconds of those in which a call was in flight."""
        return self._busy_seconds + (0.0 if self._busy_since is None else time.monotonic() - self._busy_since)

    @property
    def has_room(self) -> bool:
        """Return whether another call is within its limit."""
        return self.limit is None or self.load < self.limit

    @property
    def load(self) -> int:
        """Return the calls in flight of all gateways."""
        return self.in_flight + self.in_flight_elsewhere

    @property
    def capacity(self) -> int:
        """Return the measure by which its calls in flight are compared with another backend's."""
        return 1

    @property
    def may_be_tried(self) -> bool:
        """Return whether a call may try this backend while it is down and no other serves."""
        return False

    def scrub(self, text: bytes) -> bytes:
        """Return what the upstream answered, with the key replaced where the answer quotes it."""
        return text.replace(self._key.encode(), b"***") if self._key else text

    def scrubber(self) -> Scrubber:
        """Return a scrubber that replaces the key in data that comes in parts."""
        return Scrubber(self._key.encode())

    def begin(self) -> None:
        """Count a call that goes to this backend."""
        self._set_load(self.in_flight + 1, self.in_flight_elsewhere)
        self.calls += 1
        self.idle.clear()

    def end(self) -> None:
        """Count a call that has ended."""
        self._set_load(self.in_flight - 1, self.in_flight_elsewhere)
        if not self.in_flight:
            self.idle.set()

    def set_elsewhere(self, calls: int) -> None:
        """Take over the number of other gateways' calls in flight."""
        self._set_load(self.in_flight, calls)

    async def wait_idle(self) -> None:
        """Wait until no call is in flight, of any gateway; the caller has closed the backend to new ones."""
        await self.idle.wait()
        if self.wait_elsewhere:
            await self.wait_elsewhere(self)

    def set_status(self, status: BackendStatus, reason: str = "") -> None:
        """Change the status, unless the backend is draining: the end of an earlier publication or back-off does not revive it."""
        if self.status is not BackendStatus.DRAINING:
            self.status, self.reason = status, reason
            self.changed()

    def could_not_connect(self, error: Exception) -> None:
        """Handle a call's failure to connect to this backend."""
        raise NotImplementedError

    def refused_call(self) -> bool:
        """Handle its refusal of a call because it is paused; return whether the call waits for it, or goes to another backend."""
        return self.status in {BackendStatus.PUBLISHING, BackendStatus.ASLEEP}

    def _set_load(self, own: int, elsewhere: int) -> None:
        if not self.load and own + elsewhere:
            self._busy_since = time.monotonic()
        elif self.load and not own + elsewhere:
            self._busy_seconds, self._busy_since = self.busy_seconds, None
        self.in_flight, self.in_flight_elsewhere = own, elsewhere

    def close(self) -> None:
        """Release what the backend holds when it has left the pool."""


class Scrubber:
    """Replaces a key in data that comes in parts, wherever the parts are cut."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._held = b""
        """End of the data so far, held back since it may be the beginning of the key."""

    def feed(self, data: bytes) -> bytes:
        """Process a part; return the data that may be passed on now."""
        if not self._key:
            return data
        data = (self._held + data).replace(self._key, b"***")
        held = next((size for size in range(min(len(data), len(self._key) - 1), 0, -1) if data.endswith(self._key[:size])), 0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def rest(self) -> bytes:
        """Return the data that was held back, once all parts have come."""
        return self._held


class FrozenUpstream(Upstream):
    """A model that we do not train. Its status follows from its calls alone, since health checks would cost the user money."""

    def __init__(self, name: str, settings: BackendSettings) -> None:
        super().__init__(name, settings)
        self.status = BackendStatus.SERVING
        self._rest = FIRST_BACKOFF_SECONDS
        self._waking: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Count a call that has ended; if the upstream was reached, reset the back-off."""
        super().end()
        if self.status is BackendStatus.SERVING:
            self._rest = FIRST_BACKOFF_SECONDS

    def could_not_connect(self, error: Exception) -> None:
        """Back off from the upstream for a while, then let the next call try."""
        if self.status is BackendStatus.SERVING:
            self.set_status(BackendStatus.DOWN, f"{unreachable(self, error)} It is tried again within {self._rest:g} s.")
            log.error("backend %s is down: %s", self.name, self.reason)
            self._waking = asyncio.get_running_loop().call_later(self._rest, self.set_status, BackendStatus.SERVING)
            self._rest = min(2 * self._rest, LONGEST_BACKOFF_SECONDS)

    def close(self) -> None:
        """Cancel the next try."""
        if self._waking:
            self._waking.cancel()


def base_url(url: str) -> str:
    """Return a URL without the `/v1` that paths begin with."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unreachable(upstream: Upstream, error: Exception) -> str:
    """Return the error message for a backend that does not answer."""
    reason = str(error) or type(error).__name__
    if upstream.is_engine:
        return f"the engine at {upstream.url} does not answer ({reason}). Start it with `spangrad engine`, or set gateway.engine_url."
    return f"the upstream at {upstream.url} does not answer ({reason})."
