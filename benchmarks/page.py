"""The page over a million spans and 100,000 rollouts: server time of each view, and a long rollout in a real browser.

In: how many rollouts. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Measured are the requests that a
view makes, one after the other: time at the client, and CPU time of page and store together. The peer is the list asked of the public
table `spangrad.rollouts` in the same store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

from benchmarks.lookup_data import Workload
from benchmarks.page_data import BRANCH, LONG_CALLS, LONG_ROLLOUT, LONG_TOKENS, POLICY, PageWorkload
from benchmarks.scratch import exit_code, scratch
from page.overview import FRESH_SECONDS
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored

CPU_MS_MOST = 600
"""Limit of the median CPU time of a view's slowest request, page and store together, in milliseconds: 300 ms on two cores."""
_MERGED = ("otel_traces", "rollout_spans", "calls", "builds", "transitions", "trained_calls", "batches")
_PEER = """
SELECT * FROM spangrad.rollouts ORDER BY BuiltAt DESC, RunId DESC, RolloutId DESC, BuildSpec DESC LIMIT 200
"""


def main() -> int:
    """Fill a store, then look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=102_400, help="a multiple of 1024; half of them have 20 spans each")
    parser.add_argument("--requests", type=int, default=20, help="requests of each view")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = PageWorkload(Workload(arguments.rollouts, seed=arguments.seed, ordered=True))
    with scratch("page") as directory, _services(directory) as (url, store, children):
        client = connect(StoreSettings(url=store))
        for statement in workload.statements():
            client.command(statement)
        for table in _MERGED:
            client.command(f"OPTIMIZE TABLE {stored(table)} FINAL")
        result = look(url, client, workload, [child.process.pid for child in children], arguments.requests, arguments.seed)
        result["ours"] |= in_browser(url)
        client.close()
    result["checked"]["views_over_cpu_limit"] = sum(figures["cpu_ms"] > CPU_MS_MOST for figures in result["ours"]["views"].values())
    for name, figures in result["ours"]["views"].items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
    print(json.dumps(result))
    return exit_code(result["checked"])


@contextmanager
def _services(directory: Path) -> Iterator[tuple[str, str, list[Child]]]:
    """Run a store and a page; yield the URLs of both and their processes."""
    grpc, http, sql, page = free_ports(4)
    (directory / "spangrad.toml").touch()
    config = ["--config", str(directory / "spangrad.toml")]
    store = f"http://127.0.0.1:{sql}"
    ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
    commands = {
        "store": own_command("store", *config, "--path", str(directory / "store"), *ports),
        "page": own_command("page", *config, "--port", str(page), "--set", f"store.url={store}"),
    }
    with ExitStack() as stack:
        children: list[Child] = []
        for (name, command), ready in zip(commands.items(), (f"{store}/ping", f"http://127.0.0.1:{page}/healthz"), strict=True):
            child = Child(f"spangrad {name}", command, directory / f"{name}.log", inherit_settings=False)
            stack.callback(child.stop)
            children.append(child)
            wait_until(lambda ready=ready: answers(ready), 60, name, [child])
        yield f"http://127.0.0.1:{page}", store, children


def look(url: str, client: Any, workload: PageWorkload, processes: Sequence[int], requests: int, seed: int) -> dict[str, Any]:
    """Ask for every view, compare what must be the same, and ask the peer."""
    order = random.Random(seed)
    calls = client.query(
        "SELECT RolloutKey, TraceId, SpanId FROM spangrad_internal.calls WHERE RunId = 'run-0' ORDER BY cityHash64(SpanId) LIMIT 200"
    ).result_rows
    figures = {name: measured(url, paths(order, calls, workload), processes, requests) for name, paths in VIEWS.items()}
    peer = timed(lambda sql: client.query(sql).result_rows, processes, [lambda: _PEER] * max(3, requests // 4))
    listed, after = 0, ""
    while after is not None:
        answer = get(f"{url}/api/rollouts?{urlencode({'after': after})}")
        listed, after = listed + len(answer["rows"]), answer["after"]
    first = [(row["RunId"], row["RolloutId"]) for row in get(f"{url}/api/rollouts")["rows"]]
    public = [tuple(row) for row in client.query(_PEER.replace("*", "RunId, RolloutId", 1)).result_rows]
    long_rollout = get(f"{url}/api/rollout?{urlencode({'id': LONG_ROLLOUT})}")
    tokens = sum(call["promptTokens"] + call["responseTokens"] for span in long_rollout["spans"] for call in span["calls"])
    spans = client.query("SELECT count() FROM otel.otel_traces").result_rows[0][0]
    return {
        "benchmark": "page",
        "rollouts": workload.rollouts,
        "spans": spans,
        "ours": {"p95_ms": max(view["p95_ms"] for view in figures.values()), "views": figures},
        "peer": peer,
        "ratio": {"cpu": round(peer["cpu_ms"] / figures["rollouts"]["cpu_ms"], 1)},
        "checked": {
            "rollouts_missing_in_list": workload.rollouts - listed,
            "rollouts_missing_in_numbers": workload.rollouts - get(f"{url}/api/rollouts/numbers")["Count"],
            "rows_unlike_public_table": sum(row != other for row, other in zip(first, public, strict=True)),
            "tokens_missing_in_long_rollout": LONG_CALLS * LONG_TOKENS - tokens,
        },
    }


Paths = Callable[[random.Random, Sequence[tuple[str, str, str]], PageWorkload], Callable[[], str]]
"""Function from chance, calls and the workload to a function that returns the path of the next request."""


def _call(order: random.Random, calls: Sequence[tuple[str, str, str]], path: str) -> str:
    return f"{path}?{urlencode(dict(zip(('rollout', 'trace', 'span'), order.choice(calls), strict=True)))}"


def _overview() -> str:
    """Return the path once the last overview is too old to be shown again."""
    time.sleep(FRESH_SECONDS)
    return "/api/overview"


VIEWS: dict[str, Paths] = {
    "rollouts": lambda order, calls, workload: lambda: "/api/rollouts",
    "rollouts_sorted": lambda order, calls, workload: lambda: f"/api/rollouts?sort={order.choice(('return', 'tokens', 'seconds'))}",
    "rollouts_filtered": lambda order, calls, workload: lambda: f"/api/rollouts?run=run-0&text=task-{order.randrange(997)}&failed_tool=yes",
    "rollouts_numbers": lambda order, calls, workload: lambda: "/api/rollouts/numbers",
    "rollouts_choices": lambda order, calls, workload: lambda: "/api/rollouts/choices",
    "rollout": lambda order, calls, workload: lambda: f"/api/rollout?{urlencode({'id': order.choice(calls)[0]})}",
    "long_rollout": lambda order, calls, workload: lambda: f"/api/rollout?{urlencode({'id': LONG_ROLLOUT})}",
    "call": lambda order, calls, workload: lambda: _call(order, calls, "/api/call"),
    "span": lambda order, calls, workload: lambda: _call(order, calls, "/api/span"),
    "training": lambda order, calls, workload: lambda: "/api/training",
    "version": lambda order, calls, workload: (
        lambda: f"/api/version?policy={POLICY}&branch={BRANCH}&version={1 + order.randrange(max(1, workload.versions // 4))}"
    ),
    "rollouts_searched": lambda order, calls, workload: lambda: "/api/rollouts?run=run-0&contents=no+span+has+this",
    "lanes": lambda order, calls, workload: (
        lambda: f"/api/lanes?policy={POLICY}&branch={BRANCH}&newest={1 + order.randrange(workload.versions)}&steps=8"
    ),
    "actions": lambda order, calls, workload: lambda: "/api/actions",
    "overview": lambda order, calls, workload: _overview,
}


def measured(url: str, path: Callable[[], str], processes: Sequence[int], requests: int) -> dict[str, float]:
    """Return figures of so many requests; the first is not counted."""
    get(f"{url}{path()}")
    return timed(lambda address: get(f"{url}{address}"), processes, [path] * requests)


def timed(work: Callable[[str], object], processes: Sequence[int], arguments: Sequence[Callable[[], str]]) -> dict[str, float]:
    """Return median and p95 of the time of a function, and the mean CPU time of processes, in milliseconds."""
    seconds, before = list[float](), _cpu_seconds(processes)
    for argument in arguments:
        value = argument()
        begin = time.perf_counter()
        work(value)
        seconds.append(time.perf_counter() - begin)
    cpu = (_cpu_seconds(processes) - before) / len(arguments)
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50_ms": round(median(seconds) * 1000, 1), "p95_ms": round(p95 * 1000, 1), "cpu_ms": round(cpu * 1000, 1)}


def get(url: str) -> Any:
    """Return the JSON of a GET."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.load(answer)


def in_browser(url: str) -> dict[str, float | None]:
    """Return times of the system's Chromium, in milliseconds; None where there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return dict.fromkeys(("first_paint_ms", "long_rollout_ms", "longest_scroll_task_ms"))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"{url}/rollouts")
        page.locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.evaluate(_WATCH_TASKS)
        for _ in range(40):
            page.evaluate("document.getElementById('list').scrollTop += 1500")
            page.wait_for_timeout(20)
        longest = page.evaluate("Math.max(0, ...longTasks)")
        begin = time.perf_counter()
        page.goto(f"{url}/rollout?id={LONG_ROLLOUT}")
        page.locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
        opened = time.perf_counter() - begin
        browser.close()
    return {"first_paint_ms": round(paint), "long_rollout_ms": round(opened * 1000), "longest_scroll_task_ms": round(longest)}


_WATCH_TASKS = """
() => {
    window.longTasks = [];
    new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
}
"""


def _cpu_seconds(processes: Sequence[int]) -> float:
    fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(stat[11]) + int(stat[12]) for stat in fields) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
