"""The page in a thread of the test, the system's Chromium that opens it, and rollouts of every kind for it: trained, dropped, hostile."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urldefrag, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from commands.inspection.actions import action_commands
from commands.inspection.records import read_messages, read_record, read_skipped
from page.server import running
from page.views import PageReaders
from runner.queue.server import running as running_queue
from spangrad.processes import free_ports
from spangrad.settings import QueueSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.types import call_id
from spangrad.weights.checksums import tokenizer_hash
from tests.support.built_rollouts import post, settings_of
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

RUN = "page"
MANY = 400
MARKUP = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
BIDI = "abc\u202ecod.exe\u2066"
LONG = 10 * 2**20
"""Characters of the longest value of a hostile span."""
TEXTS = ["what is the weather in rome", "the weather in rome is fine"]


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of a few words, all that the page needs of a model."""
    words = ["<unk>", *(f"word{number}" for number in range(1, 11)), "paris", "rome", "oslo"]
    Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")).save(str(directory / "tokenizer.json"))


class PageRollouts:
    """Rollouts that tests of the page look at."""

    def __init__(self, store: StoreSettings, model: Path) -> None:
        """Put everything into the store, built; `model` becomes the directory of a tokenizer."""
        self.store = store
        write_tokenizer(model)
        self._waiting: dict[tuple[str, tuple[str, ...]], list[list[Any]]] = {}
        self.hash = tokenizer_hash(model)
        self.spans = SpanFactory(run=RUN)
        self.settings: Settings = settings_of(store, RUN)
        self.calls = self._conversation("seen-1", 1.0, failed=False)
        self.untrained_calls = self._conversation("seen-2", 0.0, failed=True)
        hostile = self._hostile()
        post(store, self.spans.otlp())
        build_once(self.settings)
        self.client = connect(store)
        self._train()
        self._train_hostile(hostile)
        self._many()
        self.client.close()

    def _conversation(self, rollout: str, reward: float, *, failed: bool) -> list[str]:
        """Add a rollout of two calls with a tool between them; return the spans of its calls."""
        spans = self.spans
        root = spans.root(rollout, calls=2, GroupId="weather", TaskId="rome", GroupSize=2)
        spans.spans[-1]["Duration"] = 9 * 10**9
        spans.evaluation(root, reward)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You help."}, {"role": "user", "content": TEXTS[0]}]
        tool_call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
        asks = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
        first = self._call(root, rollout, messages, asks, [5, 6, 7], [8, 9])
        spans.evaluation(first, 0.25, "step")
        attributes = {"input.value": '{"city": "rome"}', "output.value": "fine", "tool.name": "weather"}
        outcome: dict[str, Any] = {"status": "Error", "StatusMessage": "no such city"} if failed else {}
        spans.span("weather", root, rollout=rollout, kind="TOOL", Duration=250 * 10**6, Attributes=attributes, **outcome)
        later = [*messages, asks, {"role": "tool", "tool_call_id": "t1", "content": "fine"}]
        second = self._call(root, rollout, later, {"role": "assistant", "content": TEXTS[1]}, [5, 6, 7, 8, 9, 10], [11, 12, 13])
        return [first, second]

    def _call(
        self, root: str, rollout: str, messages: list[dict[str, Any]], reply: dict[str, Any], prompt: list[int], response: list[int]
    ) -> str:
        spans = self.spans
        logprobs = [-0.1 - index for index in range(len(response))]
        facts: dict[str, Any] = {"PromptIds": prompt, "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
        facts |= {"TokenizerHash": self.hash, "Versions.Start": [0, 1], "Versions.Version": [3, 4]}
        span = spans.call(spans.client(root, rollout=rollout), rollout=rollout, **facts)
        others = [{"token": word, "logprob": -0.5 * rank} for rank, word in enumerate((" paris", MARKUP), 1)]
        tokens = {"content": [{"token": "x", "logprob": logprob, "top_logprobs": others} for logprob in logprobs]}
        choice = {"index": 0, "message": reply, "finish_reason": "stop", "logprobs": tokens}
        request, answer = {"model": "policy", "messages": messages}, {"choices": [choice]}
        spans.spans[-1]["Attributes"] = {"spangrad.request.json": json.dumps(request), "spangrad.response.json": json.dumps(answer)}
        spans.spans[-1]["Duration"] = 2 * 10**9
        return span

    def _hostile(self) -> str:
        """Add a rollout whose every text is an attack, or longer than any screen; return the span of its call."""
        spans, rollout = self.spans, f"{MARKUP} & {BIDI}"
        root = spans.root(rollout, calls=1, GroupId=MARKUP, TaskId=f"=cmd|{MARKUP}")
        spans.spans[-1]["StatusMessage"] = MARKUP
        spans.evaluation(root, 0.5, MARKUP)
        spans.span(MARKUP, root, rollout=rollout, status="Error", StatusMessage=MARKUP, service=MARKUP, Attributes={
            MARKUP: MARKUP, "href": "javascript:window.hacked=true", "long": "x" * LONG, "bidi": BIDI})  # fmt: skip
        text = f"{MARKUP}\n{BIDI}\n\ud800"
        messages = [{"role": MARKUP, "content": text + "y" * 100_000}]
        return self._call(root, rollout, messages, {"role": "assistant", "content": text}, [5], [6])

    def _train_hostile(self, span: str) -> None:
        """Record a version of a policy, a branch, a batch and metrics whose names are attacks, and held-out tasks likewise."""
        rollout = f"{MARKUP} & {BIDI}"
        trace = self.spans.trace(f"{RUN}.{rollout}.0")
        place = {"Policy": MARKUP, "Branch": MARKUP, "RunId": RUN, "Mode": "train", "BatchId": MARKUP, "Version": 1}
        of_rollout = {**place, "GroupId": MARKUP, "RolloutId": rollout, "BuildSpec": self.settings.builder.spec}
        self._insert("batches", of_rollout)
        self._insert("trained_calls", {**of_rollout, "TaskId": MARKUP, "CallId": call_id(trace, span, 0), "TraceId": trace, "SpanId": span,
            "SampledVersions": [0], "Return": 0.5, "Advantage": 0.25})  # fmt: skip
        old = datetime(2020, 1, 1, tzinfo=UTC)
        self._insert("policy_versions", {**place, "Parent": 0, "ParentBranch": MARKUP, "Status": "committed", "Checksum": MARKUP,
            "Path": MARKUP, "Metrics": {MARKUP: 1.0, f"seconds_{MARKUP}": 2.0}, "IngestedAt": old})  # fmt: skip
        for version in (8, 9):
            self._insert("builds", {"RunId": RUN, "Mode": "validate", "BuildSpec": "s", "TaskId": MARKUP, "GroupId": "attack",
                "RolloutId": f"{MARKUP}-{version}", "RewardTotals.Name": [MARKUP] * 2, "RewardTotals.Role": [MARKUP, "white"],
                "RewardTotals.Value": [1, -1], "PolicyVersions": [version], "Failure": MARKUP, "AgentNames": [MARKUP],
                "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC)})  # fmt: skip

    def _train(self) -> None:
        """Record the step that was trained on the first conversation."""
        spec = self.settings.builder.spec
        trace = self.spans.trace(f"{RUN}.seen-1.0")
        same = {"Policy": "policy", "Branch": "main", "RunId": RUN, "Mode": "train"}
        self._insert("batches", {**same, "BatchId": "b5", "Version": 5, "GroupId": "weather", "RolloutId": "seen-1", "BuildSpec": spec})
        for turn, span in enumerate(self.calls):
            self._insert("trained_calls", {**same, "BatchId": "b5", "Version": 5, "GroupId": "weather", "TaskId": "rome",
                "RolloutId": "seen-1", "Turn": turn, "CallId": call_id(trace, span, 0), "TraceId": trace, "SpanId": span,
                "SampledVersions": [3, 4], "Staleness": 1, "Return": 1.25, "Advantage": 0.75, "BuildSpec": spec})  # fmt: skip
        call = call_id(trace, self.calls[1], 0)
        tokens = {"Policy": "policy", "BatchId": "b5", "Version": 5, "RolloutId": "seen-1", "CallId": call}
        self._insert("trained_tokens", {**tokens, "Branch": "main", "TrainerLogprobs": [-0.1, -0.98, -2.6],
            "Entropies": [0.125, 0.7, 2.5]})  # fmt: skip
        # Another branch trained the second call as well, by a step that found no entropies.
        self._insert("trained_calls", {**same, "Branch": "fork", "BatchId": "b5", "Version": 5, "GroupId": "weather", "TaskId": "rome",
            "RolloutId": "seen-1", "Turn": 1, "CallId": call, "TraceId": trace, "SpanId": self.calls[1], "SampledVersions": [3, 4],
            "Return": 1.25, "Advantage": -0.5, "BuildSpec": spec})  # fmt: skip
        self._insert("trained_tokens", {**tokens, "Branch": "fork", "TrainerLogprobs": [-0.1, -1.1, -2.1]})
        for version in range(6):
            metrics = {"mean_return": version / 10, "success": version / 5, "grad_norm": 0.5, "seconds_train": 2.0} if version else {}
            self._insert("policy_versions", {**same, "BatchId": f"b{version}" if version else "", "Version": version,
                "Parent": version - 1 if version else None, "ParentBranch": "main", "Status": "committed", "Metrics": metrics,
                "RunId": "many" if version == 1 else RUN})  # fmt: skip

    def _many(self) -> None:
        """Add rollouts that were built, and of which no span is here; one of them was built twice."""
        for number, revision in [(1, 0), *((number, 1) for number in range(MANY))]:
            self._insert("builds", {"RunId": "many", "Revision": revision, "Mode": "validate", "BuildSpec": "s",
                "GroupId": f"g{number // 4}", "GroupSize": 4, "TaskId": f"task-{number // 4}", "RolloutId": f"many-{number:04d}",
                "Content": 1, "Calls": 2, "Transitions": 2,
                "RewardTotals.Name": ["reward"], "RewardTotals.Value": [number / MANY], "AgentNames": ["planner"],
                "PolicyVersions": [number % 7], "FailedToolCalls": number % 5 == 0, "ToolCalls": 1, "Attempts": 1,
                "Failure": "timeout" if number % 10 == 0 else "",
                "IngestedAt": datetime(2026, 1, 1, 0, number // 60, number % 60, tzinfo=UTC)})  # fmt: skip
        # Games of two roles, by two versions.
        for version in (3, 4):
            self._insert("builds", {"RunId": RUN, "Mode": "validate", "BuildSpec": "s", "TaskId": "opening", "RolloutId": f"duel-{version}",
                "GroupId": "duel", "RewardTotals.Name": ["reward"] * 2, "RewardTotals.Role": ["black", "white"], "RewardTotals.Value":
                [3 - version, version - 3], "PolicyVersions": [version], "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC)})  # fmt: skip
        self._flush()

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        self._waiting.setdefault((table, tuple(row)), []).append(list(row.values()))

    def _flush(self) -> None:
        for (table, columns), rows in self._waiting.items():
            self.client.insert(f"spangrad_internal.{table}", rows, column_names=list(columns))
        self._waiting.clear()


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


_OF_PLAYWRIGHT = (
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,LensOverlay,"
    "MediaRouter,PaintHolding,ThirdPartyStoragePartitioning,AvoidCorsURLLoaderRestartOnRedirect,TcpPortRandomizationWin,"
    "OptimizationHints,NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch,msForceBrowserSignIn,"
    "msEdgeUpdateLaunchServicesPreferredVersion"
)
"""Features of Chromium that Playwright disables: of two such options Chromium takes the last."""
# A window without a screen has no address bar, whose two pages Chromium loads all the same; and it keeps a renderer for the next site.
_UNSEEN = "WebUIOmniboxPopup,WebUIOmniboxAimPopup,SpareRendererForSitePerProcess"
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", f"--disable-features={_OF_PLAYWRIGHT},{_UNSEEN}"]


def browsers() -> Iterator[Browser]:
    """Start the browser; a generator for a fixture of a module: while Playwright runs, asynchronous tests cannot."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_OPTIONS)
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
        url = f"{self.url}{path}"
        if urldefrag(self.page.url).url == urldefrag(url).url:
            self.page.goto("about:blank")  # a path that differs by its fragment alone would not be loaded again
        self.page.goto(url, wait_until="load")
        self.page.locator("html[data-ready], form.login").first.wait_for(state="attached")
        return self.page

    def close(self) -> None:
        """Close the tab; fails where something happened that must not."""
        self.context.close()
        assert self.faults == []

    def _note(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)
