"""Publication of the branch's head: at once where the gateway answers, else in the background, with back-off, while training continues.

In: the ledger, which names the head. Out: publications. Invariant: transient failures are retried until they succeed; of several versions
that wait for the gateway only the newest is published, since each attempt reads the head from the ledger again; one attempt is under way at
a time. Only a permanent refusal of the head is an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import GatewayError, LedgerError
from spangrad.settings import Settings
from trainer.ledger.ledger import Ledger
from trainer.ledger.policies import has_version
from trainer.ledger.recovery import newest_version
from trainer.publish.checkpoint import WEIGHTS
from trainer.publish.offers import WeightSource
from trainer.publish.publisher import EngineUsage, GatewayRefusedError, Publisher
from trainer.retries import Outage, call_with_retries, without_retries
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.optim.optimizer import VerlOptimizer
    from trainer.phases import Phases

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _RETRY_SECONDS = 0.2, 10.0
"""Shortest and longest pause between two attempts in the background, in seconds."""


@dataclass(frozen=True, slots=True)
class ServedHead:
    """Version that the gateway was made to serve."""

    version: int
    metrics: Mapping[str, float]
    """Metrics: seconds_publish, seconds_publish_STAGE of the engine that took the longest, bytes_publish_full and bytes_publish_delta
    that engines were sent, engine_idle since the publication before."""


class HeadPublisher:
    """Publisher of the head of one branch."""

    def __init__(
        self,
        publisher: Publisher,
        ledger: Ledger,
        settings: Settings,
        shutdown: Shutdown,
        phases: Phases,
        optimizer: Callable[[], VerlOptimizer | None],
    ) -> None:
        """Publish the head of a ledger, once the policies of its phase are updated.

        `optimizer` returns the one that is loaded, if one is: its ranks send weights. A shutdown ends waits, and `close` the retries.
        """
        self.publisher = publisher
        self._optimizer = optimizer
        self._ledger = ledger
        self._settings = settings
        self._policy = settings.trainer.policy
        self._shutdown = shutdown
        self._phases = phases
        self.outage = Outage("the gateway")
        self._lock = threading.Lock()
        """Lock of the following attributes."""
        self._thread: threading.Thread | None = None
        """Thread that retries a failed publication. None: none failed."""
        self._published: list[ServedHead] = []
        self._refused: GatewayRefusedError | None = None
        self._closed = threading.Event()
        self._usage: EngineUsage | None = None
        """Time of the engines at the last publication."""
        self._has_replaced = False
        """True once the head has replaced a newer version of another branch."""

    @property
    def is_behind(self) -> bool:
        """Return whether a publication failed and has not succeeded since."""
        return self._thread is not None

    def start(self, weights: WeightSource | None) -> None:
        """Wait until the gateway has an engine, which may still be starting, and publish the head.

        A head that is reported as served is published, too: the gateway compares weights, not numbers, and restores engines that are down.
        A head whose phase has not begun is published later. Without weights in memory the head is read from files.

        Raises:
            GatewayRefusedError: the gateway refuses the head permanently.
            GatewayError: there is no gateway, or it has no engine, in the time that an engine has to start.
        """
        end = time.monotonic() + self._settings.engine.start_timeout_seconds
        self._retried(self._await_engine, end)
        if self._phases.is_updated():
            self._retried(lambda: self._attempt(weights), end)

    def publish(self, weights: WeightSource | None = None) -> ServedHead | None:
        """Publish the head.

        Args:
            weights: of the version in memory, which do not change until this call returns. None: a step may be changing them, and the head
                is read from files.

        Returns:
            None: the gateway cannot serve it now, and it is retried in the background; or another process moved the head meanwhile; or the
            head's phase has not begun.

        Raises:
            GatewayRefusedError: the gateway refuses the head permanently.
        """
        with self._lock:
            if self.is_behind:
                return None  # the background reads the head again before it ends
        if not self._phases.is_updated():
            return None
        try:
            return self._attempt(weights)
        except GatewayRefusedError:
            raise
        except GatewayError as error:
            self.outage.failed(error)
            with self._lock:
                self._thread = threading.Thread(target=self._retry, name="publication", daemon=True)
                self._thread.start()
            return None

    def collect_or_retry(self, weights: WeightSource | None) -> None:
        """Publish the head if its phase begins, or another version is served: a restarted engine has the weights that it was started with.

        Raises:
            GatewayRefusedError: the gateway refuses the head permanently.
        """
        if self.is_behind or not self._phases.is_updated():
            return
        if not self._phases.has_entered():
            if served := self.publish(weights):
                with self._lock:
                    self._published.append(served)
            return
        try:
            served = self.publisher.served(self._policy)
            self.outage.over()
        except GatewayError as error:
            # Also a refusal: it is an error only when a version is published.
            self.outage.failed(error, is_retry=False)
            return
        if served not in {None, newest_version(self._ledger).version}:
            self.publish(weights)

    def collect(self) -> list[ServedHead]:
        """Return the versions published in the background since the last call.

        Raises:
            GatewayRefusedError: the gateway refused the head permanently.
        """
        with self._lock:
            late, self._published = self._published, []
            refused, self._refused = self._refused, None
        if refused:
            raise refused
        return late

    def wait(self) -> None:
        """Wait until the head is served, or the background was refused.

        Raises:
            GatewayError: the gateway did not serve the head in the time that an engine has to start.
        """
        end = time.monotonic() + self._settings.engine.start_timeout_seconds
        while self.is_behind and not self._shutdown.is_ending:
            if time.monotonic() > end:
                raise GatewayError(
                    f"the gateway at {self._settings.gateway.url} has not taken version {newest_version(self._ledger).version} in "
                    f"engine.start_timeout_seconds = {self._settings.engine.start_timeout_seconds:g} s. The version stays committed and is "
                    "published when `spangrad train` starts again."
                )
            self._shutdown.sleep(self._settings.trainer.poll_seconds)

    def close(self) -> None:
        """Start no further attempt; the gateway completes one that is under way."""
        self._closed.set()

    def _retried(self, work: Callable[[], object], end: float) -> None:
        call_with_retries(work, lambda error: is_transient(error) and time.monotonic() < end, self.outage, self._shutdown)

    def _await_engine(self) -> None:
        if self.publisher.served(self._policy) is None:
            raise GatewayError(f"the gateway at {self._settings.gateway.url} has no engine. Start one with `spangrad engine`.")

    def _attempt(self, weights: WeightSource | None = None) -> ServedHead | None:
        """Publish the head, even if it is older than the served version.

        It is after a rollback that did not reach the gateway, or where another branch's version was published by hand. That is replaced
        once: where a trainer of that branch publishes, too, each would replace the other's version without end.
        """
        served = self.publisher.served(self._policy)
        head = newest_version(self._ledger)  # read last: a served version of this branch that is newer was its head before
        newer = served if served is not None and head.version < served else None
        is_own = newer in self._ledger.statuses()
        is_foreign = newer is not None and not (is_own or self._has_replaced) and has_version(self._ledger.database, self._policy, newer)
        path = Path(head.policy_version.path)
        chosen = weights if weights and head.version == weights.version else self._from_files(path)
        try:
            seconds = self.publisher.publish(head.policy_version, again=is_own or is_foreign, weights=chosen)
        except GatewayError:
            if newest_version(self._ledger).version != head.version:
                return None  # another process has moved the head, and publishes it
            raise
        self.outage.over()
        self._has_replaced |= is_foreign
        self._phases.enter(head.version)
        logger.info("version %d is served (%.2f s)%s", head.version, seconds, f" in place of version {newer}" if newer else "")
        stages = {f"seconds_publish_{name}": value for name, value in self.publisher.stages.items()}
        sent = {f"bytes_publish_{kind}": float(count) for kind, count in self.publisher.sent.items() if count}
        return ServedHead(head.version, {"seconds_publish": seconds, **stages, **sent, **self._engine_idle()})

    def _engine_idle(self) -> dict[str, float]:
        before, self._usage = self._usage, self.publisher.usage
        idle = self._usage.idle_share_since(before) if before and self._usage else None
        return {} if idle is None else {"engine_idle": idle}

    def _from_files(self, path: Path) -> WeightSource | None:
        """Return a version's parameters in its files, which the ranks send: those in memory may be in the middle of a step.

        None: the engines read the version's files, since there is no rank that would send them.
        """
        optimizer = self._optimizer()
        ranks = optimizer.rank_senders if optimizer else ()
        if not ranks or not (path / WEIGHTS).is_file():
            return None
        return WeightSource(lambda: _read_weights(path / WEIGHTS), lambda: ranks, path)

    def _retry(self) -> None:
        """Publish the head, in a thread of its own, until that succeeds or is refused permanently."""
        pause = _FIRST_RETRY_SECONDS
        while not self._closed.wait(pause):
            publication: ServedHead | None = None
            refused: GatewayRefusedError | None = None
            try:
                with without_retries():
                    publication = self._attempt()
                pause = 0.0
            except GatewayRefusedError as error:
                refused = error
            except (GatewayError, LedgerError) as error:
                self.outage.failed(error)
                pause = min(max(2 * pause, _FIRST_RETRY_SECONDS), _RETRY_SECONDS)
                continue
            with self._lock:
                if publication:
                    self._published.append(publication)
                if refused or (publication and self._is_head(publication.version)):
                    self._refused, self._thread = refused, None
                    return

    def _is_head(self, version: int) -> bool:
        """Return whether a version is the head; a ledger that fails does not say so, and the version is published once more."""
        try:
            return newest_version(self._ledger).version == version
        except LedgerError:
            return False


def is_transient(error: BaseException) -> bool:
    """Return whether an error of gateway or ledger is worth a retry: it is not a permanent refusal."""
    return isinstance(error, GatewayError | LedgerError) and not isinstance(error, GatewayRefusedError)


def _read_weights(file: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        for name in opened.keys():  # noqa: SIM118  # no mapping
            yield name, opened.get_tensor(name)
