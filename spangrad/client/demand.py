"""How many groups of rollouts a trainer wants of a run: told to the queue that hands rollouts out, and read from it.

In: a `Demand`, the runner's settings. Out: what the queue holds of it. Invariant: a demand is a level, not an event: stated twice, late or
after a crash, it asks for nothing that it has not asked for before, and the queue keeps the largest.
"""

from __future__ import annotations

import urllib.error
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from spangrad.errors import QueueError
from spangrad.http.json_http import ask, refusal

if TYPE_CHECKING:
    from spangrad.settings import RunnerSettings


@dataclass(frozen=True, slots=True)
class Demand:
    """What a branch of a policy wants of a run."""

    policy: str
    branch: str
    groups: int
    """Of mode train, in all, since the run began."""
    oldest_version: int
    """The oldest version whose calls may still be trained: what an older one sampled comes too late."""
    filled: int
    """Of `groups`, those that are spent or whole in the trainer's hands. As many as `groups`: what else runs is not waited for."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What the queue knows of a run's groups of mode train."""

    groups: int
    """The most that any branch has asked for; 0: nobody has asked."""
    enqueued: int
    """Handed to it so far, those that were cancelled left out."""


def state(runner: RunnerSettings, run_id: str, demand: Demand, seconds: float = 2.0) -> Stated:
    """Tell the queue at runner.queue_url, waiting at most so long.

    Raises:
        QueueError: it refuses, or does not answer.
    """
    return _ask(runner, "PUT", run_id, seconds, asdict(demand))


def read(runner: RunnerSettings, run_id: str, seconds: float = 2.0) -> Stated:
    """What the queue at runner.queue_url knows of a run.

    Raises:
        QueueError: it refuses, or does not answer.
    """
    return _ask(runner, "GET", run_id, seconds)


def _ask(runner: RunnerSettings, method: str, run_id: str, seconds: float, body: dict[str, Any] | None = None) -> Stated:
    if runner.queue_url is None:
        raise QueueError("runner.queue_url is not set: there is no queue to ask.")
    path = f"/v1/runs/{quote(run_id, safe='')}/demand"
    url = runner.queue_url.rstrip("/") + path
    try:
        found = ask(runner.queue_url, runner.queue_token, method, path, body, seconds)
        return Stated(int(found["groups"]), int(found["enqueued"]))
    except urllib.error.HTTPError as error:
        raise QueueError(f"the queue refuses {method} {url} ({error.code}): {refusal(error)}") from error
    except OSError as error:  # URLError, timeouts, half an answer
        reason = getattr(error, "reason", error)
        raise QueueError(f"the queue at {runner.queue_url} does not answer ({reason}). Start it, or set runner.queue_url.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise QueueError(f"{url} answers {method} with something else than a demand ({error!r}). Is it the queue's?") from error
