"""One engine: what it serves, whether calls may go to it, and the orders it takes.

In: vLLM's control routes and our plugin's. Out: a `Backend` that calls pass through. Invariant: a backend is `serving`
only after it has answered a generation probe with the weights that it says it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from gateway.dialects import CHAT
from gateway.dialects.answer import EngineAnswer
from gateway.pool.upstream import BackendStatus, Upstream, unreachable
from gateway.vllm_plugin.middleware import CHECKSUM_PATH
from spangrad.errors import JSON_ERRORS, CheckpointError, EngineError
from spangrad.settings import BackendSettings
from spangrad.weights.shards import ChecksumScope, EngineReports, EngineSums, combine

log = logging.getLogger(__name__)

CONTROL_SECONDS = 60
"""Time limit of an order that moves no weights."""
PROBE_SECONDS = 60
RANK_HEADER = "X-data-parallel-rank"
"""Header by which vLLM has one data-parallel replica answer a request."""

_T = TypeVar("_T")
_NO_HEADERS: Mapping[str, str] = {}


class EngineTopology(msgspec.Struct, frozen=True):
    """Processes that an engine consists of."""

    tensor: int = 1
    """Workers that share each layer."""
    pipeline: int = 1
    """Groups of workers that have the layers one after the other."""
    data: int = 1
    """Replicas, each of all weights."""
    api_servers: int = 1
    """Servers that take requests at the engine's one address."""


class EngineInfo(msgspec.Struct, frozen=True):
    """State and capabilities of an engine, as our plugin in it reports them."""

    policy: str
    version: int
    tokenizer_hash: str
    warm: bool
    asleep: bool = False
    """True if it has given its memory away."""
    model: str = ""
    """Directory of the weights that it was started with, while it serves them; empty: it serves others, or does not report them."""
    lora_rank: int = 0
    """Largest rank of the adapters that it takes. 0: it takes whole models."""
    zero_adapter: str = ""
    """Directory of the adapter that changes nothing; empty: it takes none."""
    transfer: str = ""
    """Transport by which it takes weights from a trainer; empty: it takes none."""
    dtype: str = ""
    """Dtype of the model in the engine."""
    checksum: ChecksumScope = ChecksumScope.FULL
    """Part of its parameters that is compared with a version's."""
    capacity: int = 1
    """Largest number of requests that it computes at once."""
    topology: EngineTopology = EngineTopology()
    shared_state: bool = True
    """True if its API servers share their state, so that an order to one reaches all."""
    started: int = 0
    """Start of its vLLM, in nanoseconds since 1970. 0: not known."""


class _Pause(msgspec.Struct):
    is_paused: bool


class Backend(Upstream):
    """An engine: its state, and the orders that it takes."""

    def __init__(self, name: str, settings: BackendSettings, session: aiohttp.ClientSession, reload_seconds: float) -> None:
        super().__init__(name, settings)
        self.model = self.model or self.policy
        self.reason = f"the engine at {self.url} is not admitted yet"
        self.info: EngineInfo | None = None
        """State that the engine reported. None: it was never reached while it was warm."""
        self.started = 0
        """Start of the vLLM that was looked at last; 0: not known."""
        self.held: EngineSums | None = None
        """Sums of the parameters in the engine's memory, by tensor. None: not known."""
        self.publication: dict[str, float] = {}
        """Seconds of each step of the last publication that succeeded; empty: there was none."""
        self.lock = asyncio.Lock()
        """Held by the task that changes the status."""
        self.sleeps_until: float | None = None
        """Time of the event loop at which it is woken if it sleeps. None: when that is ordered."""
        self.group = ""
        """Name of the connection for weights between the engine and a trainer; empty: none is known to be open."""
        self.restart_command = settings.restart_command
        self.broken = False
        """True if it is sent no calls until it is published to or restarted."""
        self.seconds = reload_seconds
        """Time limit in seconds of an order that moves weights."""
        self._session = session

    @property
    def capacity(self) -> int:
        """Largest number of calls that it computes at once; 1 until it was reached."""
        return self.info.capacity if self.info else 1

    @property
    def may_be_tried(self) -> bool:
        """Return whether a call may try the engine while it is down: it may be up by now, and if not, the call's error says so."""
        return self.status is BackendStatus.DOWN and not self.broken

    @property
    def scope(self) -> ChecksumScope:
        """Part of the parameters that is compared with a version's."""
        return self.info.checksum if self.info else ChecksumScope.FULL

    @property
    def checksum(self) -> str:
        """Checksum of what is compared of the parameters in the engine's memory; empty: nothing is."""
        return self.held.checksum if self.held and self.scope is not ChecksumScope.OFF else ""

    @property
    def uncompared(self) -> str:
        """Parameters of the engine that are not compared with a version's, in words; empty: all are."""
        if self.info is None:
            return ""
        if self.scope is ChecksumScope.OFF:
            return "engine.checksum = off: no parameter is compared"
        unread = self.held.unread if self.held else {}
        parts = ["engine.checksum = sampled: about 4,096 words of each parameter are compared"] * (self.scope is ChecksumScope.SAMPLED)
        if unread:
            name, reason = next(iter(unread.items()))
            count = len(unread) + len(self.held.tensors if self.held else ())
            parts.append(f"{len(unread)} of {count} tensors are not compared, such as {name}: {reason}")
        return "; ".join(parts)

    def serve(self, info: EngineInfo, held: EngineSums | None) -> None:
        """Admit the backend."""
        self.info, self.held, self.broken = info, held, False
        self.set_status(BackendStatus.SERVING)

    def take_down(self, reason: str, *, broken: bool) -> None:
        """Withdraw the backend; a broken one is sent no calls until it is published to or restarted."""
        log.error("backend %s is down: %s", self.name, reason)
        self.group = ""
        self.broken = broken
        self.set_status(BackendStatus.DOWN, reason)

    def could_not_connect(self, error: Exception) -> None:
        """Take the engine down after a failed connection; its watcher admits it again."""
        if self.status is BackendStatus.SERVING:
            self.take_down(unreachable(self, error), broken=False)

    async def wait_drained(self, max_seconds: float | None = None) -> None:
        """Wait until no call is in flight, of any gateway.

        Args:
            max_seconds: seconds after which the calls that are left are waited for no more. None: they have the time of a call.

        Raises:
            EngineError: some are still in flight after the time of a call.
        """
        try:
            await asyncio.wait_for(self.wait_idle(), self.seconds if max_seconds is None else max_seconds)
        except TimeoutError:
            if max_seconds is not None:
                log.info("%d calls are still in flight at %s after %g s: they go on with the new weights", self.load, self.url, max_seconds)
                return
            raise EngineError(f"{self.load} calls are still in flight at {self.url} after {self.seconds:g} s.") from None

    async def wake_weights(self) -> None:
        """Have the engine allocate the memory of its weights. It computes nothing before `wake_rest`."""
        await self.order("/wake_up?tags=weights", seconds=self.seconds)

    async def wake_rest(self) -> None:
        """Have the engine allocate its other memory; calls that have reached it go on with the weights that it holds."""
        await self.order("/wake_up?tags=kv_cache", seconds=self.seconds)

    async def read_info(self) -> EngineInfo:
        """Return the state that the engine reports."""
        return await self.fetch("/spangrad/info", EngineInfo)

    async def read_paused(self) -> bool:
        """Return whether the engine is paused."""
        return (await self.fetch("/is_paused", _Pause)).is_paused

    async def read_sums(self, part: str = "all") -> EngineSums | None:
        """Return the sums of the parameters in the engine's memory. None: the engine's setting is to compare none.

        Args:
            part: `all`, or `adapter` (the active adapters alone).

        Raises:
            EngineError: the engine does not answer, its workers hold different copies, or its replicas different weights.
        """
        if self.scope is ChecksumScope.OFF:
            return None
        body = await self.order(CHECKSUM_PATH, {"part": part}, self.seconds)
        try:
            return combine(self._decode(CHECKSUM_PATH, body, EngineReports))
        except CheckpointError as error:
            raise EngineError(f"the engine at {self.url}: {error}") from error

    async def probe(self, version: int) -> None:
        """Have each data-parallel replica generate one token, unrecorded, and check that its response holds everything that training needs.

        Raises:
            EngineError: one does not.
        """
        question = {"model": self.model, "messages": [{"role": "user", "content": "probe"}], "max_tokens": 1}
        request = CHAT.parse(msgspec.json.encode(question))
        replicas = self.info.topology.data if self.info else 1
        for rank in range(replicas):
            owner = f"replica {rank}'s" if replicas > 1 else "its"
            headers = {RANK_HEADER: str(rank)} if replicas > 1 else {}
            body = await self._request("POST", CHAT.path, request.for_engine(), PROBE_SECONDS, headers)
            try:
                answer, _ = CHAT.read(body, request)
            except ValueError as error:
                raise EngineError(f"{owner} answer to a probe cannot be read: {error}") from None
            lacking = _lacking(answer, version)
            if lacking:
                raise EngineError(f"{owner} answer to a probe has no {lacking}. Start it with `spangrad engine`.")

    async def order(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONTROL_SECONDS) -> bytes:
        """Send an order; return the body of the response.

        Raises:
            EngineError: the engine refused it, or did not answer.
        """
        return await self._request("POST", path, msgspec.json.encode(body or {}), seconds)

    async def fetch(self, path: str, kind: type[_T]) -> _T:
        """Return the engine's response to a GET request."""
        return self._decode(path, await self._request("GET", path, None, CONTROL_SECONDS), kind)

    def _decode(self, path: str, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except JSON_ERRORS as error:
            raise EngineError(f"the engine at {self.url} answers {path} with something else than expected: {error}") from None

    async def _request(self, method: str, path: str, body: bytes | None, seconds: float, more: Mapping[str, str] = _NO_HEADERS) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            headers = {"Content-Type": "application/json", **self.headers, **more}
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                text = await answer.read()
                if answer.status != 200:
                    reason = self.scrub(text[:500]).decode(errors="replace")
                    raise EngineError(f"the engine at {self.url} answers {path} with {answer.status}: {reason}")
                return text
        except TimeoutError:
            raise EngineError(f"the engine at {self.url} does not answer {path} within {seconds:g} s.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(unreachable(self, error)) from error


def _lacking(answer: EngineAnswer, version: int) -> str:
    """Return which of the data that training needs an answer lacks; empty: none."""
    choices = answer.ordered()
    if not answer.prompts or not choices or not choices[0].token_ids:
        return "token ids"
    if len(choices[0].logprobs) != len(choices[0].token_ids):
        return "logprobs"
    if answer.engine is None or answer.engine.versions != [[(0, version)]]:
        return f"policy version {version}"
    return ""
