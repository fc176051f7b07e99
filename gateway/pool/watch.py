"""Watcher of one engine: admits it when it is up, brings it to the version that its policy serves, restarts it when it is broken.

In: a backend, and the release that it must serve. Out: its status. Invariant: an engine that holds older weights than its policy serves, or
weights that were rolled back, say because it was restarted or could not be reached, answers no call before it holds the served ones.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile

from gateway.pool.backend import Backend, EngineInfo
from gateway.pool.policy import Policy
from gateway.pool.sleeping import wake_overdue
from gateway.pool.upstream import BackendStatus
from gateway.weights.publication import Expected, PublicationError, WeightsRelease, put
from spangrad.errors import EngineError
from spangrad.processes import dying_with_parent

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
FOUND_ASLEEP_SECONDS = 60.0
"""Time that a trainer has to ask for more for an engine that sleeps when the gateway starts, in seconds."""
RESTARTS = 3
"""Most restarts in a row of a broken engine, after which it is left down."""
OUTPUT_BYTES = 2000
"""Bytes at the end of a failed restart command's output that go into the reason."""


async def watch(backend: Backend, policy: Policy, start_seconds: float) -> None:
    """Watch an engine; never returns. `start_seconds` is the longest time that it may take to start before an error is logged."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + start_seconds
    restarts = 0
    while True:
        try:
            absent = await _look(backend, policy)
            await wake_overdue(backend, policy)
            if absent is None:
                deadline = float("inf")
            elif loop.time() > deadline:
                log.error("no engine within engine.start_timeout_seconds = %g: %s", start_seconds, absent)
                deadline = float("inf")
            if backend.status is BackendStatus.SERVING:
                restarts = 0
            elif backend.broken and backend.restart_command and restarts < RESTARTS:
                restarts += 1
                await _restart(backend, start_seconds)
        except Exception as error:
            # A fault of ours at one engine must not end the others.
            log.exception("backend %s could not be watched", backend.name)
            backend.take_down(f"the gateway failed at the engine at {backend.url}: {error!r}. Publish again, or restart it.", broken=True)
        await asyncio.sleep(POLL_SECONDS)


async def _look(backend: Backend, policy: Policy) -> EngineError | None:
    """Check the engine, and admit it if it is ready; return the error if it cannot be reached, else None."""
    async with backend.lock:
        try:
            info = await backend.read_info()
        except EngineError as error:
            if backend.status in {BackendStatus.SERVING, BackendStatus.ASLEEP} or backend.broken:
                backend.take_down(str(error), broken=False)
            else:
                backend.reason = str(error)
            return error
        is_another, backend.started = backend.started not in {0, info.started}, info.started
        if is_another and (backend.broken or backend.status is not BackendStatus.DOWN):  # it was not looked at while it was away
            _await_admission(backend)
        restarted = backend.info is not None and info.version != backend.info.version
        if not backend.broken and (backend.status is BackendStatus.DOWN or restarted):
            await _try_to_admit(backend, policy, info)
        return None


async def _try_to_admit(backend: Backend, policy: Policy, info: EngineInfo) -> None:
    if info.policy != backend.policy:
        backend.take_down(
            f"the engine at {backend.url} serves policy {info.policy!r}, this gateway {backend.policy!r}. "
            "Set gateway.policy to the same for both, and restart the other.",
            broken=True,
        )
        return
    if info.topology.api_servers > 1 and not info.shared_state:
        backend.take_down(
            f"the engine at {backend.url} runs {info.topology.api_servers} API servers that share no state: orders reach one of them, and "
            "the others would take calls during a publication. Start it with `spangrad engine`.",
            broken=True,
        )
        return
    if not info.warm:
        backend.reason = f"the engine at {backend.url} is warming up"
        return
    try:
        # Set before the verdict: an engine that is down is published to all the same.
        backend.info = info
        if info.asleep:  # as an earlier gateway left it: its memory holds nothing to compare
            if not policy.releases and info.model:
                policy.served(WeightsRelease(info.version, info.model, ""))
            backend.sleeps_until = asyncio.get_running_loop().time() + FOUND_ASLEEP_SECONDS
            backend.set_status(BackendStatus.ASLEEP)
            return
        backend.held = await backend.read_sums()
        if await backend.read_paused():
            raise EngineError("it is paused, as a publication left it that failed. Publish again, or restart the engine.")
        if not policy.missed(backend, info.version):
            await backend.probe(info.version)
        if missed := policy.missed(backend, info.version):  # perhaps published to the others during the probe
            await _bring_up(backend, policy, missed)
            return
    except EngineError as error:
        if not backend.broken:
            backend.take_down(f"the engine at {backend.url} was not admitted: {error}", broken=True)
        return
    if not policy.releases and info.model and info.version >= (policy.version or 0):
        # A checksum of all words is that of the files; another one says nothing of them.
        policy.served(WeightsRelease(info.version, info.model, "" if backend.uncompared else backend.checksum))
    backend.serve(info, backend.held)
    log.info("engine admitted: %s, policy %r version %d at %s, %s", backend.name, info.policy, info.version, backend.url, backend.checksum)
    if backend.uncompared:
        log.warning("backend %s: %s", backend.name, backend.uncompared)


async def _bring_up(backend: Backend, policy: Policy, release: WeightsRelease) -> None:
    """Load the release that the policy serves into an engine that holds older weights, or weights that were rolled back.

    If another one was published to the others meanwhile, that is loaded as well before the engine has calls.

    Raises:
        EngineError: that failed.
    """
    log.info("backend %s holds what is not served any more: version %d from %s is put into it", backend.name, release.version, release.path)
    try:
        expected = await Expected(release).by(backend)
    except PublicationError as error:
        raise EngineError(f"it does not hold version {release.version}, which cannot be had: {error}") from error
    await put(backend, release, expected, may_serve=lambda: not policy.missed(backend, release.version))
    if newer := policy.missed(backend, release.version):
        await _bring_up(backend, policy, newer)


async def _restart(backend: Backend, seconds: float) -> None:
    """Run the command that restarts an engine, and let the engine be admitted again; kill the command when it takes too long."""
    log.warning("backend %s is restarted: %s", backend.name, " ".join(backend.restart_command))
    why = backend.reason
    # A file, as a command may leave an engine behind that keeps its output open.
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *dying_with_parent(backend.restart_command, inherits_limit=True),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except OSError as error:
            backend.reason = f"{why} Its restart command cannot be run: {error}."
            return
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            backend.reason = f"{why} Its restart command did not end within {seconds:g} s."
            return
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            output.seek(0)
            tail = output.read()[-OUTPUT_BYTES:].decode(errors="replace")
            backend.reason = f"{why} Its restart command ended with exit code {process.returncode}: {tail}"
        elif backend.broken:
            _await_admission(backend)


def _await_admission(backend: Backend) -> None:
    backend.take_down(f"the engine at {backend.url} was restarted, and is not admitted yet", broken=False)
