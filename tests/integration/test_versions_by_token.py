"""Calls longer than the time between two publications: each token has the version that sampled it, and all are trained.

A real vLLM and a real gateway publish a version after the other while calls of several routes go on; then every recorded logprob is
computed again with the weights that its label names, and the trainer takes the rollouts.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.two_tools.model import random_llama
from spangrad.processes import wait_until
from spangrad.settings import BuilderSettings, Settings, StoreSettings, TrainerSettings
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from tests.support.policies import Reference, perturbed, trainer_settings
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, running_engine, running_gateway
from tests.support.servers import client_of, running_store, store_settings
from tests.support.spans import SpanFactory
from trainer.data.source import BatchRollout, Group
from trainer.ledger.ledger import Ledger
from trainer.run import train
from transition_builder.loop import build_once

pytestmark = pytest.mark.vllm

SLOW_STEPS = Path(__file__).parents[1] / "programs/slow_steps.py"
RUN = "crossing"
NEWEST = 5
GAP_SECONDS = 0.25
"""Between the end of a publication and the next."""
TOKENS = 240
EXACT = 5e-4
"""Nats: vLLM's logprobs in float32 agree with transformers' within this; those of the next version rarely do."""
TALK = [{"role": "user", "content": "say rome"}]
LONG = {"model": "policy", "temperature": 1.0, "ignore_eos": True}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**LONG, "messages": TALK, "max_tokens": TOKENS}),
    ("/v1/chat/completions", {**LONG, "messages": TALK, "max_tokens": TOKENS, "stream": True}),
    ("/v1/chat/completions", {**LONG, "messages": TALK, "max_tokens": TOKENS, "stream": True, "n": 2}),
    ("/v1/completions", {**LONG, "prompt": "say rome", "max_tokens": TOKENS, "n": 2}),
    ("/v1/completions", {**LONG, "prompt": ["say rome", "say lima"], "max_tokens": TOKENS, "stream": True}),
    ("/v1/responses", {**LONG, "input": "say rome", "max_output_tokens": TOKENS}),
    ("/v1/responses", {**LONG, "input": "say rome", "max_output_tokens": TOKENS, "stream": True}),
    ("/v1/messages", {"model": "policy", "temperature": 1.0, "messages": TALK, "max_tokens": TOKENS}),
]
"""A rollout each. Messages know no `ignore_eos`: such calls are short, and there are many."""
STREAMED = ROUTES[1][1]


@dataclass(frozen=True)
class World:
    """Directories of the versions, and who serves and stores."""

    settings: Settings
    models: dict[int, Path]
    store: StoreSettings

    def rows(self, query: str) -> list[dict[str, Any]]:
        return list(client_of(self.store).query(query).named_results())


@dataclass
class Times:
    """Times at which calls began and ended, and publications ended."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    publications: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An engine that serves version 0, a gateway and a store of their own; versions 1 to NEWEST wait on disk."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("crossing")
    first = random_model(tiny_model, directory / "v0")
    models = {version: perturbed(first, directory / f"v{version}", 1 + 0.01 * version) for version in range(1, NEWEST + 1)}
    store = store_settings(directory / "store")
    cache = directory / "cache"
    (cache / "python").mkdir(parents=True)
    (cache / "python" / SLOW_STEPS.name).symlink_to(SLOW_STEPS)
    slow = ("--logits-processors", f"{SLOW_STEPS.stem}:SlowSteps")
    engine = engine_settings(first, cache, max_model_len=TOKENS + 40, extra_args=slow)
    with running_store(store, directory / "store.log"), running_engine(engine, directory / "engine.log"):
        settings = gateway_settings(engine, store, spill_path=directory / "spill")
        with running_gateway(settings, directory / "gateway.log"):
            yield World(settings, {0: first, **models}, store)


def random_model(tokenizer_of: Path, directory: Path) -> Path:
    """Make a model whose versions differ in each token's logprob."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    random_llama(tokenizer, hidden=384, spread=0.05, tied=False).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def call(url: str, body: dict[str, Any]) -> None:
    """Ask, and read the answer to its end."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
        answer.read()


def roll_out(world: World, number: int, over: threading.Event, times: Times, calls: dict[str, int]) -> None:
    """Make the calls of a rollout, one after the other until all versions are published."""
    path, body = ROUTES[number]
    prefix = f"{world.settings.gateway.url}/rollout/{rollout(number)}/attempt/0"
    announced = {"rollout_id": rollout(number), "attempt": 0, "run_id": RUN, "mode": "train"}
    httpx.post(f"{world.settings.gateway.url}/attempts", json={"attempts": [announced]}, timeout=30).raise_for_status()
    while not over.is_set():
        began = time.monotonic()
        call(prefix + path, body)
        calls[rollout(number)] = calls.get(rollout(number), 0) + 1
        if path != "/v1/messages":
            times.calls.append((began, time.monotonic()))


def rollout(number: int) -> str:
    return f"crossing-{number}"


def publish_all(world: World, times: Times) -> None:
    """Publish each version, as soon as the one before has been served for a while."""
    for version in range(1, NEWEST + 1):
        time.sleep(GAP_SECONDS)
        path = world.models[version]
        assert publish(world, path, version)["version"] == version
        times.publications.append(time.monotonic())


checksum = cache(checksum_directory)


def publish(world: World, path: Path, version: int, **more: str) -> dict[str, Any]:
    body = {"version": version, "path": str(path), "checksum": checksum(path), **more}
    return fetch(f"{world.settings.gateway.url}/admin/policies/policy/versions", body)


def reward(world: World, calls: dict[str, int]) -> None:
    """End the rollouts: a root and a reward each, in two groups."""
    spans = SpanFactory(run=RUN)
    for number in range(len(ROUTES)):
        facts = {"GroupId": f"g{number % 2}", "GroupSize": len(ROUTES) // 2}
        root = spans.root(rollout(number), calls=calls[rollout(number)], **facts)
        spans.evaluation(root, float(number % 4 < 2))
    headers = {"content-type": "application/json"}
    httpx.post(f"{world.store.otlp_endpoint}/v1/traces", content=spans.otlp(), headers=headers, timeout=30).raise_for_status()


def commit_versions(world: World, settings: TrainerSettings) -> None:
    """Enter the versions that were published as another branch's, which the trainer's goes on from."""
    ledger = Ledger(settings.directory, settings.policy, "published")
    facts = {name: {"checksum": checksum_directory(path), "path": str(path)} for name, path in world.models.items()}
    tokenizer = tokenizer_hash(world.models[0])
    try:
        ledger.register_initial(**facts[0], tokenizer_hash=tokenizer, run_id=RUN)
        for version in range(1, NEWEST + 1):
            lease = ledger.begin([BatchRollout(Group("earlier", "train", "spec", "g"), f"earlier-{version}", 0, 0)])
            assert lease is not None
            assert lease.version == version
            ledger.commit(lease, **facts[version], tokenizer_hash=tokenizer, metrics={})
    finally:
        ledger.close()


def test_calls_longer_than_publications_have_exact_versions_and_train(world: World, tmp_path: Path) -> None:
    for path, body in ROUTES:  # what a route loads at its first call would let its long call begin after all others
        call(world.settings.gateway.url + path, {**body, **dict.fromkeys(body.keys() & {"max_tokens", "max_output_tokens"}, 1)})
    times, calls, over = Times(), dict[str, int](), threading.Event()
    callers = [threading.Thread(target=roll_out, args=(world, number, over, times, calls)) for number in range(len(ROUTES))]
    for caller in callers:
        caller.start()
    publish_all(world, times)
    over.set()
    for caller in callers:
        caller.join()
    between = statistics.median(np.diff(times.publications))
    assert statistics.median(end - began for began, end in times.calls) > between, (times.calls, between)

    query = "SELECT * FROM spangrad.calls WHERE RolloutKey LIKE 'crossing-%'"
    choices = sum(calls[rollout(number)] * choices_of(body) for number, (_, body) in enumerate(ROUTES))
    wait_until(lambda: len(world.rows(query)) == choices, 30, "the calls' rows")
    rows = world.rows(query)
    assert {row["ErrorType"] for row in rows} == {""}
    require_exact(Reference(world.models), rows)
    long = [row for row in rows if len(row["ResponseIds"]) == TOKENS]
    assert len(long) == len(rows) - calls[rollout(len(ROUTES) - 1)], "each choice of the long calls, of every route, whole and streamed"
    crossed = {row["RolloutKey"] for row in long if len(row["Versions.Version"]) >= 2}
    assert crossed == {rollout(number) for number in range(len(ROUTES) - 1)}, [row["Versions.Version"] for row in long]

    reward(world, calls)
    model, directory = world.models[NEWEST], tmp_path / "policies"
    trainer = trainer_settings(run_id=RUN, model=model, directory=directory, groups_per_batch=2, max_staleness=NEWEST, publish=False)
    settings = Settings(store=world.store, builder=BuilderSettings(quiet_seconds=0), trainer=trainer)
    build_once(settings)
    assert world.rows(f"SELECT Reason, Detail, count() FROM spangrad.drops WHERE RunId = '{RUN}' GROUP BY ALL") == []
    columns = "CallId, `Versions.Start`, `Versions.Version`"
    transitions = world.rows(f"SELECT {columns} FROM spangrad.transitions WHERE RunId = '{RUN}' ORDER BY CallId")
    assert transitions == world.rows(f"SELECT {columns} FROM spangrad.calls WHERE RolloutKey LIKE 'crossing-%' ORDER BY CallId")

    commit_versions(world, trainer)
    train(settings, follow=False)
    ledger = Ledger(trainer.directory, trainer.policy, trainer.branch)
    try:
        newest = ledger.versions()[-1]
        assert newest.policy_version.version == NEWEST + 1, ledger.skips
        tokens = sum(len(row["ResponseIds"]) for row in rows)
        assert (newest.metrics["transitions"], newest.metrics["trained_tokens"]) == (len(rows), tokens)
        assert newest.metrics["staleness_max"] >= 2
    finally:
        ledger.close()


@pytest.mark.slow
def test_publication_of_the_same_weights_changes_the_label_of_calls_in_flight_alone(world: World) -> None:
    version = fetch(f"{world.settings.gateway.url}/admin/policies/policy")["version"] + 1
    publish(world, world.models[0], version)
    labels: list[list[int]] = []
    # On a busy machine the files' checksum may take longer than the call.
    while len(labels) < 3 and not any(len(crossed) == 2 for crossed in labels):
        rollout, version = f"label-{len(labels)}", version + 1
        url = f"{world.settings.gateway.url}/rollout/{rollout}/attempt/0/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(STREAMED).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.readline()
            published = publish(world, world.models[0], version)
            answer.read()
        assert sorted(published["stages"]["policy-0"]) == ["checksum", "update_weight_version"], "nothing was paused or loaded"
        query = f"SELECT * FROM spangrad.calls WHERE RolloutKey = '{rollout}'"
        wait_until(lambda query=query: len(world.rows(query)) == 1, 30, "the call's row")
        (row,) = world.rows(query)
        assert len(row["ResponseIds"]) == TOKENS
        labels.append(row["Versions.Version"])
        assert labels[-1] in ([version - 1], [version - 1, version])
    assert labels[-1] == [version - 1, version], "the label changed in the midst of a call"


@pytest.mark.slow
def test_publication_that_aborts_calls_records_their_sampled_tokens(world: World, tmp_path: Path) -> None:
    version = fetch(f"{world.settings.gateway.url}/admin/policies/policy")["version"]
    url = f"{world.settings.gateway.url}/rollout/abort/attempt/0/v1/chat/completions"
    begun, over = threading.Event(), threading.Event()
    refusals: list[int] = []

    def call_until_published() -> None:
        request = urllib.request.Request(url, json.dumps(STREAMED).encode(), {"Content-Type": "application/json"})
        while not over.is_set():
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    answer.readline()
                    begun.set()
                    answer.read()
            except urllib.error.HTTPError as error:
                refusals.append(error.code)

    other = perturbed(world.models[0], tmp_path / "aborting")
    callers = [threading.Thread(target=call_until_published) for _ in range(4)]
    for caller in callers:
        caller.start()
    assert begun.wait(60), "no call began"
    published = publish(world, other, version + 1, in_flight="abort")
    over.set()
    for caller in callers:
        caller.join()
    assert published["version"] == version + 1
    assert set(refusals) <= {503}, "an engine that is paused refuses"
    query = "SELECT * FROM spangrad.calls WHERE RolloutKey = 'abort'"
    wait_until(lambda: any(row["Aborted"] for row in world.rows(query)), 30, "the row of a call that was cut")
    cut = [row for row in world.rows(query) if row["FinishReason"] == "abort"]
    assert all(len(row["ResponseIds"]) == len(row["Logprobs"]) < TOKENS and row["Aborted"] for row in cut)
    assert any(row["ResponseIds"] for row in cut)
    assert {tuple(row["Versions.Version"]) for row in cut if row["ResponseIds"]} == {(version,)}, "none went on with the new weights"


def choices_of(body: dict[str, Any]) -> int:
    """Return the number of choices of a call: rows of `calls`."""
    return body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)


def require_exact(reference: Reference, rows: list[dict[str, Any]]) -> None:
    """Compute each token's logprob again with the version of its label, and with the version on the other side of each boundary."""
    others: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for row in rows:
        starts, versions = row["Versions.Start"], row["Versions.Version"]
        assert starts[0] == 0
        gaps = {version: reference.gaps(row, version) for version in versions}
        for start, end, version in zip(starts, [*starts[1:], None], versions, strict=True):
            largest = gaps[version][start:end].max()
            assert largest < EXACT, (row["RolloutKey"], row["ChoiceIndex"], start, version, largest)
        for start, before, after in zip(starts[1:], versions, versions[1:], strict=False):
            others += [gaps[after][start - 3 : start], gaps[before][start : start + 3]]
    assert (np.concatenate(others) < EXACT).mean() < 0.2, "versions that cannot be told apart prove nothing of the boundary"
