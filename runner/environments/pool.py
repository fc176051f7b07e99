"""Pool of environment instances, each leased to one attempt at a time.

Invariant: an instance serves one attempt at a time, and the next one only after it was reset and has passed its health check; an instance
that fails either is discarded and replaced. A lease that is not renewed expires by the monotonic clock of this process.

Each instance has a task that runs its life cycle: create, free, leased, reset, free again. One task does these steps in order, so two
attempts never use an instance at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runner.environments.instance import Factory, Instance, UnhealthyError
from runner.environments.wire import InstanceRequest, InstanceState, InstanceStatus, Leased
from spangrad.episode.user_calls import USER_ERRORS
from spangrad.errors import EnvironmentsError
from spangrad.leases import LeaseClock
from spangrad.text_sanitizer import storable, storable_trace

_SWEEP_SECONDS = 0.2
"""Pause between two checks for expired leases, in seconds."""
_HEALTH_SECONDS = 10.0
"""Pause between two health checks of a free instance, in seconds."""
_RETRY_SECONDS = (1.0, 5.0, 30.0)
"""Pauses before another try to create an instance, in seconds; the last one repeats."""
log = logging.getLogger(__name__)


class NoFreeInstanceError(Exception):
    """No instance became free in time."""


class PreparationError(Exception):
    """An instance could not be prepared for a task."""


@dataclass(eq=False, slots=True)
class _Request:
    message: InstanceRequest
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Future[Leased] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class _Slot:
    number: int
    state: InstanceState = InstanceState.MAKING
    users: int = 0
    request: _Request | None = None
    created: int = 0


class InstancePool:
    """A fixed number of instances, from `start` to `close`; the caller must run `watch` meanwhile."""

    def __init__(
        self, factory: Factory, count: int, *, lease_seconds: float, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store the arguments; `start` creates the instances.

        A lease holds for `lease_seconds` of the monotonic `clock` without a heartbeat; each call of an instance may take `seconds`.
        """
        self._factory = factory
        self._lease_seconds = lease_seconds
        self._seconds = seconds
        self._slots = [_Slot(number) for number in range(count)]
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._requests: dict[str, _Request] = {}
        """Requests that wait or have a lease, by the lease's name."""
        self._watch = LeaseClock[str](clock)
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()
        """Events of leases and instances, counted since the start: leased, released, reclaimed, refused, unbegun, made, discarded."""

    async def start(self) -> None:
        """Create the first instance, to check the factory; the others are created in the background.

        Raises:
            EnvironmentsError: the first instance cannot be created.
        """
        try:
            first = await self._create(self._slots[0])
        except EnvironmentsError:
            raise
        except USER_ERRORS as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise EnvironmentsError(f"no environment can be made: {reason}. Fix the factory.") from error
        self._tasks = [asyncio.create_task(self._run_slot(slot, first if slot.number == 0 else None)) for slot in self._slots]

    async def close(self) -> None:
        """End all leases, and close all instances, each in bounded time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def lease(self, message: InstanceRequest) -> Leased:
        """Lease an instance; a request repeated under the same name returns the same lease.

        Raises:
            NoFreeInstanceError: no instance became free in time.
            PreparationError: the instance could not be prepared for this task.
        """
        if (known := self._requests.get(message.lease)) is not None:
            if not known.answer.done():
                raise NoFreeInstanceError("this lease is being asked for already")
            self._watch.renew(message.lease, self._lease_seconds)
            return known.answer.result()
        request = self._requests[message.lease] = _Request(message)
        self._queue.put_nowait(request)
        try:
            try:
                async with asyncio.timeout(message.wait_seconds):
                    await request.taken.wait()
            except TimeoutError:
                if not request.taken.is_set():
                    self.counts["refused"] += 1
                    raise NoFreeInstanceError(f"all {len(self._slots)} instances are taken") from None
            return await asyncio.shield(request.answer)
        except BaseException:
            # A slot that has taken the request meanwhile sees that its client does not wait any more.
            request.released.set()
            self._requests.pop(message.lease, None)
            self._watch.forget(message.lease)
            raise

    def beat(self, leases: Iterable[str]) -> list[str]:
        """Renew leases; return those that are not held any more."""
        expired: list[str] = []
        for name in leases:
            if name in self._watch:
                self._watch.renew(name, self._lease_seconds)
            else:
                expired.append(name)
        return expired

    def release(self, lease: str) -> bool:
        """End a lease, or withdraw a waiting request; return whether there was one."""
        return self._end(lease, "released")

    def statuses(self) -> list[InstanceStatus]:
        """Return the state of each instance."""
        return [
            InstanceStatus(
                instance=str(slot.number),
                state=slot.state,
                users=slot.users,
                rollout_id=slot.request.message.rollout_id if slot.request is not None else None,
            )
            for slot in self._slots
        ]

    @property
    def waiting(self) -> int:
        """Number of requests in line."""
        return sum(not request.taken.is_set() for request in self._requests.values())

    def sweep(self) -> None:
        """End the leases that were not renewed in time."""
        for name in self._watch.expired():
            log.warning("lease %s was not renewed for %g s, and is reclaimed", name, self._lease_seconds)
            self._end(name, "reclaimed")

    def _end(self, lease: str, how: str) -> bool:
        request = self._requests.pop(lease, None)
        if request is None:
            return False
        self._watch.forget(lease)
        request.released.set()
        if not request.answer.done():
            request.answer.set_exception(NoFreeInstanceError("it was released before it was granted"))
            request.taken.set()
        self.counts[how] += 1
        return True

    async def watch(self) -> None:
        """End expired leases, until cancelled."""
        async for _ in self._watch.ticks(_SWEEP_SECONDS):
            self.sweep()

    async def _run_slot(self, slot: _Slot, instance: Instance | None) -> None:
        """Run the life cycle of a slot's instances, one after the other."""
        while True:
            slot.state = InstanceState.MAKING
            instance = instance or await self._create_with_retries(slot)
            try:
                while True:
                    slot.state = InstanceState.FREE
                    await self._serve_lease(slot, instance, await self._next(instance))
            except UnhealthyError as error:
                self.counts["discarded"] += 1
                log.warning("environment %s is discarded, and another one is created: %s", instance.name, error)
            finally:
                if (problem := await instance.close()) is not None:
                    log.warning("environment %s: %s", instance.name, problem)
            instance = None

    async def _create_with_retries(self, slot: _Slot) -> Instance:
        failures = 0
        while True:
            try:
                return await self._create(slot)
            except USER_ERRORS as error:
                pause = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)]
                log.warning("no environment can be created (%s: %s); retry in %g s", type(error).__name__, error, pause)
                await asyncio.sleep(pause)
                failures += 1

    async def _create(self, slot: _Slot) -> Instance:
        instance = Instance(f"{slot.number}.{slot.created}", self._seconds)
        slot.created += 1
        try:
            await instance.make(self._factory)
            await instance.check_health()
        except BaseException:
            await instance.close()
            raise
        self.counts["made"] += 1
        return instance

    async def _next(self, instance: Instance) -> _Request:
        """Wait for a request; check the instance's health meanwhile."""
        while True:
            try:
                async with asyncio.timeout(_HEALTH_SECONDS):
                    request = await self._queue.get()
            except TimeoutError:
                await instance.check_health()
                continue
            if not request.released.is_set():
                return request

    async def _serve_lease(self, slot: _Slot, instance: Instance, request: _Request) -> None:
        """Lease the instance to one attempt, until it is reset again."""
        slot.state, slot.request = InstanceState.LEASED, request
        slot.users += 1
        request.taken.set()
        name = request.message.lease
        try:
            environment = await instance.begin(request.message.input)
        except USER_ERRORS as error:
            self.counts["unbegun"] += 1
            sentence = storable(f"{type(error).__name__}: {error}".rstrip(": ")[:1000])
            log.warning("environment %s cannot begin: %s\n%s", instance.name, sentence, storable_trace(error))
            self._requests.pop(name, None)
            if not request.answer.done():
                request.answer.set_exception(PreparationError(f"instance {instance.name}: {sentence}"))
        else:
            if not request.released.is_set():
                self.counts["leased"] += 1
                self._watch.renew(name, self._lease_seconds)
                held = Leased(lease=name, instance=instance.name, environment=environment, lease_seconds=self._lease_seconds)
                request.answer.set_result(held)
                await request.released.wait()
        slot.state, slot.request = InstanceState.RESETTING, None
        await instance.reset()
