"""Benchmark of affinity: prompt tokens that two engines compute for rollouts of several turns, with and without their engine kept.

In: how many rollouts, turns and tokens. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant: the
engines are vLLM with its prefix cache, the gateway is the real one, both variants send the same numbers of tokens, and the figures are
vLLM's own counters.

Each turn's prompt is the one before, its response, and new tokens. Ours names the rollout in the URL, as agents of the runner do, so that
the gateway sends its calls to the engine that holds their prefix. The peer sends the same calls without a name: each goes to the least busy
engine, as from a balancer that knows of no rollouts. A new rollout for each variant: nothing of one is in the other's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.engines import get, start_engine, start_service, wait_for_engines
from benchmarks.random_model import write_model
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, wait_until

WORDS = 2000
ENGINES = 2
RESPONSE_TOKENS = 8
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-tokens", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--turn-tokens", type=int, default=128, help="new tokens of each later prompt")
    given = parser.parse_args()
    with scratch("affinity") as directory:
        result = measure(directory, given.rollouts, given.at_once, given.turns, (given.first_tokens, given.turn_tokens))
    print(f"{'':24}{'ours':>12}{'peer':>12}")
    for name, value in result["ours"].items():
        print(f"{name:24}{value:>12}{result['peer'][name]:>12}")
    print(json.dumps({"benchmark": "affinity", **result}))
    return exit_code(result["checked"])


def measure(directory: Path, rollouts: int, at_once: int, turns: int, tokens: tuple[int, int]) -> dict[str, Any]:
    """Return figures of both variants, and counts that must be 0."""
    model = directory / "model"
    write_model(model, hidden=128, layers=2, words=WORDS, seed=0)
    with ExitStack() as stack:
        engines = _start_engines(model, directory, stack)
        gateway = _start_gateway(engines, directory, stack)
        figures, failed, idle = dict[str, dict[str, float]](), 0, 0
        for variant in ("peer", "ours"):
            before, began = [counters(get(f"{url}/metrics")) for url in engines], time.monotonic()
            failed += asyncio.run(_play(gateway, variant, rollouts, at_once, turns, tokens))
            seconds = time.monotonic() - began
            parts = [_difference(counters(get(f"{url}/metrics")), old) for url, old in zip(engines, before, strict=True)]
            idle += sum(part["queries"] == 0 for part in parts)
            figures[variant] = summary(parts, seconds)
    ours, peer = figures["ours"], figures["peer"]
    ratios = {name: round(peer[name] / ours[name], 2) for name in ("computed_tokens", "seconds")}
    other_prompts = int(ours["prompt_tokens"] != peer["prompt_tokens"])
    return {**figures, "ratio": ratios, "checked": {"failed_calls": failed, "idle_engines": idle, "other_prompts": other_prompts}}


def counters(metrics: str) -> dict[str, float]:
    """Return vLLM's counters of prompt tokens that were looked up in the prefix cache, and of those that were there."""
    values = {name: float(value) for name, value in _COUNTER.findall(metrics)}
    return {name: values.get(name, 0.0) for name in ("queries", "hits")}


def summary(parts: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """Return the figures of a variant from the counters of its engines."""
    queries, hits = (sum(part[name] for part in parts) for name in ("queries", "hits"))
    return {
        "prompt_tokens": queries,
        "cached_tokens": hits,
        "computed_tokens": queries - hits,
        "hit_rate": round(hits / queries, 3),
        "seconds": round(seconds, 1),
    }


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items()}


async def _play(gateway: str, variant: str, rollouts: int, at_once: int, turns: int, tokens: tuple[int, int]) -> int:
    """Play rollouts; return the number of calls that failed."""
    slots = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def rollout(number: int) -> int:
            draw, prompt, failed = random.Random(f"{variant} {number}"), list[int](), 0
            path = f"/rollout/r{number}/attempt/0" if variant == "ours" else ""
            async with slots:
                for turn in range(turns):
                    prompt += [draw.randrange(20, WORDS) for _ in range(tokens[turn > 0])]
                    body = {"model": "policy", "prompt": prompt, "max_tokens": RESPONSE_TOKENS, "ignore_eos": True}
                    async with session.post(f"{gateway}{path}/v1/completions", json={**body, "return_token_ids": True}) as response:
                        answer = await response.json()
                        failed += response.status != 200
                    prompt = prompt + (answer["choices"][0]["token_ids"] if response.status == 200 else [0] * RESPONSE_TOKENS)
            return failed

        return sum(await asyncio.gather(*(rollout(number) for number in range(rollouts))))


def _start_engines(model: Path, directory: Path, stack: ExitStack) -> list[str]:
    urls, children = list[str](), list[Child]()
    for number in range(ENGINES):
        cache, log = directory / f"vllm-cache-{number}", directory / f"engine-{number}.log"
        child, url = start_engine(model, cache, log, stack, dtype="float32", max_model_len=4096, kv_cache_bytes=256 * 2**20)
        children.append(child)
        urls.append(url)
    wait_for_engines(urls, children)
    return urls


def _start_gateway(engines: Sequence[str], directory: Path, stack: ExitStack) -> str:
    (port,) = free_ports(1)
    settings = {
        "gateway.port": port,
        "gateway.engine_url": engines[0],
        "gateway.backends": json.dumps([{"url": url} for url in engines[1:]]),
        "gateway.spill_path": directory / "spill",
    }
    child = start_service("gateway", settings, directory / "gateway.log", stack)
    url = f"http://127.0.0.1:{port}"

    def all_serve() -> bool:
        states = json.loads(get(f"{url}/admin/backends"))["backends"]
        return [backend["status"] for backend in states] == ["serving"] * len(engines)

    wait_until(lambda: answers(f"{url}/readyz") and all_serve(), 120, "the gateway's engines", [child], poll_seconds=0.2)
    return url


if __name__ == "__main__":
    sys.exit(main())
