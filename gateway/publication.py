"""New weights into a running engine.

In: a model directory, its version and checksum, from the trainer. Out: an engine that serves them, or an error that
says what it serves now. Invariant: weights that differ from the checksum are refused before the engine is touched; from
the reload on, no call begins until the engine has shown by checksum that it holds exactly these weights, and by a probe
that it generates with them; if it does not, it is taken out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.backend import Backend, BackendStatus
from spangrad.errors import CheckpointError, EngineError, GatewayError
from spangrad.weights import checksum_directory

log = logging.getLogger(__name__)


class PublicationError(GatewayError):
    """A publication was refused; the engine was not touched."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PublicationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer hands over."""

    version: int
    path: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that is served."""

    policy: str
    version: int
    checksum: str
    seconds: float


async def publish(backend: Backend, policy: str, request: PublicationRequest) -> Publication:
    """Make the engine serve a version.

    Raises:
        PublicationError: the request cannot be met; nothing changed.
        EngineError: the engine failed; the message says what state that left.
    """
    began = time.monotonic()
    if policy != backend.policy:
        raise PublicationError(404, f"policy {policy!r} is not served here. This gateway serves {backend.policy!r}.")
    async with backend.lock:
        info = backend.info
        if info is None:
            raise PublicationError(503, f"{backend.reason}. Publish again once /readyz answers 200.")
        expected = await asyncio.to_thread(_expected_checksum, request, backend.checksum)
        if backend.status is BackendStatus.SERVING and (request.version, expected) == (info.version, backend.checksum):
            return Publication(policy, request.version, request.checksum, 0.0)
        if request.version <= info.version and not (backend.status is BackendStatus.DOWN and request.version == info.version):
            raise PublicationError(409, f"version {request.version} is not newer than version {info.version}, which is served.")
        sound = backend.status is BackendStatus.SERVING
        async with backend.closed():
            await _replace_weights(backend, request, expected, sound=sound)
            backend.serve(msgspec.structs.replace(info, version=request.version), expected)
    seconds = time.monotonic() - began
    log.info("published: policy %r version %d from %s (%.3f s)", policy, request.version, request.path, seconds)
    return Publication(policy, request.version, request.checksum, seconds)


def _expected_checksum(request: PublicationRequest, engine_checksum: str) -> str:
    """The checksum that the engine must show: of these files, in its dtype."""
    path = Path(request.path)
    if not path.is_dir():
        raise PublicationError(409, f"there is no directory {request.path!r} on the gateway's machine.")
    try:
        found = checksum_directory(path)
        if found != request.checksum:
            raise PublicationError(409, f"the weights in {request.path} have checksum {found}, not {request.checksum}. Write them anew.")
        dtype = engine_checksum.partition(":")[0]
        return found if not dtype or found.startswith(f"{dtype}:") else checksum_directory(path, dtype)
    except CheckpointError as error:
        raise PublicationError(409, str(error)) from error


async def _replace_weights(backend: Backend, request: PublicationRequest, expected: str, *, sound: bool) -> None:
    """Take the engine through the steps; `sound` tells whether the weights that it has may be served on."""
    step = "pause"
    try:
        # Calls in flight are kept, and their KV cache with the prefix cache is recomputed with the new weights.
        await backend.order("/pause?mode=keep")
        await backend.order("/reset_prefix_cache?reset_running_requests=true")
        step = "reload"
        await backend.reload(request.path)
        step = "checksum"
        held = await backend.read_checksum()
        if held != expected:
            raise EngineError(f"the engine holds {held or 'no weights'} after the reload, not {expected}.")
        step = "update_weight_version"
        await backend.order("/update_weight_version", {"new_version": str(request.version)})
        step = "resume"
        await backend.order("/resume")
        # Only now: in the pause, generation waits.
        step = "probe"
        await backend.probe(request.version)
    except EngineError as error:
        reason = f"publication of version {request.version} failed at {step}: {error}"
        if step == "pause" and sound:
            await _resume_old(backend, reason)
        else:
            await _give_up(backend, reason)
        raise EngineError(f"{reason} The engine is {backend.status}.") from error


async def _resume_old(backend: Backend, reason: str) -> None:
    """Nothing was loaded: let the engine go on with the weights it has."""
    try:
        await backend.order("/resume")
    except EngineError as error:
        backend.take_down(f"{reason} It could not be resumed: {error}", broken=False)
    else:
        backend.status = BackendStatus.SERVING


async def _give_up(backend: Backend, reason: str) -> None:
    """Nobody knows what the engine holds: take it out, and end the calls that are frozen in it."""
    backend.take_down(f"{reason} Publish again, or restart the engine.", broken=True)
    try:
        # Those that wait for the end of the pause end too: it will not come.
        await backend.order("/pause?mode=abort")
    except EngineError as error:
        log.warning("calls in flight could not be ended: %s", error)
