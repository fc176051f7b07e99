"""Benchmark of publishing from shards: seconds from a step's end until an engine of several workers serves its weights, with a peer.

In: numbers of trainer ranks, of the engine's workers and of parameters. Out: a table, and as the last line one JSON object; exit code 1
when a check fails. Invariant: trainer ranks (gloo, FSDP2), vLLM and gateway are real, and each a process of its own; both methods step
the same ranks, and publish through the same gateway into the same engine, with every word compared.

Ours: workers fetch their words from all ranks, first all of them, then what a step changed. The peer is the method that this replaced
(`trainer/optim/rank.py` before commit 6c325f89): at each step the first rank gathers all weights and moments and writes them, the weights
into one file, of which the ledger's checksum is taken and which each worker reads. `weights_alone` leaves the moments to another time, as
durable state is now. Outside the clock: the step, the ledger, and for ours the checksum to compare with. No file is synced to the disk.
Memory is a rank's resident set, as Linux counts it: the peak while it publishes, less what it had after its steps before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.random_model import write_model
from benchmarks.scratch import exit_code, scratch
from commands.demo.settings import write_settings
from spangrad.processes import Child, free_ports, own_command, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from spangrad.weights.shards import EngineReports, combine
from trainer.publish.offers import WeightSource
from trainer.publish.publisher import Publisher
from trainer.publish.sender import WeightsSender

DTYPE = "bfloat16"
WORD_BYTES = 2
MOST_MEMORY = 1.3
"""Memory that a rank may take to publish, in shares of the weights in the engine's dtype."""
LEAST_RATIO = 4
"""Times that ours is to be faster than the peer."""
RATE = 1e-6
_WAIT_SECONDS = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes of the trainer")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="workers of the engine")
    parser.add_argument("--parameters", default="200M", help="parameters of the model, about: 200M, 1.5B")
    parser.add_argument("--versions", type=int, default=3, help="versions by each method")
    parser.add_argument("--learning-rate", type=float, default=RATE, help="AdamW's, with random gradients")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    with scratch("publish-shards") as directory:
        size = number_of(chosen.parameters)
        result = measure(directory, chosen.ranks, chosen.tensor_parallel, size, chosen.versions, chosen.learning_rate)
    print(f"{'seconds':24}{'median':>10}{'largest':>10}")
    for name, samples in result.pop("each").items():
        print(f"{name:24}{median(samples):>10.3f}{max(samples):>10.3f}")
    print(json.dumps({"benchmark": "publish_shards", **result}))
    return exit_code(result["checked"])


def number_of(text: str) -> int:
    """Return a number of parameters such as 200M."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9}
    return int(float(text[:-1]) * scale[text[-1].upper()]) if text[-1].upper() in scale else int(text)


def sizes_of(parameters: int) -> dict[str, int]:
    """Return width, layers and words of a model of about so many parameters."""
    hidden = max(128, 128 * round(8 * (parameters / 200e6) ** (1 / 3)))
    words = max(256, min(16000, parameters // (12 * hidden)))
    layer = 3 * hidden * hidden + 12 * hidden * hidden
    return {"hidden": hidden, "layers": max(1, round((parameters - 2 * words * hidden) / layer)), "words": words}


def measure(directory: Path, ranks: int, workers: int, parameters: int, versions: int, rate: float) -> dict[str, Any]:
    """Run all publications."""
    from benchmarks.publish_ranks import TrainerRanks

    model, sizes = directory / "model", sizes_of(parameters)
    writer = multiprocessing.get_context("spawn").Process(target=_write_model, args=(model, sizes))  # it holds the whole model
    writer.start()
    writer.join()
    settings = _settings(directory, model, workers)
    with TrainerRanks(ranks, model) as trainer, _served(directory, settings, workers):
        sender = WeightsSender(settings.trainer)
        run = _Run(directory, settings, trainer, Publisher(settings.gateway, sender=sender), rate)
        trainer.step(rate, 0)  # AdamW's moments are there from its first step on
        for _ in range(versions):
            run.ours("full")
            run.ours("delta")
            run.gathered("peer", moments=True)
            run.gathered("weights_alone", moments=False)
        sender.close()
        return run.result(sizes, workers)


class _Run:
    """Publications of one run, and their figures."""

    def __init__(self, directory: Path, settings: Settings, trainer: Any, publisher: Publisher, rate: float) -> None:
        self._directory, self._settings, self._trainer, self._publisher, self._rate = directory, settings, trainer, publisher, rate
        self._version = 0
        self.seconds: dict[str, list[float]] = {"full": [], "delta": [], "peer": [], "weights_alone": []}
        self.stages: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in self.seconds}
        self.bytes: dict[str, list[int]] = {"full": [], "delta": []}
        self.changed: list[float] = []
        self.taken: list[list[int]] = []
        self.words = 0
        self.checked = {"other_weights": 0, "not_as_meant": 0, "memory": 0, "whole_model": 0, "not_served": 0}

    def ours(self, kind: str) -> None:
        """Step, and publish from the ranks; `kind` is what the workers are to be sent."""
        self._step()
        path = self._directory / f"v{self._version}"
        self._trainer.gather(path)  # only to know what is right
        checksum = checksum_directory(path)
        before = [memory.resident for memory in self._trainer.memory(reset=True)]
        source = WeightSource(_never, lambda: self._trainer.addresses)
        began = time.monotonic()
        self._publisher.publish(PolicyVersion("policy", self._version, self._version - 1, "", checksum, str(path)), weights=source)
        self.seconds[kind].append(time.monotonic() - began)
        self.stages[kind].append(dict(self._publisher.stages))
        after = self._trainer.memory()
        # The first publication takes the copy that later ones have already.
        self.taken.append([memory.peak - own for memory, own in zip(after, before, strict=True)])
        sent = self._publisher.sent
        self.bytes[kind].append(sum(sent.values()))
        self.checked["not_as_meant"] += int(not sent[kind])
        self.words = sum(memory.share for memory in after) // 4
        share = [memory.share // 4 * WORD_BYTES for memory in after]
        self.checked["memory"] += sum(taken > MOST_MEMORY * own for taken, own in zip(self.taken[-1], share, strict=True))
        self.checked["whole_model"] += sum(taken >= self.words * WORD_BYTES for taken in self.taken[-1])
        self._check(path)

    def gathered(self, kind: str, *, moments: bool) -> None:
        """Step, gather all weights into one file, take its checksum, and publish that; `moments`: gather and write AdamW's, too."""
        self._step()
        path = self._directory / f"v{self._version}"
        began = time.monotonic()
        self._trainer.gather(path, moments=moments)
        written = time.monotonic()
        checksum = checksum_directory(path)
        summed = time.monotonic()
        self._publisher.publish(PolicyVersion("policy", self._version, self._version - 1, "", checksum, str(path)))
        self.seconds[kind].append(time.monotonic() - began)
        self.stages[kind].append({"gather": written - began, "checksum": summed - written, **self._publisher.stages})
        self._check(path)

    def result(self, sizes: Mapping[str, int], workers: int) -> dict[str, Any]:
        """Return the figures."""
        middle = {name: median(samples) for name, samples in self.seconds.items()}
        sent = {name: int(median(samples)) for name, samples in self.bytes.items()}
        names = {kind: list(stages[-1]) for kind, stages in self.stages.items()}
        shares = [memory.share // 4 * WORD_BYTES for memory in self._trainer.memory()]
        ratio = middle["peer"] / middle["delta"]
        taken = [[round(own / share, 3) for own, share in zip(each, shares, strict=True)] for each in self.taken]
        return {
            "ours": {
                "seconds": round(middle["delta"], 3),
                "seconds_full": round(middle["full"], 3),
                "bytes_full": sent["full"],
                "bytes_delta": sent["delta"],
                "changed_words": round(median(self.changed), 5),
                "memory_of_share": max(max(each) for each in taken),
                "stages": {kind: self._stages(kind, names[kind]) for kind in ("full", "delta")},
            },
            "peer": {
                "seconds": round(middle["peer"], 3),
                "seconds_weights_alone": round(middle["weights_alone"], 3),
                "method": "gather to one file",
                "stages": {kind: self._stages(kind, names[kind]) for kind in ("peer", "weights_alone")},
            },
            "ratio": {
                "seconds": round(ratio, 2),
                "seconds_full": round(middle["peer"] / middle["full"], 2),
                "seconds_weights_alone": round(middle["weights_alone"] / middle["delta"], 2),
                "bytes": round(sent["full"] / max(1, sent["delta"]), 1),
            },
            "checked": {**self.checked, "gains_little": int(ratio < LEAST_RATIO)},
            "size": {"ranks": len(shares), "workers": workers, "parameters": self.words, **sizes, "learning_rate": self._rate},
            "each": self.seconds,
        }

    def _stages(self, kind: str, names: Sequence[str]) -> dict[str, float]:
        return {name: round(median(stages.get(name, 0.0) for stages in self.stages[kind]), 3) for name in names}

    def _step(self) -> None:
        self._version += 1
        self.changed.append(self._trainer.step(self._rate, self._version))

    def _check(self, path: Path) -> None:
        reports = _post(self._settings.gateway.engine_url + "/spangrad/checksum", {"part": "all"})
        held = combine(msgspec.json.decode(reports, type=EngineReports)).checksum
        self.checked["other_weights"] += int(held != checksum_directory(path, DTYPE))
        self.checked["not_served"] += int(self._publisher.served("policy") != self._version)
        shutil.rmtree(path)


def _never() -> Iterator[Any]:
    raise AssertionError("weights were gathered")


def _write_model(directory: Path, sizes: Mapping[str, int]) -> None:
    write_model(directory, **sizes, seed=0)


def _settings(directory: Path, model: Path, workers: int) -> Settings:
    engine, gateway, store = free_ports(3)
    values: dict[str, object] = {
        "engine.model": str(model),
        "engine.port": engine,
        "engine.dtype": DTYPE,
        "engine.max_model_len": 256,
        "engine.enforce_eager": True,
        "engine.kv_cache_bytes": 2**26,
        "engine.cache_dir": str(directory / "cache"),
        "engine.transfer": "http",
        "engine.warmup_requests": 1,
        "engine.start_timeout_seconds": _WAIT_SECONDS,
        "engine.extra_args": ["--tensor-parallel-size", str(workers)],
        "gateway.port": gateway,
        "gateway.url": f"http://127.0.0.1:{gateway}",
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "gateway.spill_path": str(directory / "spill"),
        "gateway.request_timeout_seconds": _WAIT_SECONDS,
        "store.otlp_endpoint": f"http://127.0.0.1:{store}",  # no store: nothing that is measured needs one
        "trainer.weight_sync.method": "transfer",
    }
    write_settings(directory / "spangrad.toml", explain_settings(values, env={}))
    return load_settings(values, env={})


@contextmanager
def _served(directory: Path, settings: Settings, workers: int) -> Generator[None]:
    """Run an engine and a gateway before it."""
    config = ["--config", str(directory / "spangrad.toml")]
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers)))} if workers > 1 else {}
    engine = Child("the engine", own_command("engine", *config), directory / "engine.log", threads, inherit_settings=False)
    gateway = Child("the gateway", own_command("gateway", *config), directory / "gateway.log", inherit_settings=False)
    try:
        ready = f"{settings.gateway.url}/readyz"
        wait_until(lambda: _get(ready).get("status") == "serving", _WAIT_SECONDS, "the gateway", [engine, gateway], poll_seconds=0.2)
        yield
    finally:
        gateway.stop()
        engine.stop()


def _get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())
    except OSError:
        return {}


def _post(url: str, body: Mapping[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_WAIT_SECONDS) as answer:
        return answer.read()


if __name__ == "__main__":
    sys.exit(main())
