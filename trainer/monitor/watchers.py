"""Watchers of a training run, by the settings: log or table, trackers, spans.

Invariant: a table is drawn in a terminal only; a log file gets lines.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from spangrad.settings import Settings
from trainer.monitor.view import LiveView, LogLines
from trainer.monitor.watching import Watcher, Watchers

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


def reporters_of(settings: Settings, client: Client | None) -> list[Watcher]:
    """Return the watchers that report elsewhere: trackers, and with a store its spans.

    Raises:
        SettingsError: a tracker's package is not installed.
    """
    watchers: list[Watcher] = []
    if settings.trainer.trackers:
        from trainer.monitor.tracking import Trackers

        watchers.append(Trackers(settings))
    if client and settings.trainer.traces:
        from trainer.monitor.tracing import StepSpans

        watchers.append(StepSpans(settings, client))
    return watchers


def watchers_of(settings: Settings, client: Client) -> Watchers:
    """Return the watchers that the settings name; nothing is drawn when one of the others cannot be had.

    Raises:
        SettingsError: a tracker's package is not installed.
    """
    from rich.console import Console

    # The terminal of now: during a pass, `quiet` puts another stream in the place of sys.stdout.
    reporters, console = reporters_of(settings, client), Console(file=sys.stdout, markup=False, emoji=False)
    return Watchers([*reporters, LiveView(settings.trainer, console) if console.is_terminal else LogLines()])
