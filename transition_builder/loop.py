"""Loop of the builder: build once, build all that has ended, or follow the store and build rollouts as they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import NoReturn

import tenacity

from spangrad.errors import RuleError, StoreError
from spangrad.settings import Settings
from transition_builder.builder import Builder
from transition_builder.metrics import serve_metrics
from transition_builder.summary import ProgressCallback, Summary

log = logging.getLogger(__name__)


def build_once(settings: Settings) -> Summary:
    """Build every rollout that is complete now.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    summary = _started(settings).build_ready()
    if not summary.rollouts:
        log.info("nothing to build; %d rollouts wait", summary.waiting)
    return summary


def build_all(settings: Settings) -> Summary:
    """Conclude everything that has ended without waiting for late spans: those make a new revision.

    A rollout that a runner announced ends with its final root, or with `incomplete_after_seconds` of silence.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    return _started(settings, force=True).build_ready()


def rebuild(settings: Settings, since: datetime, on_progress: ProgressCallback, run: str | None = None) -> Summary:
    """Build everything that has ended, and whose root or calls arrived since a time, by the settings' specification.

    Builds of other specifications stay; what this one has built already is not built again. The dataset is not registered. With a
    run, only its rollouts are built.

    Raises:
        StoreError: the store does not answer, or failed.
    """
    return Builder(settings, since=since, run=run, force=True, on_progress=on_progress).build_ready()


def follow(settings: Settings) -> NoReturn:
    """Build rollouts as they become complete, until the process ends.

    Failures of the store are retried with back-off once it has answered, and those of Python rules and expressions after the first pass.

    Raises:
        BuilderError: a file of the specification was changed.
        RuleError: a rule fails in the first pass.
        StoreError: the store does not answer, or refuses the settings, before the first pass.
    """
    builder = _started(settings)
    if settings.builder.metrics_address:
        reader = settings.store.read_token
        tokens = [settings.store.password, reader.get_secret_value() if reader else None]
        serve_metrics(settings.builder.metrics_address, builder.lags, tokens)
    # The first pass may take hours; a rule that fails in it is one that was just set, and is shown at once.
    _retrying(StoreError)(builder.build_ready)
    retrying = _retrying(StoreError, RuleError)

    def build(urgent: bool) -> None:
        retrying(builder.build_ready, urgent=urgent)

    repeat(lambda: bool(retrying(builder.wait)), build, settings.builder.poll_seconds)


def _retrying(*errors: type[Exception]) -> tenacity.Retrying:
    """Return what repeats a call with back-off for as long as it raises one of these errors."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        wait=tenacity.wait_exponential(multiplier=0.2, max=5),
        before_sleep=lambda state: log.warning("%s Trying again.", state.outcome.exception() if state.outcome else ""),
    )


def repeat(
    wait: Callable[[], bool],
    build: Callable[[bool], object],
    longest_rest: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Wait and build in turn, with rests while rollouts end one after the other.

    These are built several at a time: after an urgent pass the builder rests as long as that took. The wait before the pass counts as
    rest, so that a rollout which ends during a pass that follows a wait is built at once after it.

    Args:
        wait: waits until there may be something to build, and returns whether it is urgent.
        build: makes a pass, given whether it is urgent.
        longest_rest: longest rest after a pass, in seconds.
        clock: returns the time in seconds.
        sleep: sleeps so many seconds.
    """
    while True:
        ended = clock()
        urgent = wait()
        began = clock()
        build(urgent)
        rest = min(clock() - began, longest_rest) - (began - ended)
        if urgent and rest > 0:
            sleep(rest)


def _started(settings: Settings, *, force: bool = False) -> Builder:
    """Return a builder whose specification is registered under the dataset's name."""
    builder = Builder(settings, force=force)
    builder.register(settings.builder.dataset)
    return builder
