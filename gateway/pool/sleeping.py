"""Sleep and wake-up of an engine that shares a GPU with the trainer: it frees its memory, and allocates it again.

In: an operator's or trainer's orders. Out: an engine that sleeps, or serves again. Invariant: an engine that was woken answers no call
before its checksum has shown that it holds the weights that it fell asleep with, or it was given those that its policy serves.
"""

from __future__ import annotations

import logging

from gateway.pool.backend import Backend
from gateway.pool.policy import Policy
from gateway.pool.upstream import BackendStatus
from gateway.weights.publication import Expected, PublicationError, put
from spangrad.errors import EngineError

log = logging.getLogger(__name__)


async def send_to_sleep(backend: Backend, level: int) -> None:
    """Let calls in flight end, keep new ones waiting, and have the engine free its memory.

    Args:
        backend: the engine.
        level: vLLM's: 1 keeps the weights in the host's memory, 2 forgets them.

    Raises:
        PublicationError: it does not serve.
        EngineError: it did not fall asleep in good order, and is down.
    """
    async with backend.lock:
        if backend.status is not BackendStatus.SERVING:
            raise PublicationError(409, f"backend {backend.name} is {backend.status}: only one that serves is sent to sleep.")
        backend.set_status(BackendStatus.ASLEEP)
        try:
            await backend.wait_drained()
        except EngineError:
            backend.set_status(BackendStatus.SERVING)
            raise
        try:
            await backend.order(f"/sleep?level={level}", seconds=backend.seconds)
        except EngineError as error:
            backend.take_down(f"it could not be sent to sleep: {error} Publish again, or restart the engine.", broken=True)
            raise EngineError(backend.reason) from error
    log.info("backend %s sleeps", backend.name)


async def wake_up(backend: Backend, policy: Policy) -> None:
    """Have an engine allocate its memory again, and serve.

    Raises:
        PublicationError: it does not sleep.
        EngineError: it does not serve after it was woken, and is down.
    """
    async with backend.lock:
        info = backend.info
        if backend.status is not BackendStatus.ASLEEP or info is None:
            raise PublicationError(409, f"backend {backend.name} is {backend.status}, not asleep.")
        release = policy.release_for(backend)
        try:
            await backend.order("/wake_up", seconds=backend.seconds)
            backend.set_status(BackendStatus.PUBLISHING)
            held = await backend.read_sums()
            if held and held == backend.held and not policy.missed(backend, info.version):
                await backend.probe(info.version)
                backend.serve(info, held)
            elif release:
                await put(backend, release, await Expected(release).by(backend))
            else:
                raise EngineError("its weights changed while it slept, without a publication.")
        except (EngineError, PublicationError) as error:
            if not backend.broken:
                backend.take_down(f"it could not be woken: {error} Publish again, or restart the engine.", broken=True)
            raise EngineError(backend.reason) from error
    log.info("backend %s is awake", backend.name)
