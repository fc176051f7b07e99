"""The page over a million spans and 100,000 rollouts: server time of each view, and a long rollout in a real browser.

In: how many rollouts. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Measured are the requests that a
view makes, one after the other: time at the client, and CPU time of page and store together. The peer is the list asked of the public
table `spangrad.rollouts` in the same store.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

from benchmarks.lookup_data import RUNS, Workload
from benchmarks.page_data import (
    BRANCH,
    HELD_OUT_RUN,
    LONG_BRANCH,
    LONG_CALLS,
    LONG_ROLLOUT,
    LONG_STEPS,
    LONG_TOKENS,
    POLICY,
    TASKS_AGAIN,
    PageWorkload,
)
from benchmarks.scratch import exit_code, scratch
from page.overview import FRESH_SECONDS
from spangrad.client.queue_http import QueueHttp
from spangrad.http.queue_messages import new_rollout
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored

QUEUED = 20_000
"""Rollouts in the queue."""
_ENQUEUED_AT_ONCE = 2000
_SHOWN = ("mean_return", "success", "groups", "rollouts", "grad_norm", "ppo_kl", "staleness_mean", "logprob_gap_p99", "seconds_step")
_SAMPLED_CALLS = """
SELECT c.RolloutKey, b.GroupId, c.TraceId, c.SpanId, toUnixTimestamp64Nano(c.Timestamp)
FROM spangrad_internal.calls AS c INNER JOIN spangrad_internal.builds AS b ON b.RolloutId = c.RolloutKey
WHERE c.RunId = 'run-0' ORDER BY cityHash64(c.SpanId) LIMIT 200
"""
CPU_MS_MOST = 600
"""Limit of the median CPU time of a view's slowest request, page and store together, in milliseconds: 300 ms on two cores."""
_MERGED = ("otel_traces", "rollout_spans", "calls", "builds", "transitions", "trained_calls", "batches")
_PEER = """
SELECT * FROM spangrad.rollouts ORDER BY BuiltAt DESC, RunId DESC, RolloutId DESC, BuildSpec DESC LIMIT 200
"""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Call whose views are asked for."""

    rollout: str
    group: str
    trace: str
    span: str
    nanoseconds: int

    @property
    def place(self) -> str:
        """Return its place as the view of a conversation names it."""
        return f"{self.trace}.{self.span}.0.{self.nanoseconds}"


def main() -> int:
    """Fill a store, then look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=102_400, help="a multiple of 1024; half of them have 20 spans each")
    parser.add_argument("--requests", type=int, default=20, help="requests of each view")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = PageWorkload(Workload(arguments.rollouts, seed=arguments.seed, ordered=True))
    with scratch("page") as directory, _services(directory) as (url, store, queue, children):
        _enqueue(queue)
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
def _services(directory: Path) -> Iterator[tuple[str, str, str, list[Child]]]:
    """Run a store, a queue and a page; yield the URLs of page, store and queue, and their processes."""
    grpc, http, sql, queued, page = free_ports(5)
    (directory / "spangrad.toml").touch()
    config = ["--config", str(directory / "spangrad.toml")]
    store, queue = f"http://127.0.0.1:{sql}", f"http://127.0.0.1:{queued}"
    ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
    commands = {
        "store": own_command("store", *config, "--path", str(directory / "store"), *ports),
        "queue": own_command("queue", *config, "--port", str(queued), "--db", f"sqlite:///{directory}/queue.db"),
        "page": own_command("page", *config, "--port", str(page), "--set", f"store.url={store}", "--set", f"queue.url={queue}"),
    }
    checks = (f"{store}/ping", f"{queue}/healthz", f"http://127.0.0.1:{page}/healthz")
    with ExitStack() as stack:
        children: list[Child] = []
        for (name, command), ready in zip(commands.items(), checks, strict=True):
            child = Child(f"spangrad {name}", command, directory / f"{name}.log", inherit_settings=False)
            stack.callback(child.stop)
            children.append(child)
            wait_until(lambda ready=ready: answers(ready), 60, name, [child])
        yield f"http://127.0.0.1:{page}", store, queue, children


def _enqueue(queue: str) -> None:
    """Put rollouts of two runs into the queue."""
    for first in range(0, QUEUED, _ENQUEUED_AT_ONCE):
        client = QueueHttp(queue, None, f"queued-{first // _ENQUEUED_AT_ONCE % 2}")
        numbers = range(first, first + _ENQUEUED_AT_ONCE)
        client.enqueue([new_rollout("t", 1, f"g{number // 8}", rollout_id=f"queued-{number}") for number in numbers])


def look(url: str, client: Any, workload: PageWorkload, processes: Sequence[int], requests: int, seed: int) -> dict[str, Any]:
    """Ask for every view, compare what must be the same, and ask the peer."""
    order = random.Random(seed)
    calls = [SampledCall(*row) for row in client.query(_SAMPLED_CALLS).result_rows]
    figures = {name: measured(url, paths(order, calls, workload), processes, requests) for name, paths in VIEWS.items()}
    peer = timed(lambda sql: client.query(sql).result_rows, processes, [lambda: _PEER] * max(3, requests // 4))
    listed, after = 0, ""
    while after is not None:
        answer = get(f"{url}/api/rollouts?{urlencode({'after': after})}")
        listed, after = listed + len(answer["rows"]), answer["after"]
    compared = [get(f"{url}{_compared(order, workload)}")["tasks"] for _ in range(3)]
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
            "comparisons_without_a_task": sum(not tasks for tasks in compared) if workload.versions > RUNS * TASKS_AGAIN else 0,
            "steps_missing_in_long_branch": LONG_STEPS - _listed_steps(url),
        },
    }


Paths = Callable[[random.Random, Sequence[SampledCall], PageWorkload], Callable[[], str]]
"""Function from chance, calls and the workload to a function that returns the path of the next request."""


def _call(order: random.Random, calls: Sequence[SampledCall], path: str) -> str:
    call = order.choice(calls)
    return f"{path}?{urlencode({'rollout': call.rollout, 'trace': call.trace, 'span': call.span})}"


def _compared(order: random.Random, workload: PageWorkload) -> str:
    """Return the path of a comparison of two held-out versions with most of their tasks in common."""
    a_run = workload.versions // RUNS
    left = HELD_OUT_RUN * a_run + order.randrange(max(1, a_run - TASKS_AGAIN))
    return f"/api/compare?policy={POLICY}&left={left}&right={left + TASKS_AGAIN}"


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
    "rollout": lambda order, calls, workload: lambda: f"/api/rollout?{urlencode({'id': order.choice(calls).rollout})}",
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
    "rollouts_beside": lambda order, calls, workload: lambda: f"/api/rollouts?run=run-0&group={order.choice(calls).group}&sort=return",
    "beside_advantages": lambda order, calls, workload: (
        lambda: f"/api/beside/advantages?{urlencode([('rollout', call.rollout) for call in order.sample(calls, 8)])}"
    ),
    "rollout_turns": lambda order, calls, workload: lambda: f"/api/rollout/turns?{urlencode({'call': order.choice(calls).place})}",
    "call_texts": lambda order, calls, workload: lambda: _call(order, calls, "/api/call/texts"),
    "call_alternatives": lambda order, calls, workload: lambda: _call(order, calls, "/api/call/alternatives"),
    "training_long": lambda order, calls, workload: lambda: f"/api/training?policy={POLICY}&branch={LONG_BRANCH}",
    "training_steps": lambda order, calls, workload: (
        lambda: f"/api/training/steps?policy={POLICY}&branch={LONG_BRANCH}&metrics={','.join(_SHOWN)}&sort={order.choice(_SHOWN)}"
    ),
    "training_skipped": lambda order, calls, workload: lambda: f"/api/training/skipped?policy={POLICY}&branch={BRANCH}",
    "compare": lambda order, calls, workload: lambda: _compared(order, workload),
    "queue": lambda order, calls, workload: lambda: f"/api/queue?order={order.choice(('newest', 'oldest'))}",
    "queue_filtered": lambda order, calls, workload: lambda: "/api/queue?run=queued-1&state=queued",
    "queue_rollout": lambda order, calls, workload: lambda: f"/api/queue/rollout?id=queued-{order.randrange(QUEUED)}",
    "play": lambda order, calls, workload: lambda: "/api/play/environments",
    "actions": lambda order, calls, workload: lambda: "/api/actions",
    "overview": lambda order, calls, workload: _overview,
}


def _listed_steps(url: str) -> int:
    """Return the number of steps that the table of the long branch has, page by page."""
    steps, after = 0, ""
    while after is not None:
        query = urlencode({"policy": POLICY, "branch": LONG_BRANCH, "sort": "grad_norm", "after": after})
        answer = get(f"{url}/api/training/steps?{query}")
        steps, after = steps + len(answer["rows"]), answer["after"]
    return steps


def measured(url: str, path: Callable[[], str], processes: Sequence[int], requests: int) -> dict[str, float]:
    """Return figures of so many requests; the first is not counted."""
    get(f"{url}{path()}")
    return timed(lambda address: get(f"{url}{address}"), processes, [path] * requests)


def timed(work: Callable[[str], object], processes: Sequence[int], arguments: Sequence[Callable[[], str]]) -> dict[str, float]:
    """Return median and p95 (nearest rank) of the time of a function, and the mean CPU time of processes, in milliseconds."""
    seconds, before = list[float](), _cpu_seconds(processes)
    for argument in arguments:
        value = argument()
        begin = time.perf_counter()
        work(value)
        seconds.append(time.perf_counter() - begin)
    cpu = (_cpu_seconds(processes) - before) / len(arguments)
    ordered = sorted(seconds)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
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
