"""`spangrad worker`: make attempts of the rollouts that a queue hands out."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.training.agents import Command, agent_spec, on_signals
from spangrad.errors import GatewayError, StoreError

if TYPE_CHECKING:
    from runner.workers.agents import AgentSpec
    from spangrad.settings import Settings

_AGAIN_SECONDS = 2.0
_logger = logging.getLogger(__name__)


def worker(
    *command: Command,
    agent: str | None = None,
    evaluator: str | None = None,
    environment: str | None = None,
    directory: Path = Path(),
    instrument: bool = False,
    image: str | None = None,
    run_id: str | None = None,
    queue_url: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on the rollouts of one run, as the queue at runner.queue_url hands them out, until told to end.

    At SIGTERM or Ctrl-C it takes no more, lets attempts go on for runner.drain_seconds, gives back the rest, and exits with 0.

    Args:
        command: after `--`: a program that reads a task's input as JSON on stdin; its last line of output is its answer. Or FILE.py, in
            which a function is decorated with @spangrad.rollout.
        agent: a Python callable, as MODULE:FUNCTION or FILE.py:FUNCTION, instead of a command.
        evaluator: MODULE:FUNCTION or FILE.py:FUNCTION that is given (input, output) and returns the reward, or the URL of a reward service.
        environment: MODULE:FUNCTION that is given the input and makes what the agent works in, or the URL of a service that leases such.
        directory: where the agent's modules, or its program's files, are.
        instrument: start the command under opentelemetry-instrument.
        image: a container image that is such a program, instead of a command; what stands after `--` is then given to it.
        run_id: the run to work for.
        queue_url: where the queue is; http://127.0.0.1:8190 by default.
    """
    settings = resolve(config, set_, {"runner.run_id": run_id, "runner.queue_url": queue_url})
    log_to_stderr()
    spec = agent_spec(command, agent, evaluator, directory, settings.runner, instrument=instrument, image=image, environment=environment)
    asyncio.run(_work(settings, spec))


async def _work(settings: Settings, spec: AgentSpec) -> None:
    from runner.workers.serving import serve

    ending = asyncio.Event()
    on_signals(ending.set)
    began = False

    def ready() -> None:
        nonlocal began
        began = True
        _logger.info("worker ready: run %s", settings.runner.run_id)

    while not ending.is_set():
        try:
            await serve(settings, spec, ending, ready)
        except (GatewayError, StoreError) as error:
            # What it held is given back by now. Services are restarted; workers wait for them.
            if not began and isinstance(error, StoreError):
                raise
            _logger.warning("%s Trying again.", error)
            try:
                await asyncio.wait_for(ending.wait(), _AGAIN_SECONDS)
            except TimeoutError:
                continue
