"""Sandboxes of a worker's agents: the policy that follows from settings and agent, the engine, and the relay to the services.

Invariant: an agent that settings confine is never run unconfined.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from runner.sandboxes.engines import choose
from runner.sandboxes.images import unpack
from runner.sandboxes.policy import (
    PRIVATE_VARIABLES,
    RemoteServer,
    SandboxLimits,
    SandboxPolicy,
    interpreter_paths,
    own_packages,
    services_of,
)
from runner.sandboxes.relay import ServiceRelay
from runner.workers.agents import AgentSpec, CommandAgent, is_service
from runner.workers.root_spans import SandboxFacts
from spangrad.agent.command import SandboxLaunch, program_file
from spangrad.errors import SandboxError
from spangrad.processes import make_private
from spangrad.settings import Settings
from spangrad.settings.runner import RunnerSettings
from spangrad.types import SandboxRung

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSandbox:
    """Sandboxes of a worker's attempts."""

    facts: SandboxFacts
    launch: SandboxLaunch


@asynccontextmanager
async def open_agent_sandbox(settings: Settings, agent: AgentSpec) -> AsyncGenerator[AgentSandbox | None]:
    """Choose the sandboxes of an agent, and relay its services for as long as the block. None: settings ask for none.

    Raises:
        SandboxError: the agent is no program, or no sandbox works as the settings ask for it.
    """
    sandbox = settings.runner.sandbox
    if sandbox.engine is SandboxRung.NONE:
        if sandbox.image is not None:
            raise SandboxError(f"runner.sandbox.image = {sandbox.image} needs a sandbox. Set runner.sandbox.engine = auto.")
        if isinstance(agent, CommandAgent):
            _logger.warning(
                "program %s runs without a sandbox in %s on %s, with all rights of this user (runner.sandbox.engine = none). "
                "Set runner.sandbox.engine = auto if it runs code that is not yours, such as a model's.",
                agent.command[0],
                agent.directory.resolve(),
                platform.node(),
            )
        yield None
        return
    if sandbox.engine is SandboxRung.REMOTE:
        raise SandboxError(
            "runner.sandbox.engine = remote is for tools and for sandboxes that stay: SWE-ReX cannot run an agent that reaches gateway and "
            "store. Confine the program by auto, bubblewrap or landlock."
        )
    if not isinstance(agent, CommandAgent):
        raise SandboxError(
            f"runner.sandbox.engine = {sandbox.engine} confines programs, and {agent.name} is none. "
            "Give the agent as a command after `--`, or set runner.sandbox.engine = none."
        )
    policy = await asyncio.to_thread(policy_of, settings, agent)
    async with ServiceRelay(policy.services) as relay:
        engine = await asyncio.to_thread(choose, policy, relay.descriptor)
        _logger.info("agents run in sandboxes of %s: %s", engine.rung, engine.reason)
        image = policy.image
        assigned = {**(image.variables if image else {}), **PRIVATE_VARIABLES}
        # The launcher of bubblewrap alone uses the relay's socket, and closes it before the agent's program begins.
        inherited = (relay.descriptor,) if engine.rung is SandboxRung.BUBBLEWRAP else ()
        launch = SandboxLaunch(engine.prefix, tuple(sandbox.variables), assigned, inherited, has_image=image is not None)
        yield AgentSandbox(SandboxFacts(engine.rung, image.digest if image else ""), launch)


def policy_of(settings: Settings, agent: CommandAgent) -> SandboxPolicy:
    """Return the rules of an agent's sandboxes.

    Raises:
        SandboxError: a service is on another machine, or the image cannot be unpacked.
    """
    runner, directory = settings.runner, agent.directory.resolve()
    program = program_file(agent.command[0], directory)
    urls = [settings.gateway.url if settings.runner.gateway else settings.gateway.engine_url, settings.store.otlp_endpoint]
    urls += [settings.queue.url] if settings.queue.url is not None else []
    urls += [agent.environment] if agent.environment and is_service(agent.environment) else []
    services = {} if runner.sandbox.network == "host" else services_of(urls)
    own = [*own_packages(), *(interpreter_paths(program) if program else ())] if runner.sandbox.image is None else []
    return policy_from(runner, directory, own, services)


def policy_from(
    runner: RunnerSettings,
    directory: Path,
    readable: Sequence[Path] = (),
    services: Mapping[int, tuple[str, int]] = MappingProxyType({}),
) -> SandboxPolicy:
    """Unpack the image of a runner's sandboxes, and return their policy; with the engine `none`, that of whichever sandbox works here.

    Programs can read `readable` beside what the settings name, and reach `services`.

    Raises:
        SandboxError: the image cannot be unpacked.
    """
    sandbox = runner.sandbox
    if sandbox.image is not None:
        make_private(runner.directory)
    return SandboxPolicy(
        directory=directory,
        readable=(*readable, *(path.resolve() for path in sandbox.readable)),
        services=services,
        host_network=sandbox.network == "host",
        limits=SandboxLimits(sandbox.processes, sandbox.memory_bytes, sandbox.disk_bytes),
        image=unpack(sandbox.image, runner.directory / "images") if sandbox.image is not None else None,
        remote=RemoteServer(sandbox.url, sandbox.token.get_secret_value() if sandbox.token else None) if sandbox.url else None,
        engine="auto" if sandbox.engine is SandboxRung.NONE else sandbox.engine,
        least=sandbox.least,
    )
