"""Removes containers that dead hosts and workers left behind; finds them by their labels.

Invariant: a container whose host and worker live is left alone, and so is every container that no worker has started.
"""

from __future__ import annotations

import logging
import subprocess

from runner.workers.agents import AgentSpec, ContainerAgent
from spangrad.agent.container import LABEL_HOST, LABEL_WORKER, remove
from spangrad.leases import is_dead

_logger = logging.getLogger(__name__)
_LIST_SECONDS = 30.0


def remove_of_host(agent: AgentSpec, mark: str) -> None:
    """Remove the containers of an agent host that has ended: killing the engine's command line does not end them."""
    if isinstance(agent, ContainerAgent):
        remove(agent.container.engine, list(_labelled(agent.container.engine, f"{LABEL_HOST}={mark}")))


def remove_of_dead(agent: AgentSpec) -> None:
    """Remove the containers that workers of this machine left when they were killed together with their hosts."""
    if isinstance(agent, ContainerAgent):
        left = [name for name, worker in _labelled(agent.container.engine, LABEL_WORKER).items() if is_dead(worker)]
        if left:
            _logger.warning("%d containers were left by workers that have died, and are removed", len(left))
        remove(agent.container.engine, left)


def _labelled(engine: str, label: str) -> dict[str, str]:
    """Return the containers with a label, running or not, by id, each with the worker that its label names."""
    shown = f'{{{{.ID}}}} {{{{.Label "{LABEL_WORKER}"}}}}'
    try:
        asked = subprocess.run(
            [engine, "ps", "--all", "--no-trunc", "--filter", f"label={label}", "--format", shown],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIST_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("the containers that %s runs cannot be listed (%s): some may have been left behind", engine, error)
        return {}
    return {name: worker for name, _, worker in (line.strip().partition(" ") for line in asked.stdout.splitlines()) if name}
