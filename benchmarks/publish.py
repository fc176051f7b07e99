"""Benchmark of publishing: seconds from the end of an optimizer step to the first token from the new weights, by stage, with a peer.

In: how many versions, and by which method they come into the engine. Out: a table, and as the last line one JSON object; exit code 1 when
a check fails. Invariant: the demo's whole loop runs as it does in `spangrad demo` (store, vLLM, gateway, builder, trainer, agent: each a
process of its own); clients that know nothing of versions ask the gateway for one token after the other, and the store shows afterwards
which weights sampled each.

Ours: the trainer's own spans give the end of the optimizer step and the duration of each stage, the gateway's response those of the
stages in the engine, a client's clock the time of its first token. The peers, with the same engine and the same weights on the
same disk: starting vLLM with them (`restart`), and vLLM's own endpoints pause, reload, resume, without a checksum, a version or a probe
(`reload`), each until the first token. An adapter's peers are the same around vLLM's own endpoint for adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.scratch import exit_code, scratch
from commands.demo.services import TrainingSupervisor, make_model
from commands.demo.settings import CHECKOUT, demo_settings, write_settings
from runner.runner import Runner
from runner.workers.agents import CallableAgent
from spangrad.client.task_files import read_tasks
from spangrad.processes import Child, answers, own_command, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.store.clickhouse import connect
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.types import Mode
from spangrad.weights.shards import EngineReports, combine
from trainer.publish.publisher import Publisher

EXAMPLE = CHECKOUT / "examples/two_tools"
CHAT = "/v1/chat/completions"
QUESTION = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}], "max_tokens": 1, "temperature": 0}
METHODS = {"disk": "reload", "adapter": "adapter", "transfer": "transfer"}
"""Weight sync method (`trainer.weight_sync.method`) -> name of the stage in which the engine loads the weights."""
LORA_RANK = 8
STAGES = (
    "checkpoint",
    "commit",
    "files",
    "check",
    "pause",
    "take",
    "checksum",
    "update_weight_version",
    "resume",
    "probe",
    "announce",
    "first_token",
)
"""Stages of a publication. `commit`: write to the ledger, and to its copy in the store. `files`: the gateway's checksum of the files.
`check`: check of an adapter's base, while calls go on. `take`: loading by the weight sync method. `announce`: the HTTP around the gateway's
work. `first_token`: from the gateway's response that the version is served to a client's first token from it."""
STEP_SECONDS = 120
_SPANS = """
SELECT toUInt32(root.SpanAttributes['spangrad.trainer.version']) AS version, child.SpanName,
    toUnixTimestamp64Nano(child.Timestamp), toUnixTimestamp64Nano(child.Timestamp) + child.Duration
FROM otel.otel_traces AS root
INNER JOIN otel.otel_traces AS child ON child.TraceId = root.TraceId AND child.ParentSpanId = root.SpanId
WHERE root.ServiceName = 'spangrad-trainer' AND root.SpanName = 'train step'
"""
_REPORTED = """
SELECT count() FROM otel.otel_traces WHERE ServiceName = 'spangrad-trainer' AND SpanName = 'train step'
    AND SpanAttributes['spangrad.trainer.version'] = %(version)s
"""
_METRICS = "SELECT Version, Checksum, Path, Metrics FROM spangrad.policy_versions WHERE BatchId != '' ORDER BY Version"
_CALLS = "SELECT ResponseId, `Versions.Version`[1], `Versions.Version`[-1] FROM spangrad.calls WHERE ResponseId IN %(ids)s"


@dataclass(frozen=True, slots=True)
class Token:
    """First token of a call, as a client receives it."""

    response_id: str
    arrived: int
    """Time at which the token arrived, in nanoseconds since 1970."""


class Client(threading.Thread):
    """Client thread that requests one token after the other."""

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True)
        self.tokens: list[Token] = []
        self.failed = 0
        self._host = host
        self._over = threading.Event()

    def run(self) -> None:
        """Send requests until `end` is called."""
        body = json.dumps({**QUESTION, "stream": True})
        connection = http.client.HTTPConnection(self._host, timeout=60)
        while not self._over.wait(0.002):
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            first = answer.readline()
            arrived = time.time_ns()
            answer.read()
            if answer.status == 200:
                self.tokens.append(Token(json.loads(first.removeprefix(b"data: "))["id"], arrived))
            else:
                self.failed += 1
        connection.close()

    def end(self) -> None:
        """End the requests, and wait for the thread."""
        self._over.set()
        self.join()


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=8, help="steps of the demo's loop")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-sync", choices=METHODS, default="disk", help="trainer.weight_sync.method")
    parser.add_argument("--ranks", type=int, help="measure from shards of so many ranks instead (benchmarks/publish_shards.py)")
    if any(word.partition("=")[0] == "--ranks" for word in sys.argv[1:]):
        from benchmarks import publish_shards

        return publish_shards.main()
    arguments = parser.parse_args()
    with scratch("publish") as directory:
        result = measure(directory / "run", arguments.versions, arguments.group_size, arguments.seed, arguments.weight_sync)
    print(f"{'seconds':24}{'median':>10}{'largest':>10}")
    for name, samples in {"optimizer to first token": result["ours"]["each"], **result["ours"]["each_stage"]}.items():
        print(f"{name:24}{median(samples):>10.3f}{max(samples):>10.3f}")
    for name, seconds in result["peer"]["seconds"].items():
        print(f"peer: {name:18}{seconds:>10.3f}")
    del result["ours"]["each"], result["ours"]["each_stage"]
    print(json.dumps({"benchmark": "publish", "weight_sync": arguments.weight_sync, **result}))
    return exit_code(result["checked"])


def sync_settings(method: str) -> dict[str, object]:
    """Return the settings that a weight sync method needs beside the demo's."""
    chosen: dict[str, object] = {"trainer.weight_sync.method": method}
    if method == "adapter":
        chosen |= {"trainer.lora.rank": LORA_RANK, "trainer.optim.learning_rate": 1e-2, "engine.lora_rank": LORA_RANK}
    return chosen | ({"engine.transfer": "http"} if method == "transfer" else {})


def measure(directory: Path, versions: int, group_size: int, seed: int, method: str = "disk") -> dict[str, Any]:
    """Run the loop for some versions, then the peers on its last one."""
    with fresh_directory(directory) as fresh:
        fresh.clear()
        return _measure(directory, versions, group_size, seed, method)


def _measure(directory: Path, versions: int, group_size: int, seed: int, method: str) -> dict[str, Any]:
    values = demo_settings(directory, seed=seed, group_size=group_size) | sync_settings(method)
    settings = load_settings(values, env={})
    write_settings(directory / "spangrad.toml", explain_settings(values, env={}))
    make_model([sys.executable, str(EXAMPLE / "model.py"), str(directory / "model"), "--seed", str(seed)], directory)
    with TrainingSupervisor(directory, settings, lambda text: print(text, file=sys.stderr)) as services:
        services.start(settings.engine.start_timeout_seconds)
        client = Client(settings.gateway.url.removeprefix("http://"))
        client.start()
        asyncio.run(_train(settings, services, versions))
        _wait_reported(settings, versions)
        client.end()
        served = Publisher(settings.gateway).served("policy")
        reports = _post(settings.gateway.engine_url + "/spangrad/checksum", {"part": "all"})
        held = combine(msgspec.json.decode(reports, type=EngineReports)).checksum
        services.stop("train")  # it sends its last spans before it ends
        figures = read(settings, client.tokens, served, held, client.failed, METHODS[method])
        newest = figures.pop("path")
        reload = peer_reload(settings, newest)
        services.stop("gateway")
        services.stop("engine")
        restart = peer_restart(settings, directory, newest)
    handed_over = figures.pop("handed_over")
    peers = {"restart": restart, "reload": reload}
    return {
        **figures,
        "peer": {"seconds": peers, "from": "a checkpoint on disk"},
        "ratio": {name: round(seconds / handed_over, 2) for name, seconds in peers.items()},
    }


async def _train(settings: Settings, services: TrainingSupervisor, versions: int) -> None:
    agent = CallableAgent("agent:agent", evaluator="task:evaluate", directory=EXAMPLE)
    tasks, publisher = read_tasks(EXAMPLE / "tasks.jsonl"), Publisher(settings.gateway)
    async with Runner(settings, agent) as runner:
        for version in range(1, versions + 1):
            await runner.run(tasks, mode=Mode.TRAIN, group_size=settings.runner.group_size)
            end = time.monotonic() + STEP_SECONDS
            while (publisher.served("policy") or 0) < version:
                services.check()
                if time.monotonic() > end:
                    raise SystemExit(f"version {version} was not served within {STEP_SECONDS} s; see {services.directory}/logs/train.log")
                await asyncio.sleep(0.05)
            print(f"version {version} is served", file=sys.stderr)


def _wait_reported(settings: Settings, version: int) -> None:
    """Wait until the store has the span of a version's step, which the trainer sends after the publication and the ledger's copy."""
    store, names = connect(settings.store), {"version": str(version)}
    try:
        wait_until(
            lambda: store.query(_REPORTED, parameters=names).result_rows[0][0] > 0, STEP_SECONDS, f"the span of version {version}'s step"
        )
    finally:
        store.close()
    time.sleep(1)  # for the last version's first token


def read(settings: Settings, tokens: Sequence[Token], served: int | None, held: str, failed: int, taking: str) -> dict[str, Any]:
    """Read the figures from the store; `taking` is the name of the stage in which the engine loads the weights."""
    client = connect(settings.store)
    names = {"ids": tuple(token.response_id for token in tokens)}
    wait_until(lambda: len(client.query(_CALLS, parameters=names).result_rows) >= len(tokens), 30, "the calls' rows")
    weights = {
        str(response_id): (int(begun), int(ended)) for response_id, begun, ended in client.query(_CALLS, parameters=names).result_rows
    }
    spans: dict[int, dict[str, tuple[int, int]]] = {}
    for version, name, began, ended in client.query(_SPANS).result_rows:
        spans.setdefault(int(version), {})[str(name)] = (int(began), int(ended))
    rows = client.query(_METRICS).result_rows
    client.close()
    by_version = {int(version): dict(metrics) for version, _, _, metrics in rows}
    by_step = [stages_of(spans[step], by_version[step], first_token(tokens, weights, step), taking) for step in sorted(spans)]
    each = [sum(stages.values()) for stages in by_step]
    handed_over = [sum(value for name, value in stages.items() if name not in {"checkpoint", "commit"}) for stages in by_step]
    newest, checksum, path, _ = rows[-1]
    return {
        "ours": {
            "seconds": round(median(each), 4),
            "seconds_max": round(max(each), 4),
            "stages": {name: round(median(stages[name] for stages in by_step), 4) for name in STAGES},
            "versions": len(by_step),
            "tokens": len(tokens),
            "tokens_across_a_reload": sum(begun != ended for begun, ended in weights.values()),
            "each": each,
            "each_stage": {name: [stages[name] for stages in by_step] for name in STAGES},
        },
        "checked": {
            "not_served": int(served != newest),
            "other_weights": int(held != checksum),
            "no_span": len(rows) - len(spans),
            "went_back": went_back(tokens, weights),
            "failed_calls": failed,
        },
        "path": Path(path),
        "handed_over": fmean(handed_over),
    }


def first_token(tokens: Sequence[Token], weights: Mapping[str, tuple[int, int]], version: int) -> int:
    """Return the time of the first token of a version or a newer one, in nanoseconds since 1970."""
    return min(token.arrived for token in tokens if weights[token.response_id][0] >= version)


def went_back(tokens: Sequence[Token], weights: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of tokens from an older version than a previous token; the client sends one call after the other."""
    newest = wrong = 0
    for token in tokens:
        version = weights[token.response_id][0]
        wrong += version < newest
        newest = max(newest, version)
    return wrong


def stages_of(spans: Mapping[str, tuple[int, int]], metrics: Mapping[str, float], arrived: int, taking: str) -> dict[str, float]:
    """Seconds of each of STAGES; their sum is the time from the end of the optimizer step to the first token.

    Args:
        spans: begin and end of the step's stages, in nanoseconds since 1970.
        metrics: the trainer's metrics of the version.
        arrived: time of the first token, in nanoseconds since 1970.
        taking: the trainer's name of the stage `take`.
    """
    trained, checkpoint, publish = spans["train"][1], spans["checkpoint"], spans["publish"]
    engine = {name: metrics[f"seconds_publish_{taking if name == 'take' else name}"] for name in STAGES[2:10]}
    # A client may receive its first token before the gateway has finished its response.
    announced = min(publish[1], arrived)
    return {
        "checkpoint": (checkpoint[1] - trained) / 1e9,
        "commit": (publish[0] - checkpoint[1]) / 1e9,
        **engine,
        "announce": (announced - publish[0]) / 1e9 - sum(engine.values()),
        "first_token": (arrived - announced) / 1e9,
    }


def peer_reload(settings: Settings, path: Path) -> float:
    """Reload the weights with vLLM's endpoints, without checks; return the seconds until the first token."""
    url = settings.gateway.engine_url
    began = time.monotonic()
    _post(url + "/pause?mode=keep", {})
    _post(url + "/reset_prefix_cache?reset_running_requests=true", {})
    _load_weights(settings, path)
    _post(url + "/resume", {})
    _post(url + CHAT, QUESTION)
    return round(time.monotonic() - began, 4)


def _load_weights(settings: Settings, path: Path) -> None:
    """Load the weights with vLLM's own endpoints."""
    url = settings.gateway.engine_url
    if settings.engine.lora_rank:
        _post(url + "/v1/load_lora_adapter", {"lora_name": settings.gateway.policy, "lora_path": str(path), "load_inplace": True})
    else:
        _post(url + "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})


def peer_restart(settings: Settings, directory: Path, path: Path) -> float:
    """Start a new engine with the weights; return the seconds until the first token. Stopping the old engine is not counted."""
    adapter = bool(settings.engine.lora_rank)
    model = str(settings.engine.model if adapter else path)
    config = ["--config", str(directory / "spangrad.toml"), "--model", model, "--set", "engine.warmup_requests=1"]
    began = time.monotonic()
    engine = Child("the engine", own_command("engine", *config), directory / "logs/restarted.log", inherit_settings=False)
    try:
        url = settings.gateway.engine_url
        wait_until(lambda: answers(f"{url}/health"), settings.engine.start_timeout_seconds, "the engine", [engine], poll_seconds=0.05)
        if adapter:
            _load_weights(settings, path)
        _post(url + CHAT, QUESTION)
        return round(time.monotonic() - began, 4)
    finally:
        engine.stop()


def _post(url: str, body: Mapping[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


if __name__ == "__main__":
    sys.exit(main())
