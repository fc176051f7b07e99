"""Sleep and wake-up of engines that share GPUs with the trainer: they free their memory, and allocate it again.

In: an operator's or trainer's orders. Out: an engine that sleeps, or serves again. Invariant: an engine that was woken answers no call
before its checksum has shown that it holds the weights that it fell asleep with, or it was given those that its policy serves; one that
sleeps for a trainer is woken by its watcher where the trainer does not ask for more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable

from gateway.pool.backend import Backend
from gateway.pool.policy import Policy
from gateway.pool.upstream import BackendStatus
from gateway.weights.publication import Expected, PublicationError, put
from spangrad.errors import EngineError

log = logging.getLogger(__name__)


async def send_to_sleep(backend: Backend, level: int, seconds: float | None = None) -> None:
    """Let calls in flight end, keep new ones waiting, and have the engine free its memory.

    Of vLLM's levels, 1 keeps the weights in the host's memory, 2 forgets them. After `seconds` the engine's watcher wakes it. None: it
    sleeps until it is woken, or published to.

    Raises:
        PublicationError: it does not serve, or would forget the base of its adapters.
        EngineError: it did not fall asleep in good order, and is down.
    """
    async with backend.lock:
        if backend.status is not BackendStatus.SERVING:
            raise PublicationError(409, f"backend {backend.name} is {backend.status}: only one that serves is sent to sleep.")
        if level > 1 and backend.info and backend.info.lora_rank:
            raise PublicationError(409, f"backend {backend.name} takes adapters, and would forget their base. Order level 1.")
        backend.set_status(BackendStatus.ASLEEP)
        try:
            await backend.wait_drained()
        except EngineError:
            backend.set_status(BackendStatus.SERVING)
            raise
        try:
            # Calls end first that came past the gateway.
            await backend.order(f"/sleep?level={level}&mode=wait", seconds=backend.seconds)
        except EngineError as error:
            backend.take_down(f"it could not be sent to sleep: {error} Publish again, or restart the engine.", broken=True)
            raise EngineError(backend.reason) from error
        _sleep_on(backend, seconds)
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
            await backend.wake_weights()
            held = await backend.read_sums()
            if held and held == backend.held and not policy.missed(backend, info.version):
                await backend.wake_rest()
                await backend.order("/resume")  # it kept calls of other gateways waiting
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


async def wake_overdue(backend: Backend, policy: Policy) -> None:
    """Wake an engine that has slept for its time: the trainer that it slept for is gone."""
    until = backend.sleeps_until
    if backend.status is not BackendStatus.ASLEEP or until is None or until > asyncio.get_running_loop().time():
        return
    log.warning("backend %s is woken: nobody has asked for more time", backend.name)
    # It is down then, and says why; or it was woken or published to meanwhile.
    with contextlib.suppress(EngineError, PublicationError):
        await wake_up(backend, policy)


async def send_policy_to_sleep(policy: Policy, level: int, seconds: float) -> None:
    """Send all engines of a policy to sleep, for so many seconds from now on; those that are down stay so.

    Raises:
        PublicationError: none serves or sleeps, or they cannot sleep at that level.
        EngineError: one did not fall asleep; the others sleep.
    """
    async with policy.lock:
        up = [engine for engine in policy.engines if engine.status is not BackendStatus.DOWN]
        if not up:
            raise PublicationError(503, f"{policy.why_down()}. Ask again once /readyz answers 200.")
        await _all(send_to_sleep(engine, level, seconds) for engine in up if engine.status is not BackendStatus.ASLEEP)
        keep_policy_asleep(policy, seconds)


def keep_policy_asleep(policy: Policy, seconds: float) -> None:
    """Have the engines of a policy that sleep go on with it for so many seconds from now on."""
    for engine in policy.engines:
        if engine.status is BackendStatus.ASLEEP:
            _sleep_on(engine, seconds)


async def wake_policy_up(policy: Policy) -> None:
    """Wake all engines of a policy that sleep.

    Raises:
        EngineError: one does not serve after it was woken, and is down; the others serve.
    """
    async with policy.lock:
        await _all(wake_up(engine, policy) for engine in policy.engines if engine.status is BackendStatus.ASLEEP)


def _sleep_on(backend: Backend, seconds: float | None) -> None:
    backend.sleeps_until = None if seconds is None else asyncio.get_running_loop().time() + seconds


async def _all(orders: Iterable[Awaitable[None]]) -> None:
    """Carry out orders to several engines, each to its end."""
    results = await asyncio.gather(*orders, return_exceptions=True)
    refused = next((error for error in results if isinstance(error, PublicationError)), None)
    for error in results:
        if error is not None and not isinstance(error, EngineError | PublicationError):
            raise error
    if refused and not any(isinstance(error, EngineError) for error in results):
        raise refused
    if any(results):
        raise EngineError(" ".join(str(error) for error in results if error))
