"""`spangrad watch` over a real store, driven by Textual's pilot; the screen is compared as text."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input

from commands.inspection.watch import watch_readers
from page.reading import PageStore
from page.watch.app import WatchApp
from page.watch.cells import COLUMNS, returns, rollout_lines, visible
from spangrad.settings import GatewaySettings, Settings, StoreSettings
from tests.support.built_rollouts import post, settings_of
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

RUN = "watched"
State = tuple[dict[str, Any], list[dict[str, Any]]]
HOSTILE = "[bold]x[/]\x1b[31m\u202e"
COUNTS = {"Built": 1000, "Succeeded": 500, "Mean": 0.5, "NowMs": 0, "LastMs": 0, "Waiting": 0}
OVERVIEW = {"services": [], "rollouts": COUNTS, "drops": [], "newest": None, "steps": []}


@pytest.fixture(scope="module")
def settings(store: StoreSettings) -> Settings:
    """Settings of a page over three rollouts, of which one failed and one has a hostile name."""
    spans = SpanFactory(run=RUN)
    for rollout, reward, failure in (("good", 1.0, ""), ("late", 0.0, "timeout"), (HOSTILE, 0.5, "")):
        root = spans.root(rollout, calls=1, failure=failure, TaskId="rome")
        spans.evaluation(root, reward)
        spans.call(spans.client(root, rollout=rollout), rollout=rollout)
    post(store, spans.otlp())
    built = settings_of(store, RUN)
    build_once(built)
    return built.model_copy(update={"gateway": built.gateway.model_copy(update={"url": "http://127.0.0.1:9"})})


@asynccontextmanager
async def watching(settings: Settings) -> AsyncIterator[tuple[WatchApp, Pilot[None]]]:
    with closing(PageStore(settings.store)) as store:
        app = WatchApp(*watch_readers(settings, store), seconds=0.2)
        async with app.run_test(size=(150, 30)) as pilot:
            yield app, pilot


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for a condition, a minute at most."""
    for _ in range(1200):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError(screen(pilot.app))  # pyright: ignore[reportArgumentType]


def screen(app: WatchApp) -> str:
    """Text of the screen."""
    strips = app.screen._compositor.render_strips()  # pyright: ignore[reportPrivateUsage]
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def listed(app: WatchApp) -> list[str]:
    """Ids of the rollouts in the list."""
    table = app.query_one("#list", DataTable)
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


async def test_watch_screen_shows_overview_and_rollouts(settings: Settings) -> None:
    async with watching(settings) as (app, pilot):
        # The table has its rows before the screen shows them.
        await until(pilot, lambda: "built 3" in screen(app) and sum(RUN in line for line in screen(app).splitlines()) == 3)
        lines = screen(app).splitlines()
    assert [title.strip("─╭╮ ") for title in lines[0].split("╮╭")] == ["Services", "Last hour", "Drops of a day", "Version"]
    tiles = [part.strip("│ ") for part in lines[1].split("││")]
    assert tiles == ["● store", "built 3, 67 % succeeded", "none", "none"]
    head = next(line for line in lines if line.strip().startswith("Rollout"))
    assert re.split(r"\s{2,}", head.strip()) == list(COLUMNS)
    rows = {line.split()[0]: line.split()[1:8] for line in lines if RUN in line}
    assert rows["good"] == [RUN, "rome", "succeeded", "1", "1", "0", "0"]
    assert rows["late"] == [RUN, "rome", "timeout", "0", "1", "0", "0"]
    assert visible(HOSTILE) in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)


@pytest.mark.parametrize(("succeeded", "share"), [(0, "0 %"), (1, "< 1 %"), (500, "50 %"), (999, "> 99 %"), (1000, "100 %")])
def test_rollout_lines_share_of_almost_none_or_all_is_neither(succeeded: int, share: str) -> None:
    assert f", {share} succeeded" in rollout_lines({"rollouts": {**COUNTS, "Succeeded": succeeded}})


def test_returns_leave_out_means_that_are_no_numbers() -> None:
    assert returns({"steps": [{"Metrics": of} for of in ({"mean_return": math.nan}, {}, {"mean_return": 0.5})]}) == [0.5]


async def test_watch_without_a_store_shows_services_and_the_problem() -> None:
    nowhere = "http://127.0.0.1:9"
    async with watching(Settings(store=StoreSettings(url=nowhere), gateway=GatewaySettings(url=nowhere))) as (app, pilot):
        await until(pilot, lambda: "○ store" in screen(app) and "○ gateway" in screen(app) and nowhere in screen(app))


async def test_watch_keys_filter_and_open_a_rollout(settings: Settings) -> None:
    async with watching(settings) as (app, pilot):
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press("f")
        await until(pilot, lambda: listed(app) == ["late"])
        await pilot.press("f", "slash", *"GOOD", "enter")
        await until(pilot, lambda: listed(app) == ["good"])
        assert app.query_one("#filter", Input).value == "GOOD"
        await pilot.press("enter")
        await until(pilot, lambda: "It is not trained" in screen(app) and "Rollout good" in screen(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Services" in screen(app))


async def test_watch_screen_shows_new_rollouts_and_keeps_the_cursor(settings: Settings) -> None:
    async with watching(settings) as (app, pilot):
        await until(pilot, lambda: len(listed(app)) == 3)
        table = app.query_one("#list", DataTable)
        table.move_cursor(row=2)
        chosen = listed(app)[2]
        spans = SpanFactory(run=f"{RUN}-later")
        spans.evaluation(spans.root("new", calls=0), 1.0)
        post(settings.store, spans.otlp())
        build_once(settings)
        await until(pilot, lambda: len(listed(app)) == 4)
        assert listed(app)[table.cursor_row] == chosen


async def test_watch_without_store_shows_the_remedy(settings: Settings) -> None:
    absent = settings.model_copy(update={"store": settings.store.model_copy(update={"url": "http://127.0.0.1:9"})})
    async with watching(absent) as (app, pilot):
        await until(pilot, lambda: "Start it with `spangrad store`" in screen(app))


def row(rollout: str) -> dict[str, Any]:
    names = ("RunId", "BuildSpec", "TaskId", "Outcome")
    counts = ("Return", "Calls", "Drops", "FailedToolCalls", "ToolCalls", "BuiltUs")
    return {"RolloutId": rollout, **dict.fromkeys(names, ""), **dict.fromkeys(counts, 0), "PolicyVersions": [], "Trained": []}


async def test_watch_slow_reading_does_not_replace_that_of_a_newer_filter() -> None:
    began, answers = threading.Event(), threading.Event()

    def state(text: str, only_failed: bool) -> State:
        if not only_failed:
            began.set()
            answers.wait(60)
        return OVERVIEW, [row("failed" if only_failed else "any")]

    app = WatchApp(state, lambda _: (), seconds=3600)
    async with app.run_test() as pilot:
        await until(pilot, began.is_set)
        await pilot.press("f")
        await until(pilot, lambda: listed(app) == ["failed"])
        answers.set()
        await pilot.pause(0.5)
        assert listed(app) == ["failed"]


async def test_watch_slow_store_is_read_once_at_a_time() -> None:
    readings, answers = list[str](), threading.Event()

    def state(text: str, only_failed: bool) -> State:
        readings.append(text)
        answers.wait(60)
        return OVERVIEW, [row("slow")]

    app = WatchApp(state, lambda _: (), seconds=0.02)
    async with app.run_test() as pilot:
        await until(pilot, lambda: bool(readings))
        await asyncio.sleep(0.5)
        count = len(readings)
        answers.set()
        await until(pilot, lambda: listed(app) == ["slow"] and len(readings) > 1)
    assert count == 1


async def test_watch_selected_row_that_a_reading_removed_opens_nothing() -> None:
    rows = [row("old")]
    app = WatchApp(lambda text, only_failed: (OVERVIEW, list(rows)), lambda _: (), seconds=0.02)
    async with app.run_test() as pilot:
        await until(pilot, lambda: listed(app) == ["old"])
        table = app.query_one("#list", DataTable)
        selected = DataTable.RowSelected(table, 0, table.coordinate_to_cell_key(table.cursor_coordinate).row_key)
        rows[:] = [row("new")]
        await until(pilot, lambda: listed(app) == ["new"])
        app.on_data_table_row_selected(selected)
        assert len(app.screen_stack) == 1


async def test_watch_reading_that_ends_while_the_app_does_shows_nothing() -> None:
    reading, ending = threading.Event(), threading.Event()

    def state(text: str, only_failed: bool) -> State:
        reading.set()
        ending.wait(60)
        return OVERVIEW, [row("late")]

    app = WatchApp(state, lambda _: (), seconds=600)
    async with app.run_test() as pilot:
        await until(pilot, reading.is_set)
        app._running = False  # pyright: ignore[reportPrivateUsage] - as at the begin of its end: widgets are removed meanwhile
        await app.query_one("#returns").remove()
        ending.set()
        async with asyncio.timeout(60):
            while any(worker.is_running for worker in app.workers):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
