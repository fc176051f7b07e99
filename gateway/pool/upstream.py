"""What answers calls: an engine of ours (`gateway.pool.backend`), or a frozen model that somebody else serves.

In: a backend's settings, beginnings and ends of calls. Out: whether calls may go to it, and with which key. Invariant: the key is
shown to its own upstream only, and is replaced in what that answers before anybody records it or reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from enum import StrEnum

from gateway.vllm_plugin.asking import MESSAGES_PATH
from spangrad.errors import GatewayError
from spangrad.settings import BackendSettings

log = logging.getLogger(__name__)

FIRST_REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 60.0
"""How long a frozen upstream that cannot be reached is left alone: each time twice as long."""
ANTHROPIC_VERSION = "2023-06-01"


class BackendStatus(StrEnum):
    """Whether the backend answers calls."""

    SERVING = "serving"
    """It does."""
    PUBLISHING = "publishing"
    """New weights are on their way: new calls wait, calls in flight go on."""
    ASLEEP = "asleep"
    """It was sent to sleep, and has lent its memory: new calls wait."""
    DRAINING = "draining"
    """It leaves, for good: calls in flight go on, new ones go elsewhere."""
    DOWN = "down"
    """It is not admitted; the reason is at hand."""


class BackendDownError(GatewayError):
    """A call was refused because no backend holds weights that anybody vouches for."""


class Upstream:
    """What the pool knows of a backend."""

    def __init__(self, name: str, settings: BackendSettings) -> None:
        self.name = name
        self.url = base_url(settings.url)
        self.policy = settings.policy
        self.kind = settings.kind
        self.limit = settings.limit
        self.model = settings.model
        """What the upstream is asked for. None: what the client asked for."""
        self.status = BackendStatus.DOWN
        self.reason = ""
        """Why it is down."""
        self.in_flight = 0
        self.calls = 0
        """Calls that it was given, in all."""
        self.idle = asyncio.Event()
        """No call is in flight."""
        self.idle.set()
        self._key = settings.key.get_secret_value() if settings.key else ""
        self.changed: Callable[[], None] = lambda: None
        """Called when the status has changed."""

    @property
    def is_engine(self) -> bool:
        """Whether it is one of ours: answers with token ids, takes orders, can be published to."""
        return self.kind == "engine"

    @property
    def provider(self) -> str:
        """`gen_ai.provider.name` of its calls."""
        return "vllm" if self.is_engine else self.kind

    def refusal(self, path: str) -> str:
        """Why it does not answer calls of this path; empty: it does."""
        if self.kind == "anthropic" and path != MESSAGES_PATH:
            return f"policy {self.policy!r} is served by Anthropic's interface, which answers {MESSAGES_PATH} alone."
        return ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that carry its key."""
        if not self._key:
            return {}
        if self.kind == "anthropic":
            return {"x-api-key": self._key}
        return {"Authorization": f"Bearer {self._key}"}

    def add_headers(self, headers: MutableMapping[str, str]) -> None:
        """Put the headers of its own among a request's."""
        headers.update(self.headers)
        if self.kind == "anthropic":
            headers.setdefault("anthropic-version", ANTHROPIC_VERSION)

    @property
    def has_room(self) -> bool:
        """Whether a call more is within its limit."""
        return self.limit is None or self.in_flight < self.limit

    @property
    def worth_a_try(self) -> bool:
        """Whether, while no backend serves, a call may find out that this one does."""
        return False

    def scrub(self, text: bytes) -> bytes:
        """What the upstream said, without the key, should it have quoted it."""
        return text.replace(self._key.encode(), b"***") if self._key else text

    def scrubber(self) -> Scrubber:
        """The same for what comes in parts."""
        return Scrubber(self._key.encode())

    def begin(self) -> None:
        """A call goes to it."""
        self.in_flight += 1
        self.calls += 1
        self.idle.clear()

    def end(self) -> None:
        """A call has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def become(self, status: BackendStatus, reason: str = "") -> None:
        """Change the status; one that leaves does so whatever a publication or a rest that began before comes to."""
        if self.status is not BackendStatus.DRAINING:
            self.status, self.reason = status, reason
            self.changed()

    def could_not_connect(self, error: Exception) -> None:
        """A call found nobody there."""
        raise NotImplementedError

    def close(self) -> None:
        """It has left the pool."""


class Scrubber:
    """Takes a key out of what comes in parts, wherever it is cut."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._held = b""
        """An end that may be the beginning of the key."""

    def feed(self, data: bytes) -> bytes:
        """Take a part; give what may be shown of it now."""
        if not self._key:
            return data
        data = (self._held + data).replace(self._key, b"***")
        held = next((size for size in range(min(len(data), len(self._key) - 1), 0, -1) if data.endswith(self._key[:size])), 0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def rest(self) -> bytes:
        """What was held back, once all has come."""
        return self._held


class FrozenUpstream(Upstream):
    """A model that we do not train. It is judged by its calls alone: nobody is charged for health checks."""

    def __init__(self, name: str, settings: BackendSettings) -> None:
        super().__init__(name, settings)
        self.status = BackendStatus.SERVING
        self._rest = FIRST_REST_SECONDS
        self._waking: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """A call has ended; unless it found nobody, the upstream is well."""
        super().end()
        if self.status is BackendStatus.SERVING:
            self._rest = FIRST_REST_SECONDS

    def could_not_connect(self, error: Exception) -> None:
        """Leave it alone for a while, then let the next call try."""
        if self.status is BackendStatus.SERVING:
            self.become(BackendStatus.DOWN, f"{unreachable(self, error)} It is tried again within {self._rest:g} s.")
            log.error("backend %s is down: %s", self.name, self.reason)
            self._waking = asyncio.get_running_loop().call_later(self._rest, self.become, BackendStatus.SERVING)
            self._rest = min(2 * self._rest, LONGEST_REST_SECONDS)

    def close(self) -> None:
        """Try it no more."""
        if self._waking:
            self._waking.cancel()


def base_url(url: str) -> str:
    """A URL without the `/v1` that paths begin with."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unreachable(upstream: Upstream, error: Exception) -> str:
    """The sentence for a backend that does not answer."""
    what = str(error) or type(error).__name__
    if upstream.is_engine:
        return f"the engine at {upstream.url} does not answer ({what}). Start it with `spangrad engine`, or set gateway.engine_url."
    return f"the upstream at {upstream.url} does not answer ({what})."
