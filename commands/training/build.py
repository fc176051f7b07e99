"""`spangrad build`: transitions from rollouts."""

from __future__ import annotations

import logging
import sys
from contextlib import closing
from datetime import datetime
from typing import Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, limit_builder_threads, log_to_stderr, resolve
from spangrad.errors import SettingsError

log = logging.getLogger(__name__)


def build(
    *,
    follow: bool = False,
    everything: Annotated[bool, Parameter("--all", negative=())] = False,
    as_of: datetime | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Build transitions from complete rollouts, once or as they finish.

    Args:
        follow: keep building as rollouts finish, until stopped.
        everything: build every rollout that has ended, without waiting for missing spans or rewards, and print the number of transitions
            and of drops by reason. The exit code is 1 if a call is unaccounted for.
        as_of: build from the spans that had arrived by this time (ISO 8601), as a separate revision of the dataset (builder.as_of).
    """
    if follow and (everything or as_of):
        raise SettingsError("--follow waits for new spans; --all and --as-of build what has arrived. Leave one out.")
    settings = resolve(config, set_, {"builder.as_of": as_of.isoformat() if as_of else None})
    log_to_stderr()
    limit_builder_threads()
    from transition_builder import loop

    if follow:
        from spangrad.http.readiness import await_services, need_of_store
        from spangrad.processes import end_by_interrupt

        end_by_interrupt()
        try:
            await_services(need_of_store(settings), settings.engine.start_timeout_seconds)
            loop.follow(settings)
        except KeyboardInterrupt:  # nothing needs to be finished: every write is idempotent
            log.info("stopped")
    elif not everything:
        loop.build_once(settings)
    else:
        loop.build_all(settings)
        from commands.training.build_report import show
        from spangrad.store.clickhouse import connect
        from transition_builder.report import reconcile_report

        with closing(connect(settings.store)) as client:
            code = show(reconcile_report(client, settings.builder.spec))
        sys.exit(code)
