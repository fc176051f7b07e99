"""`spangrad worker`: attempts at the rollouts that a queue hands out."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.training.agents import AgentOptions, ProgramArguments, agents_of, end_signal, handler_of, require_loadable
from spangrad.errors import GatewayError, StoreError
from spangrad.http.readiness import await_services, needs_of_rollouts
from spangrad.processes import raise_files_limit

if TYPE_CHECKING:
    from runner.workers.agents import AgentsBySource, AgentSpec
    from spangrad.settings import Settings

_RETRY_SECONDS = 2.0
_logger = logging.getLogger(__name__)


def worker(
    program: str | None = None,
    /,
    *arguments: ProgramArguments,
    options: AgentOptions | None = None,
    run_id: str | None = None,
    queue_url: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on the rollouts of one run that the queue at queue.url hands out, until SIGTERM or Ctrl-C.

    After the signal, the worker takes no more rollouts, lets attempts in progress continue for up to runner.drain_seconds, returns the
    remaining rollouts to the queue, and exits with code 0. Without an agent, it has all handlers of runner.handlers.

    Args:
        program: program of the agent, after `--`: it reads a task's input as JSON on standard input, and the last line of its output is
            its answer. Or FILE.py with a function that is decorated with @spangrad.rollout.
        arguments: arguments of the program.
        run_id: id of the run whose rollouts are taken; default: runner.run_id.
        queue_url: URL of the queue; default: queue.url, else http://127.0.0.1:8190.
    """
    settings = resolve(config, set_, {"runner.run_id": run_id, "queue.url": queue_url})
    log_to_stderr()
    raise_files_limit()
    agents = agents_of(settings.runner, handler_of(program, arguments, options))
    require_loadable(agents, settings.runner)
    await_services(needs_of_rollouts(settings), settings.engine.start_timeout_seconds)
    asyncio.run(_work(settings, agents))


async def _work(settings: Settings, agents: AgentSpec | AgentsBySource) -> None:
    from runner.workers.serving import serve

    ending = end_signal()
    began = False

    def ready() -> None:
        nonlocal began
        began = True
        _logger.info("worker ready: run %s", settings.runner.run_id)

    while not ending.is_set():
        try:
            await serve(settings, agents, ending, ready)
        except (GatewayError, StoreError) as error:
            # Its rollouts are back in the queue by now. The worker waits for services that are being restarted.
            if not began and isinstance(error, StoreError):
                raise
            _logger.warning("%s Trying again.", error)
            try:
                await asyncio.wait_for(ending.wait(), _RETRY_SECONDS)
            except TimeoutError:
                continue
