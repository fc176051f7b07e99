"""The page in a thread of the test, and the system's Chromium that opens it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from commands.inspection.actions import action_commands
from commands.inspection.records import read_messages, read_record, read_skipped
from page.server import running
from page.views import PageReaders
from runner.queue.server import running as running_queue
from spangrad.processes import free_ports
from spangrad.settings import QueueSettings, Settings

T = TypeVar("T")
PATIENCE_MS = 30_000
"""Time limit of what a test expects of a page, in milliseconds: a machine may be busy with other tests."""
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def running_page(settings: Settings) -> Generator[str]:
    """Serve the page on a free port; yield its URL."""
    on_free_port = settings.model_copy(update={"page": settings.page.model_copy(update={"port": 0})})
    with in_thread(lambda: running(on_free_port, READERS, action_commands())) as server:
        yield server.url


@contextmanager
def in_thread(service: Callable[[], AbstractAsyncContextManager[T]]) -> Generator[T]:
    """Run an asynchronous service in a thread with a loop of its own; yield what it yields."""
    loop = asyncio.new_event_loop()
    ready, ended = threading.Event(), asyncio.Event()
    yielded: list[T] = []

    async def serve() -> None:
        async with service() as value:
            yielded.append(value)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield yielded[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


@contextmanager
def queue_beside(directory: Path) -> Generator[QueueSettings]:
    """Serve a queue on a free port, with its database in a directory; yield its settings."""
    (port,) = free_ports(1)
    queue = QueueSettings.model_validate({"url": f"http://127.0.0.1:{port}", "port": port, "db": f"sqlite:///{directory / 'queue.db'}"})
    with in_thread(lambda: running_queue(Settings(queue=queue))):
        yield queue


READERS = PageReaders(read_record, read_messages, read_skipped)


def chromium() -> str:
    """Path of the system's Chromium; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is here: install Debian's package chromium, or put one into PATH")
    return path


def browsers() -> Iterator[Browser]:
    """Start the browser; a generator for a fixture of a module: while Playwright runs, asynchronous tests cannot."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def violations(page: Page, rules: list[str] | None = None) -> list[str]:
    """Findings of axe-core that are serious or worse, of these rules or of all."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    run = "async (rules) => (await axe.run({ resultTypes: ['violations'], ...(rules && { runOnly: rules }) })).violations"
    violations = page.evaluate(f"{run}.map(v => [v.impact, v.id, v.nodes.map(n => n.html.slice(0, 200))])", rules)
    return [f"{impact} {rule}: {nodes}" for impact, rule, nodes in violations if impact in {"serious", "critical"}]


class Visitor:
    """A tab that notes what must never happen: errors of scripts, requests to others, dialogs."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        """Open a tab in a context of its own."""
        self.url = url
        self.context: BrowserContext = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.faults: list[str] = []
        self.page.on("console", lambda message: self._note(message.type in {"error", "warning"}, f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self._note(True, f"script: {error}"))
        self.page.on("dialog", lambda dialog: self._note(True, f"dialog: {dialog.message}"))
        self.page.on(
            "request", lambda request: self._note(urlsplit(request.url).netloc not in {urlsplit(url).netloc, ""}, f"request: {request.url}")
        )

    def open(self, path: str) -> Page:
        """Open a path of the page; its scripts have ended their first requests."""
        self.page.goto("about:blank")  # a path that differs by its fragment alone would not be loaded again
        self.page.goto(f"{self.url}{path}", wait_until="load")
        self.page.locator("html[data-ready], form.login").first.wait_for(state="attached")
        return self.page

    def close(self) -> None:
        """Close the tab; fails where something happened that must not."""
        self.context.close()
        assert self.faults == []

    def _note(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)
