"""The engine behind the gateway: what it serves, whether calls may go to it, and the orders it takes.

In: vLLM's control routes and our plugin's. Out: a `Backend` that calls pass through. Invariant: a backend is `serving`
only after it has answered a generation probe with the weights that it says it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, TypeVar

import aiohttp
import msgspec

from gateway.chat import CHAT_PATH, Answer, parse_request, read_answer
from spangrad.errors import EngineError, GatewayError
from spangrad.settings import Settings

log = logging.getLogger(__name__)

CONTROL_SECONDS = 60
"""How long an order may take that moves no weights."""
PROBE_SECONDS = 60
POLL_SECONDS = 0.5
CHECKSUM_METHOD = "spangrad_checksum"

_T = TypeVar("_T")


class BackendStatus(StrEnum):
    """Whether the backend answers calls."""

    SERVING = "serving"
    """It does."""
    PUBLISHING = "publishing"
    """New weights are on their way: new calls wait, calls in flight go on."""
    DOWN = "down"
    """It is not admitted; the reason is at hand."""


class BackendDownError(GatewayError):
    """A call was refused because the engine holds weights that nobody vouches for."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What our plugin in the engine says of it."""

    policy: str
    version: int
    tokenizer_hash: str
    warm: bool


class _Results(msgspec.Struct):
    results: list[str]


class _Pause(msgspec.Struct):
    is_paused: bool


class Backend:
    """One engine."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        self.url = settings.gateway.engine_url.rstrip("/")
        self.policy = settings.gateway.policy
        self.status = BackendStatus.DOWN
        self.reason = f"the engine at {self.url} is not admitted yet"
        self.info: EngineInfo | None = None
        """None: never reached while it was warm."""
        self.checksum = ""
        """Of the parameters in the engine's memory, in its dtype; empty: not known."""
        self.lock = asyncio.Lock()
        """Held by whoever changes the status."""
        self._session = session
        self._start_seconds = settings.engine.start_timeout_seconds
        self._reload_seconds = settings.gateway.request_timeout_seconds
        self._broken = False
        self._open = asyncio.Event()
        self._open.set()

    async def admit_call(self) -> None:
        """Let a call through; it waits while weights are published.

        An engine that was never reached is tried all the same: it may be up by now, and if not the call says so.

        Raises:
            BackendDownError: a publication or probe failed.
        """
        await self._open.wait()
        if self._broken:
            raise BackendDownError(self.reason)

    @asynccontextmanager
    async def closed(self) -> AsyncGenerator[None]:
        """Keep new calls waiting."""
        self._open.clear()
        self.status = BackendStatus.PUBLISHING
        try:
            yield
        finally:
            self._open.set()

    def serve(self, info: EngineInfo, checksum: str) -> None:
        """Admit the backend."""
        self.info, self.checksum = info, checksum
        self.status, self.reason, self._broken = BackendStatus.SERVING, "", False

    def take_down(self, reason: str, *, broken: bool) -> None:
        """Withdraw the backend; a broken one is sent no calls until it is published to, or starts anew."""
        log.error("engine down: %s", reason)
        self.status, self.reason, self._broken = BackendStatus.DOWN, reason, broken

    async def watch(self) -> None:
        """Admit the engine when it is there, and again after each of its restarts; never returns."""
        loop = asyncio.get_running_loop()
        overdue = loop.time() + self._start_seconds
        reachable = True
        while True:
            async with self.lock:
                try:
                    info = await self.read_info()
                except EngineError as error:
                    if self.status is BackendStatus.SERVING or (self._broken and reachable):
                        self.take_down(str(error), broken=False)
                    elif not self._broken:
                        self.reason = str(error)
                    reachable = False
                    if loop.time() > overdue:
                        log.error("no engine within engine.start_timeout_seconds = %g: %s", self._start_seconds, error)
                        overdue = float("inf")
                else:
                    reachable = True
                    overdue = float("inf")
                    restarted = self.info is not None and info.version != self.info.version
                    if not self._broken and (self.status is BackendStatus.DOWN or restarted):
                        await self._try_to_admit(info)
            await asyncio.sleep(POLL_SECONDS)

    async def _try_to_admit(self, info: EngineInfo) -> None:
        if info.policy != self.policy:
            self.take_down(
                f"the engine at {self.url} serves policy {info.policy!r}, this gateway {self.policy!r}. "
                "Set gateway.policy to the same for both, and restart the other.",
                broken=True,
            )
        elif not info.warm:
            self.reason = f"the engine at {self.url} is warming up"
        else:
            try:
                # Known before the verdict: whoever publishes to an engine that is down compares with its dtype.
                self.info, self.checksum = info, await self.read_checksum()
                pause = await self._request("GET", "/is_paused", None, CONTROL_SECONDS)
                if self._decode("/is_paused", pause, _Pause).is_paused:
                    raise EngineError("it is paused, as a publication left it that failed. Publish again, or restart the engine.")
                await self.probe(info.version)
            except EngineError as error:
                self.take_down(f"the engine at {self.url} was not admitted: {error}", broken=True)
            else:
                self.serve(info, self.checksum)
                log.info("engine admitted: policy %r version %d at %s, %s", info.policy, info.version, self.url, self.checksum)

    async def read_info(self) -> EngineInfo:
        """What the engine serves."""
        return self._decode("/spangrad/info", await self._request("GET", "/spangrad/info", None, CONTROL_SECONDS), EngineInfo)

    async def read_checksum(self) -> str:
        """Checksum of the parameters in the engine's memory."""
        body = await self.order("/collective_rpc", {"method": CHECKSUM_METHOD}, self._reload_seconds)
        checksums = self._decode("/collective_rpc", body, _Results).results
        if len(checksums) != 1:
            raise EngineError(f"the engine at {self.url} has {len(checksums)} workers; the parameters of one only can be compared.")
        return checksums[0]

    async def reload(self, path: str) -> None:
        """Load weights from a directory that the engine's machine sees."""
        await self.order("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}, self._reload_seconds)

    async def probe(self, version: int) -> None:
        """Have one token generated, outside the record, and check that it comes with everything that training needs.

        Raises:
            EngineError: it does not.
        """
        question = {"model": self.policy, "messages": [{"role": "user", "content": "probe"}], "max_tokens": 1}
        request = parse_request(msgspec.json.encode(question))
        body = await self._request("POST", CHAT_PATH, request.for_engine(), PROBE_SECONDS)
        try:
            answer, _ = read_answer(body, request)
        except ValueError as error:
            raise EngineError(f"its answer to a probe cannot be read: {error}") from None
        lacking = _lacking(answer, version)
        if lacking:
            raise EngineError(f"its answer to a probe has no {lacking}. Start it with `spangrad engine`.")

    async def order(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONTROL_SECONDS) -> bytes:
        """Give an order; the answer's body.

        Raises:
            EngineError: it was refused, or nobody answered.
        """
        return await self._request("POST", path, msgspec.json.encode(body or {}), seconds)

    def _decode(self, path: str, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"the engine at {self.url} answers {path} with something else than expected: {error}") from None

    async def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            headers = {"Content-Type": "application/json"}
            async with self._session.request(method, self.url + path, data=body, headers=headers, timeout=timeout) as answer:
                text = await answer.read()
                if answer.status != 200:
                    raise EngineError(
                        f"the engine at {self.url} answers {path} with {answer.status}: {text[:500].decode(errors='replace')}"
                    )
                return text
        except TimeoutError:
            raise EngineError(f"the engine at {self.url} does not answer {path} within {seconds:g} s.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(unreachable(self.url, error)) from error


def unreachable(url: str, error: Exception) -> str:
    """The sentence for an engine that does not answer."""
    what = str(error) or type(error).__name__
    return f"the engine at {url} does not answer ({what}). Start it with `spangrad engine`, or set gateway.engine_url."


def _lacking(answer: Answer, version: int) -> str:
    """What an answer lacks of what training needs; empty: nothing."""
    choices = answer.ordered()
    if not answer.prompt_ids or not choices or not choices[0].token_ids:
        return "token ids"
    if len(choices[0].logprobs) != len(choices[0].token_ids):
        return "logprobs"
    if answer.engine is None or answer.engine.version_end != version:
        return f"policy version {version}"
    return ""
