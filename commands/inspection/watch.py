"""`spangrad watch`: the overview and the rollouts in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_store
from spangrad.errors import SettingsError

if TYPE_CHECKING:
    from page.reading import PageStore
    from page.watch.app import ReadFate, ReadState
    from spangrad.settings import Settings


def watch(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Show the overview and the newest rollouts in the terminal, live; Enter on a rollout says what became of it, and why.

    If no store answers at store.url, the data of a stopped store (store.path, else the last demo's) is opened for as long as the view.
    """
    settings = resolve(config, set_)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError("this view needs a terminal for its input and output. Elsewhere use `spangrad page`, or `spangrad sql`.")
    from contextlib import closing

    from page.reading import PageStore
    from page.watch.app import WatchApp

    with answering_store(settings.store) as answering:
        opened = settings.model_copy(update={"store": answering})
        with closing(PageStore(answering)) as store:
            WatchApp(*watch_readers(opened, store)).run()


def watch_readers(settings: Settings, store: PageStore) -> tuple[ReadState, ReadFate]:
    """Return the reads of the view over a store."""
    from commands.inspection.records import read_record
    from page.overview import OverviewReader
    from page.rollouts.filters import RolloutFilter, RolloutOrder
    from page.rollouts.listing import page_of
    from spangrad.store.rollout.why import explain

    overview = OverviewReader(store, settings)

    def read_state(text: str, only_failed: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        shown = overview.read()
        if "error" in shown:
            return shown, []
        return shown, page_of(store, RolloutFilter(text=text or None, failed=only_failed or None), RolloutOrder())["rows"]

    def read_fate(rollout: str) -> list[str]:
        record = store.read(lambda client: read_record(client, settings, rollout))
        return [line for line in explain(record, settings) if line]

    return read_state, read_fate
