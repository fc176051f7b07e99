"""Publication of new weights to one running engine, by any weight sync method.

In: a release (a model directory, its version and checksum) and a backend. Out: a backend that serves it, or an error that says what
it serves now. Invariant: weights that differ from the checksum are refused before the engine is touched; from the load on, no call
begins until the engine has shown by checksum that it holds exactly these weights, and by a probe that it generates with them; if it
does not, it is taken down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from gateway.pool.backend import Backend
from gateway.pool.upstream import BackendStatus
from gateway.weights.sync_methods import Adapter, SyncMethod, refusal_of, sync_method_of, with_base_of
from gateway.weights.transfer import SenderAddress, SenderSums
from spangrad.errors import CheckpointError, EngineError, GatewayError
from spangrad.weights.checksums import checksum_directory, sums_of_directory
from spangrad.weights.shards import ChecksumScope, EngineSums, TensorSums, checksum_of, difference

log = logging.getLogger(__name__)


class PublicationError(GatewayError):
    """A publication was refused; no engine was touched."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InFlight(StrEnum):
    """Treatment of the calls in flight at an engine that takes new weights."""

    KEEP = "keep"
    """They continue with the new weights from their current token."""
    DRAIN = "drain"
    """They end first, or as many of them as end within the given time."""
    ABORT = "abort"
    """They end at once, with what they have sampled so far and finish reason `abort`."""


class CallsInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """Treatment of calls in flight, with its time limit."""

    in_flight: InFlight = InFlight.KEEP
    drain_seconds: float | None = None
    """Longest wait of `drain`, in seconds; calls left then continue as with `keep`. None: the time limit of a call, after
    which the publication fails."""


class WeightsRelease(msgspec.Struct, frozen=True):
    """A policy version: its number, and the directory and checksum of its weights."""

    version: int
    path: str
    checksum: str
    """Checksum of all words of its weights; empty: not known, of weights that an engine was started with which compares fewer."""


_Dtypes = tuple[str, frozenset[tuple[str, str]]]
"""Dtype of an engine, and the dtypes of the tensors that it holds in another one."""


class Expected:
    """Sums that engines must show once they hold a release. The release's files are read once for each dtype and scope."""

    def __init__(self, release: WeightsRelease, sender: SenderAddress | None = None) -> None:
        """Expect a release that is read from its files, or that `sender` sends; the sender is asked for its sums."""
        self._release = release
        self.sender = sender
        self._sums: dict[tuple[_Dtypes, ChecksumScope], dict[str, TensorSums]] = {}
        self._whole = ""
        """Checksum of all words of the files, once they were read."""

    async def by(self, backend: Backend) -> EngineSums:
        """Return the sums that a backend must show, of the tensors that can be compared with those in its memory.

        Raises:
            PublicationError: the files are missing, broken or others than the checksum says, or the backend cannot take them.
        """
        unread = backend.held.unread if backend.held else {}
        dtypes = _dtypes_of(backend)
        key = dtypes, backend.scope
        if key not in self._sums:
            self._sums[key] = await (self._sent(backend, dtypes) if self.sender else asyncio.to_thread(self._read, dtypes, backend.scope))
        try:
            reason = refusal_of(backend, Path(self._release.path), self.sender)
        except CheckpointError as error:
            raise PublicationError(409, str(error)) from error
        if reason:
            raise PublicationError(409, reason)
        return EngineSums({name: sums for name, sums in self._sums[key].items() if name not in unread}, unread)

    async def _sent(self, backend: Backend, dtypes: _Dtypes) -> dict[str, TensorSums]:
        release, sender = self._release, self.sender
        assert sender
        if backend.scope is ChecksumScope.OFF:
            return {}
        try:
            question = {"dtype": dtypes[0], "others": dict(dtypes[1]), "scope": backend.scope}
            sent = await sender.ask("/checksum", question, SenderSums, backend.seconds)
        except EngineError as error:
            raise PublicationError(502, str(error)) from error
        if sent.whole and sent.whole != release.checksum:
            raise PublicationError(
                409, f"the trainer has weights with checksum {sent.whole}, not {release.checksum}. Publish from the files."
            )
        return sent.tensors

    def _read(self, dtypes: _Dtypes, scope: ChecksumScope) -> dict[str, TensorSums]:
        release, path = self._release, Path(self._release.path)
        try:
            if not path.is_dir():
                raise PublicationError(409, f"there is no directory {release.path!r} on the gateway's machine.")
            if scope is ChecksumScope.OFF:
                return {}
            dtype, others = dtypes[0] or None, dict(dtypes[1])
            tensors = sums_of_directory(path, dtype, others, scope)
            given = release.checksum.partition(":")[0]
            if scope is ChecksumScope.FULL and given and not self._whole:
                # A release that an engine was started with is known by its checksum in that engine's dtype.
                same = {sums.dtype for sums in tensors.values()} == {given}
                self._whole = checksum_of(tensors, given) if same else checksum_directory(path, given)
        except (CheckpointError, OSError) as error:
            raise PublicationError(409, str(error)) from error
        if self._whole and self._whole != release.checksum:
            raise PublicationError(
                409, f"the weights in {release.path} have checksum {self._whole}, not {release.checksum}. Write them anew."
            )
        return tensors


def _dtypes_of(backend: Backend) -> _Dtypes:
    dtype = backend.info.dtype if backend.info else ""
    tensors = backend.held.tensors if backend.held else {}
    return dtype, frozenset((name, sums.dtype) for name, sums in tensors.items() if sums.dtype != dtype)


KEEP = CallsInFlight()


def holds(backend: Backend, expected: EngineSums) -> bool:
    """Return whether a backend serves these weights, under any version. False where a tensor is not compared: it may differ."""
    compared = backend.held is not None and not backend.held.unread and backend.scope is not ChecksumScope.OFF
    return compared and backend.status is BackendStatus.SERVING and backend.checksum == expected.checksum


async def put(
    backend: Backend,
    release: WeightsRelease,
    expected: EngineSums,
    calls: CallsInFlight = KEEP,
    sender: SenderAddress | None = None,
    may_serve: Callable[[], bool] = lambda: True,
) -> None:
    """Make an engine serve a release; the caller holds its lock. `backend.publication` then holds the seconds of each step.

    An engine that holds these weights already is given the version's number alone: nothing is paused, loaded or reset, and calls go on.
    Without a sender, the weights are read from the release's files. An engine that `may_serve` keeps out at the end stays closed to calls.

    Raises:
        EngineError: the engine failed; the message says what state that left.
    """
    info = backend.info
    assert info, "an engine that was never reached is not published to"
    try:
        sync_method = sync_method_of(backend, Path(release.path), sender, expected)
    except CheckpointError as error:
        raise EngineError(f"version {release.version} cannot be read any more: {error}") from error
    if holds(backend, expected) and await _relabel(backend, release, expected):
        backend.serve(msgspec.structs.replace(info, version=release.version, model=""), backend.held)
        return
    before = backend.status
    backend.set_status(BackendStatus.PUBLISHING)
    try:
        held = await _replace_weights(backend, release, expected, calls, before, sync_method)
    except BaseException:
        if backend.status is BackendStatus.PUBLISHING:
            backend.take_down(f"publication of version {release.version} was cut short. Publish again, or restart the engine.", broken=True)
        raise
    backend.info, backend.held = msgspec.structs.replace(info, version=release.version, model=""), held
    if may_serve():
        backend.serve(backend.info, held)


class _Steps:
    """The current step of a publication, and the seconds of the steps before it."""

    def __init__(self, first: str) -> None:
        self.now = first
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def to(self, step: str) -> None:
        """End the current step, and begin the next one."""
        ended = time.monotonic()
        self.seconds[self.now] = self.seconds.get(self.now, 0.0) + ended - self._began
        self.now, self._began = step, ended


async def _relabel(backend: Backend, release: WeightsRelease, expected: EngineSums) -> bool:
    """Give a serving engine a version's number, once its checksum has shown that it holds that version's weights.

    Returns:
        False: it holds other weights, as an engine that was restarted a moment ago does.

    Raises:
        EngineError: it did not take the number.
    """
    steps = _Steps("checksum")
    try:
        held = await backend.read_sums()
        if held is None or difference(expected.tensors, held):
            return False
        steps.to("update_weight_version")
        await backend.order("/update_weight_version", {"new_version": str(release.version)})
        if (await backend.read_info()).version != release.version:
            raise EngineError(f"the engine at {backend.url} does not bear version {release.version}.")
        steps.to("serve")
    except EngineError as error:
        raise EngineError(
            f"publication of version {release.version} failed at {steps.now}: {error} The engine is {backend.status}."
        ) from error
    backend.publication = steps.seconds
    return True


async def _replace_weights(
    backend: Backend, release: WeightsRelease, expected: EngineSums, calls: CallsInFlight, before: BackendStatus, sync_method: SyncMethod
) -> EngineSums | None:
    """Run all steps of a publication; an engine that served before resumes if a step fails before any weights are loaded.

    Returns:
        The sums of what it holds then. None: none are compared.
    """
    steps = _Steps("check")
    try:
        if before is BackendStatus.ASLEEP:
            steps.now = "wake_up"
            await backend.wake_weights()
            steps.to("check")
        await sync_method.check(backend)
        # In an engine that is down, calls of other gateways may wait for the end of a pause, which comes with this publication.
        if before is BackendStatus.SERVING and calls.in_flight is InFlight.DRAIN:
            steps.to("drain")
            await backend.wait_drained(calls.drain_seconds)
        steps.to("pause")
        # Calls in flight are kept unless they are to end, and their KV cache with the prefix cache is recomputed with the new weights.
        await backend.order(f"/pause?mode={'abort' if calls.in_flight is InFlight.ABORT else 'keep'}")
        await backend.order("/reset_prefix_cache?reset_running_requests=true")
        await sync_method.prepare(backend)
        steps.to(sync_method.step)
        await sync_method.load(backend)
        steps.to("checksum")
        held = await _read_held(backend, "all" if before is BackendStatus.ASLEEP else sync_method.part)
        reason = difference(expected.tensors, held) if held else ""
        if reason:
            raise EngineError(f"the engine does not hold the version's weights after the {sync_method.step}: {reason}.")
        steps.to("update_weight_version")
        await backend.order("/update_weight_version", {"new_version": str(release.version)})
        steps.to("resume")
        if before is BackendStatus.ASLEEP:
            await backend.wake_rest()
        await backend.order("/resume")
        # Only now: in the pause, generation waits.
        steps.to("probe")
        await backend.probe(release.version)
        steps.to("serve")
    except Exception as error:  # any fault, also of the gateway, must leave no calls paused
        why = str(error) if isinstance(error, EngineError) else repr(error)
        reason = f"publication of version {release.version} failed at {steps.now}: {why}"
        if before is BackendStatus.SERVING and (steps.now in {"check", "drain", "pause"} or await _holds_old(backend, steps.now)):
            await _resume_old(backend, reason)
        else:
            await _give_up(backend, reason)
        raise EngineError(f"{reason} The engine is {backend.status}.") from error
    backend.publication = steps.seconds
    return held


async def _read_held(backend: Backend, part: str) -> EngineSums | None:
    """Return the sums of all parameters, of which a part is read from the engine's memory, and the rest is known."""
    held = await backend.read_sums(part)
    return with_base_of(held, backend.held) if held and part == "adapter" else held


async def _holds_old(backend: Backend, step: str) -> bool:
    """Return whether a failed load left the old weights: vLLM drops an adapter only once it has read the new one."""
    if step != Adapter.step:
        return False
    try:
        held = await _read_held(backend, Adapter.part)
        return held is not None and held == backend.held
    except EngineError:
        return False


async def _resume_old(backend: Backend, reason: str) -> None:
    """Resume an engine with the weights that it has, since nothing was loaded."""
    try:
        await backend.order("/resume")
    except EngineError as error:
        backend.take_down(f"{reason} It could not be resumed: {error}", broken=False)
    else:
        backend.set_status(BackendStatus.SERVING)


async def _give_up(backend: Backend, reason: str) -> None:
    """Take down an engine whose weights are unknown, and abort the calls that are paused in it."""
    backend.take_down(f"{reason} Publish again, or restart the engine.", broken=True)
    try:
        # This also ends calls that wait for the end of the pause, which will not come.
        await backend.order("/pause?mode=abort")
    except EngineError as error:
        log.warning("calls in flight could not be ended: %s", error)
