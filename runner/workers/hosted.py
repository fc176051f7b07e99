"""Runs one attempt in an agent host, from stage to stage.

In: a host, a job, and a call of `go` for each stage. Out: one answer. Invariant: an attempt that began has ended when the block is left, or
its host counts as hung; a stage's time limit begins with the stage, so that the wait before it does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from runner.workers.jobs import AttemptOutcome, Job
from spangrad.agent.attempt_answer import END_STAGE
from spangrad.types import POLICY_FAILURES, AttemptFailure, Stage

if TYPE_CHECKING:
    from runner.workers.agent_processes import AgentHost

_CANCEL_SECONDS = 5.0
"""Time that a host has to cancel an attempt before it counts as hung, in seconds."""
_FLUSH_SECONDS = 30.0
"""Time that a host has to send the spans of an attempt that ended in time, in seconds, when the store did not accept them at once."""
_CLOSE_SECONDS = 30.0
"""Time that a host has after the last stage to close the environment and to send the spans, in seconds."""
_STOPPED = AttemptOutcome(None, AttemptFailure.CANCELLED, "stopped")
_TIMEOUT_FAILURES = {
    Stage.INIT: AttemptFailure.ENVIRONMENT,
    Stage.RUN: AttemptFailure.TIMEOUT,
    Stage.EVALUATE: AttemptFailure.EVALUATION,
}
"""Failure of a stage that exceeds its time limit: only the agent's own time may count against the policy."""
_logger = logging.getLogger(__name__)

_UNFLUSHED = AttemptOutcome(None, AttemptFailure.UNFLUSHED, "its spans could not be sent in time, so rewards on them may be missing")

Ends = Sequence[asyncio.Future[Any]]
"""Futures of which each one stops the attempt when done; it then fails as `cancelled`, once it has ended."""


class Hosted:
    """An attempt in a host; an async context manager. Sets the host's `retired` when the host died or hangs."""

    def __init__(self, host: AgentHost, job: Job, ends: Ends) -> None:
        self._host = host
        self._job = job
        self._ends = ends
        self._begun = False
        self._stage_ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answer: AttemptOutcome | None = None
        self._answered: asyncio.Future[dict[str, Any]]

    async def __aenter__(self) -> Self:
        self._answered = self._host.expect(self._job.id)
        self._host.stage_callbacks[self._job.id] = self._on_stage_end
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._begun and self._answer is None and not self._answered.done():
                if isinstance(error, asyncio.CancelledError):
                    self._host.send({"cancel": self._job.id})
                else:
                    await self._cancel()
        finally:
            self._host.forget(self._job.id)

    async def go(self, stage: Stage, seconds: float) -> bool:
        """Begin a stage, and wait until it is over, for at most `seconds`.

        Returns:
            True if another stage follows; if none does, `finish` returns the answer.
        """
        if self._host.ended:
            self._answer = AttemptOutcome(None, AttemptFailure.CRASH, "the agent's process had ended")
        elif self._begun and stage is Stage.RUN and self._host.retired:  # a new host can run the agent, but only this one can evaluate
            self._answer = AttemptOutcome(None, AttemptFailure.CRASH, "the agent's process hangs, and is replaced")
        elif any(end.done() for end in self._ends):
            if self._begun:
                await self._cancel()
            self._answer = _STOPPED
        if self._answer is not None or self._answered.done():
            return False
        self._stage_ended = asyncio.get_running_loop().create_future()
        self._host.send({"go": self._job.id} if self._begun else self._job.message())
        self._begun = True
        await asyncio.wait([self._answered, self._stage_ended, *self._ends], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._answered.done():
            return False
        if not self._stage_ended.done() or any(end.done() for end in self._ends):
            self._answer = await self._cancelled(_TIMEOUT_FAILURES[stage], f"{stage}: not done after {seconds:g} s")
            return False
        return self._stage_ended.result() != END_STAGE

    async def finish(self) -> AttemptOutcome:
        """Wait until the attempt has ended, and return its answer."""
        if self._answer is None and not self._answered.done():
            await asyncio.wait([self._answered, *self._ends], timeout=_CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not self._answered.done():
                detail = f"{END_STAGE}: its environment is not closed after {_CLOSE_SECONDS:g} s"
                self._answer = await self._cancelled(AttemptFailure.ENVIRONMENT, detail)
        if self._answer is None:
            self._answer = await self._read(self._answered.result())
        elif self._answer.failure is AttemptFailure.TIMEOUT and self._answered.done() and not await self._flush():
            self._answer = _UNFLUSHED
        return self._answer

    def _on_stage_end(self, stage: str) -> None:
        if not self._stage_ended.done():
            self._stage_ended.set_result(stage)

    async def _cancelled(self, failure: AttemptFailure, detail: str) -> AttemptOutcome:
        """Cancel an attempt that was stopped or exceeded a time limit; the latter fails with `failure` and `detail`."""
        done = await self._cancel()
        if any(end.done() for end in self._ends):
            return _STOPPED
        if done and self._answered.result()["failure"] != AttemptFailure.TIMEOUT:
            return await self._read(self._answered.result())  # it ended in time; only its spans are late
        if not done and failure is AttemptFailure.TIMEOUT and self._host.attempts > 1:
            # It is unknown which attempt blocks the process, so the failure counts for no policy.
            return AttemptOutcome(
                None, AttemptFailure.CRASH, f"{detail}; the agent's process hangs with {self._host.attempts} attempts in it"
            )
        return AttemptOutcome(None, failure, detail)

    async def _cancel(self) -> bool:
        """Cancel the attempt; return whether the host has answered."""
        self._host.send({"cancel": self._job.id})
        done, _ = await asyncio.wait([self._answered], timeout=_CANCEL_SECONDS)
        if not done or self._answered.result().get("stuck"):
            self._retire()
        return bool(done)

    def _retire(self) -> None:
        _logger.warning("an attempt hangs: its process gets no more of them, and is replaced")
        self._host.retired = True

    async def _read(self, message: Mapping[str, Any]) -> AttemptOutcome:
        """Read an attempt's answer, once its spans were sent: a reward must not count before a tool's failure can."""
        if message.get("stuck") and not self._host.retired:
            self._retire()
        failure = AttemptFailure(message["failure"]) if message["failure"] else None
        if failure is not None and failure not in POLICY_FAILURES:
            return AttemptOutcome(None, failure, message["detail"])
        if not message["flushed"] and not await self._flush():
            return _UNFLUSHED
        return AttemptOutcome(message["reward"], failure, message["detail"], message.get("output"))

    async def _flush(self) -> bool:
        if self._host.ended:
            return False
        answered = self._host.expect(self._job.id)
        self._host.send({"flush": self._job.id})
        done, _ = await asyncio.wait([answered], timeout=_FLUSH_SECONDS)
        return bool(done) and bool(answered.result().get("flushed"))
