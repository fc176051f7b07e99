"""Handlers of a worker: the attempts of several agents side by side, each for the rollouts of one data source.

In: leased attempts. Out: the same, ended. Invariant: every one is handled by the handler of its data source, or ends as `no_handler` with a
root span; handlers share store, gateway and queue, and nothing else: each has agent processes and slots of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.workers.attempts import Attempts, LeasedAttempt, RunServices
from runner.workers.jobs import AttemptOutcome
from spangrad.errors import SpangradError
from spangrad.types import AttemptFailure

ANY_SOURCE = ""
"""Name of an agent that takes the rollouts of every data source: the only one of its worker."""


class Handlers:
    """Attempts by data source."""

    def __init__(self, by_source: Mapping[str, Attempts], services: RunServices) -> None:
        """Store the arguments; an agent named `ANY_SOURCE` is the only one."""
        self._by_source = by_source
        self.services = services
        self.entry = sum(attempts.entry for attempts in by_source.values())
        """Number of attempts that can begin at once."""
        self.most = sum(attempts.most for attempts in by_source.values())
        """Number of attempts at once, in all stages."""

    async def make(self, attempt: LeasedAttempt, broken: Callable[[SpangradError], None]) -> None:
        """Run an attempt by its handler; the arguments are those of `Attempts.make`."""
        lease = attempt.lease
        attempts = self._handler_of(lease.data_source)
        if attempts is None:
            source = f"data source {lease.data_source!r}" if lease.data_source else "rollouts without a data source"
            problem = f"the worker has no handler for {source}, only for {', '.join(sorted(self._by_source))}"
        else:
            problem = attempts.problem_with(lease)
        if attempts is not None and problem is None:
            await attempts.make(attempt, broken)
            return
        attempt.entry.free()
        attempt.answer = AttemptOutcome(None, AttemptFailure.NO_HANDLER, f"{problem}.")
        self.services.lost.write(attempt.rollout, attempt.answer, 0, final=True)

    def _handler_of(self, data_source: str) -> Attempts | None:
        """Return the attempts of a data source; those of the only handler where none is named. None: there is no handler for it."""
        only = next(iter(self._by_source.values())) if len(self._by_source) == 1 else None
        if data_source == ANY_SOURCE or ANY_SOURCE in self._by_source:
            return only
        return self._by_source.get(data_source)
