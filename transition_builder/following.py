"""Following the store: rollouts are built as they end, until the process is asked to stop."""

from __future__ import annotations

import logging
import time

import tenacity

from spangrad.errors import RuleError, StoreError
from spangrad.settings import Settings
from transition_builder.loop import started
from transition_builder.stopping import stoppable

log = logging.getLogger(__name__)


def follow(settings: Settings) -> None:
    """Build rollouts as they become complete, until SIGTERM or SIGINT.

    Failures of the store and of Python rules are retried with back-off while following.

    Raises:
        BuilderError: a file of the specification was changed.
        RuleError: a Python rule fails at the start.
        StoreError: the store does not answer at the start.
    """
    with stoppable():
        builder = started(settings)
        builder.build_ready()
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreError, RuleError)),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5),
            before_sleep=lambda state: log.warning("%s Trying again.", state.outcome.exception() if state.outcome else ""),
        )
        while True:
            urgent = bool(retrying(builder.wait))
            began = time.monotonic()
            retrying(builder.build_ready, urgent=urgent)
            if urgent:
                # Rollouts that end one after the other are built several at a time: the builder rests as long as it works.
                time.sleep(min(time.monotonic() - began, settings.builder.poll_seconds))
