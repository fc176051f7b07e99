"""Turns of the trainer and its policy's engines on the same devices (`trainer.workers.colocated`): one of the two has its weights there.

In: the gateway, which alone orders engines; this process's optimizer. Out: engines that sleep while a step computes, and serve otherwise.
Invariant: engines are woken once the trainer's models are off the devices, by the publication of the step's version or with the version
that is served. However a turn ends, they wake: where this process dies, when the time that the gateway was asked for runs out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spangrad.errors import GatewayError
from spangrad.settings import Settings
from trainer.monitor.watching import Clock
from trainer.publish.publisher import Publisher
from trainer.publish.publishing import HeadPublisher, is_transient
from trainer.retries import Outage, call_with_retries
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    from trainer.optim.optimizer import VerlOptimizer

logger = logging.getLogger(__name__)

SLEEP_SECONDS = 60.0
"""Time that engines are asked to sleep, again and again: what they sleep at most after this process has died."""
RENEWALS = 4
"""Number of times that they are asked for it within that time."""


class DeviceTurns:
    """Turns of one trainer; without trainer.workers.colocated it always has the devices, and nothing is asked or moved."""

    def __init__(
        self,
        publishing: HeadPublisher | None,
        settings: Settings,
        shutdown: Shutdown,
        optimizer: Callable[[], VerlOptimizer | None],
        clock: Clock,
    ) -> None:
        """Leave the devices to the engines; without `publishing` versions are not published, and no engine shares the devices.

        `optimizer` returns the one that is loaded, if one is. A shutdown ends the wait for a gateway that does not answer.
        """
        self._publishing = publishing if settings.trainer.workers.colocated else None
        self._policy = settings.trainer.policy
        # An engine that forgot the base of its adapters would have to read it again, which no publication of an adapter does.
        self._level = 1 if settings.trainer.weight_sync.method == "adapter" else 2
        self._shutdown = shutdown
        self._optimizer = optimizer
        self._clock = clock
        self._outage = Outage("the gateway")
        self._on_device = False

    @property
    def are_taken(self) -> bool:
        """Return whether the trainer and the engines take turns."""
        return self._publishing is not None

    @contextmanager
    def of_trainer(self) -> Generator[None]:
        """Have the devices from the end of the engines' calls until the block ends, or `hand_back` in it.

        Raises:
            GatewayRefusedError: the gateway, or an engine, cannot do that.
            GatewayError: the head is not served in the time that an engine has to start.
        """
        if self._publishing is None:
            yield
            return
        self._publishing.wait()  # one that is late would wake the engines in the step
        publisher = self._publishing.publisher
        with self._clock.stage("sleep"):
            call_with_retries(lambda: publisher.sleep(self._policy, self._level, SLEEP_SECONDS), is_transient, self._outage, self._shutdown)
        over = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(publisher, over), name="engines' sleep", daemon=True)
        renewing.start()
        try:
            self._on_device = True
            if optimizer := self._optimizer():
                optimizer.load_back()
            yield
        finally:
            try:
                self.hand_back()
                self._wake(publisher)
            finally:
                over.set()

    def hand_back(self) -> None:
        """Move the trainer's models off the devices, so that a publication may wake the engines."""
        if not self._on_device:
            return
        if optimizer := self._optimizer():
            optimizer.offload()
        self._on_device = False

    def _wake(self, publisher: Publisher) -> None:
        try:
            publisher.wake_up(self._policy)
        except GatewayError as error:
            logger.warning("the engines are woken by the gateway, within %g s: %s", SLEEP_SECONDS, error)

    def _renew(self, publisher: Publisher, over: threading.Event) -> None:
        while not over.wait(SLEEP_SECONDS / RENEWALS):
            try:
                publisher.sleep(self._policy, self._level, SLEEP_SECONDS, renew=True)
            except GatewayError as error:
                logger.warning("the engines' sleep was not prolonged: %s", error)
