"""verl's RayWorkerGroup with waits that end: calls of all ranks, and the handling of their failures.

Invariant: every call ends. An error that all ranks raise (the logprob check, a state that cannot be read) is raised here once, and they
stay as before; where one died, or failed alone, while the others wait for it in a collective, all of them are ended, and the error names
the rank and the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from verl.single_controller.ray.base import RayWorkerGroup, _unwrap_ray_remote  # pyright: ignore[reportPrivateUsage]

from spangrad.errors import SpangradError, TrainerError
from trainer.optim.process import RENDEZVOUS

_LOOK_SECONDS = 1.0
"""Longest uninterrupted wait of a call, in seconds, so that signals are handled."""
_SETTLE_SECONDS = 20.0
"""Time after one rank's failure in which the others must end the call, in seconds; after it they count as stuck."""
_FILES = "files"
"""Ray's name of the threads that write files."""
_REMEDY = "The batch is trained again at the next start."


class RankCalls:
    """Waits for calls of all ranks of a trainer."""

    def __init__(self, logs: Path | None, end: Callable[[bool], None], look: Callable[[], None] = lambda: None) -> None:
        """Wait for nothing yet; where the logs have a directory, errors name it.

        `end` ends all ranks, and is called with True where their logs are to be kept. `look`, which is called at intervals, raises where
        what the ranks wait for has ended.
        """
        self._logs, self._end, self._look = logs, end, look

    def wait(self, method: str, calls: list[Any]) -> list[Any]:
        """Wait until all ranks have ended a call; return the calls.

        Raises:
            TrainerError: a rank died, or failed.
            SpangradError: the ranks raised it.
            OSError: the same.
        """
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_SECONDS)
            if not done:
                self._look()
            if any(failure(call) for call in done):
                _, pending = ray.wait(calls, num_returns=len(calls), timeout=_SETTLE_SECONDS)
                self._raise(method, calls, stuck=pending)
        return calls

    def _raise(self, method: str, calls: list[Any], *, stuck: list[Any]) -> None:
        failures = {rank: failure(call) for rank, call in enumerate(calls) if call not in stuck}
        failures = {rank: error for rank, error in failures.items() if error}
        dead = {rank: error for rank, error in failures.items() if not isinstance(error, RayTaskError)}
        causes = {rank: error.cause for rank, error in failures.items() if isinstance(error, RayTaskError)}
        known = next((cause for cause in causes.values() if isinstance(cause, SpangradError | OSError)), None)
        if known and not dead:
            if stuck:
                self._end(False)
            raise known
        rank, error = next(iter((dead or causes).items()))
        outcome = _outcome(error)
        logs = f" Its log lies in {self._logs}." if self._logs else ""
        self._end(True)
        raise TrainerError(
            f"worker {rank} of {len(calls)} {outcome} in `{method}`, and the others were ended. {_REMEDY}{logs} Where memory was short, "
            "lower trainer.max_tokens_per_device."
        ) from error

    def wait_for_writes(self, calls: list[Any], directory: Path) -> list[Any]:
        """Wait until all ranks have written their parts of a directory; return their results; from any thread.

        Raises:
            OSError: one could not.
            TrainerError: one died, or failed.
        """
        waiting = calls
        while waiting:  # for all of them, if one fails: the directory is removed then
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_SECONDS)
        for rank, error in enumerate(failure(call) for call in calls):
            if isinstance(error, RayTaskError) and isinstance(error.cause, OSError):
                raise error.cause
            if error:
                raise TrainerError(
                    f"worker {rank} could not write a checkpoint to {directory} ({type(error).__name__}: {error}). {_REMEDY}"
                ) from error
        return ray.get(calls)


def _outcome(error: BaseException) -> str:
    """Return what a rank's error says of it, in a few words."""
    if isinstance(error, ActorDiedError) and "creation task" in str(error):
        return f"failed as it began ({str(error).strip().splitlines()[-1]})"
    return "died" if isinstance(error, RayError) else f"failed ({type(error).__name__}: {error})"


def failure(call: Any) -> BaseException | None:
    """Return Ray's error of a finished call. None: it succeeded."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


def worker_group(calls: RankCalls, environment: dict[str, str], device: str = "cpu") -> type[RayWorkerGroup]:
    """Return the class of a trainer's worker groups.

    Args:
        calls: waits for the calls of all ranks.
        environment: variables of the ranks' processes; with `RENDEZVOUS`, they meet there and not at a port that a process of Ray's finds.
        device: of the ranks, cuda or cpu; this process may have another.
    """

    class WatchedWorkerGroup(RayWorkerGroup):
        """Worker group whose calls have ended when they return."""

        def __init__(self, **options: Any) -> None:
            if not options.get("worker_handles"):
                _write_beside(options["ray_cls_with_init"])
                options["ray_cls_with_init"].update_options({"num_cpus": 1, "num_gpus": 1 if device == "cuda" else 0})
            super().__init__(**options, worker_env=environment, use_gpu=False)  # verl would ask the platform of this process

        def _get_master_addr_port(self, *arguments: Any, **options: Any) -> None:
            if RENDEZVOUS in environment:
                self._master_addr, self._master_port = "127.0.0.1", "0"
            else:
                super()._get_master_addr_port(*arguments, **options)

        def execute_all(self, method_name: str, *arguments: Any, **options: Any) -> list[Any]:
            return calls.wait(method_name, self.execute_all_async(method_name, *arguments, **options))

    return WatchedWorkerGroup


def _write_beside(rank_class: Any) -> None:
    """Have files written in a thread of their own, beside the passes of the next step."""
    raw = _unwrap_ray_remote(rank_class.cls)
    ray.method(concurrency_group=_FILES)(raw.actor_write)
    remote: Any = ray.remote
    rank_class.cls = remote(concurrency_groups={_FILES: 1})(raw)
