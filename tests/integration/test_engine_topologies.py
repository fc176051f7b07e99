"""Engines of several workers, replicas and API servers: all of them take a version, and each token names the one that sampled it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from spangrad.errors import GatewayError
from spangrad.processes import Child, wait_until
from spangrad.settings import Settings, StoreSettings, TrainerSettings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from tests.support.gateways import held_checksum
from tests.support.policies import logprobs_of, perturbed, random_adapter
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, processes_of, running_gateway, start
from tests.support.receivers import Changed, Named, source_of
from trainer.publish.publisher import Publisher
from trainer.publish.sender import WeightsSender

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "say rome"}],
    "max_tokens": 10,
    "ignore_eos": True,
    "logprobs": True,
    "return_token_ids": True,
}
EQUAL = 1e-4
"""Largest difference of float32 logprobs between the engine and transformers, over an answer."""
TOPOLOGIES = {
    "tensor": (["--tensor-parallel-size", "2"], {"tensor": 2, "pipeline": 1, "data": 1, "api_servers": 1}),
    "data": (["--data-parallel-size", "2"], {"tensor": 1, "pipeline": 1, "data": 2, "api_servers": 2}),
}
CALLERS = 2


@pytest.fixture(scope="module")
def grouped_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose two workers both hold its one head of keys and values, and whose vocabulary is padded for both."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("grouped")
    config = AutoConfig.from_pretrained(tiny_model, num_key_value_heads=1, vocab_size=80, attention_bias=True)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model / name).exists():
            (directory / name).write_bytes((tiny_model / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def versions(grouped_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of versions 0 to 6, which sample differently."""
    directory = tmp_path_factory.mktemp("versions")
    return [grouped_model, *(perturbed(grouped_model, directory / f"v{number}", 1 + 0.04 * number) for number in range(1, 7))]


@contextmanager
def engine_of(model: Path, directory: Path, topology: str, **changes: object) -> Iterator[tuple[Settings, Child]]:
    """An engine of a topology, that is warm, and its launcher."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("vLLM's workers take a core each")
    arguments = [*TOPOLOGIES[topology][0], *changes.pop("extra_args", ())]
    settings = engine_settings(model, directory / "cache", extra_args=arguments, warmup_requests=2, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        child = start("gateway.engine", settings, directory / "engine.log")
    try:
        until_warm(settings, child)
        yield settings, child
    finally:
        child.stop()


def until_warm(settings: Settings, child: Child) -> None:
    url = f"{settings.gateway.engine_url}/spangrad/info"
    wait_until(lambda: fetch(url).get("warm", False), 300, "vLLM", [child], poll_seconds=0.2)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (place > 0)) for place, name in enumerate(TOPOLOGIES)]
)
def served(
    request: pytest.FixtureRequest, grouped_model: Path, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Settings]]:
    """A gateway before an engine of each topology, which takes weights from files and over HTTP."""
    directory = tmp_path_factory.mktemp(request.param)
    with engine_of(grouped_model, directory, request.param, transfer="http") as (engine, _):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, directory / "gateway.log"):
            yield request.param, settings


@pytest.fixture
def publisher(served: tuple[str, Settings]) -> Iterator[Publisher]:
    sender = WeightsSender(TrainerSettings())
    yield Publisher(served[1].gateway, sender=sender)
    sender.close()


class Traffic:
    """Calls to the engine itself, each on a connection of its own, while the block runs."""

    def __init__(self, settings: Settings) -> None:
        self.answers: list[dict[str, Any]] = []
        self._url = settings.gateway.engine_url + CHAT
        self._ends = threading.Event()
        self._callers = [threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)]

    def __enter__(self) -> Traffic:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for caller in self._callers:
            caller.join()

    def wait_for(self, more: int) -> None:
        until = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= until, 60, "answers", poll_seconds=0.02)

    def _call(self, number: int) -> None:
        chance = Random(number)
        while not self._ends.is_set():
            question = {**ASKED, "messages": [{"role": "user", "content": " ".join(chance.choices(["say", "rome", "lima", "oslo"], k=4))}]}
            answer = fetch(self._url, question)
            if "choices" in answer:
                self.answers.append(answer)
            else:
                self._ends.wait(0.1)


def mislabelled(answers: Sequence[dict[str, Any]], versions: Sequence[Path]) -> list[tuple[int, float]]:
    """Versions of tokens that those weights do not give, with the difference of the logprobs."""
    wrong: list[tuple[int, float]] = []
    for answer in answers:
        (choice,) = answer["choices"]
        (labels,) = answer["spangrad"]["versions"]
        ours = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert labels[0][0] == 0
        for (begin, version), end in zip(labels, [*(later for later, _ in labels[1:]), len(ours)], strict=True):
            exact = logprobs_of(versions[version], answer["prompt_token_ids"], choice["token_ids"])
            gap = max(abs(own - other) for own, other in zip(ours[begin:end], exact[begin:end], strict=True))
            if gap > EQUAL:
                wrong.append((version, gap))
    return wrong


def version_of(number: int, directory: Path) -> PolicyVersion:
    return PolicyVersion("policy", number, number - 1, "b", checksum_directory(directory), str(directory))


def send(publisher: Publisher, number: int, directory: Path, changed: Changed = lambda _: None) -> None:
    """Publish the weights of a directory from a rank's memory."""
    with source_of(load_file(directory / "model.safetensors"), changed) as source:
        publisher.publish(version_of(number, directory), weights=source)


def policy(settings: Settings) -> dict[str, Any]:
    return fetch(f"{settings.gateway.url}/admin/policies/policy")


def of_each_replica(settings: Settings, topology: str) -> list[dict[str, Any]]:
    """An answer of each data-parallel replica, that names it."""
    answers: list[dict[str, Any]] = []
    for rank in range(TOPOLOGIES[topology][1]["data"]):
        connection = http.client.HTTPConnection("127.0.0.1", settings.engine.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(ASKED), {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)})
        answers.append(json.loads(connection.getresponse().read()))
        connection.close()
    return answers


def api_servers(settings: Settings) -> dict[int, dict[str, Any]]:
    """Return each API server's description of the engine, by its process: open connections send the next one to another server."""
    connections = [http.client.HTTPConnection("127.0.0.1", settings.engine.port, timeout=60) for _ in range(8)]
    infos: list[dict[str, Any]] = []
    for connection in connections:
        connection.request("GET", "/spangrad/info")
        infos.append(json.loads(connection.getresponse().read()))
    for connection in connections:
        connection.close()
    return {info["pid"]: info for info in infos}


def serves(settings: Settings, topology: str, versions: Sequence[Path], number: int) -> None:
    """All workers hold a version, every API server reports it, and every replica samples from it."""
    assert policy(settings)["version"] == number
    assert held_checksum(settings.gateway.engine_url) == checksum_directory(versions[number])
    infos = api_servers(settings)
    assert len(infos) == TOPOLOGIES[topology][1]["api_servers"]
    assert {info["version"] for info in infos.values()} == {number}
    answers = of_each_replica(settings, topology)
    assert [answer["spangrad"]["versions"] for answer in answers] == [[[[0, number]]]] * len(answers)
    assert mislabelled(answers, versions) == []


def test_publication_into_several_workers_by_disk_and_transfer_labels_every_token(
    served: tuple[str, Settings], publisher: Publisher, versions: list[Path]
) -> None:
    topology, settings = served
    (backend,) = fetch(f"{settings.gateway.url}/admin/backends")["backends"]
    assert (backend["topology"], backend["uncompared"]) == (TOPOLOGIES[topology][1], "")
    with Traffic(settings) as traffic:
        traffic.wait_for(CALLERS)
        publisher.publish(version_of(1, versions[1]))
        assert publisher.stages["reload"] > 0
        traffic.wait_for(CALLERS)
        send(publisher, 2, versions[2])
        assert publisher.stages["transfer"] > 0
        traffic.wait_for(CALLERS + 1)  # one of them began after the publication
        assert fetch(f"{settings.gateway.url}/admin/policies/policy/rollback", {})["version"] == 1
    serves(settings, topology, versions, 1)
    labels = [[version for _, version in answer["spangrad"]["versions"][0]] for answer in traffic.answers]
    assert {version for each in labels for version in each} == {0, 1, 2}
    assert any(len(each) > 1 for each in labels), "no call crossed a publication"
    assert mislabelled(traffic.answers, versions) == []


def stale(tensor: str, source: Path, older: Path) -> Changed:
    """Weights with one tensor of an older version."""
    named = load_file(source / "model.safetensors")
    sent = {**named, tensor: load_file(older / "model.safetensors")[tensor]}
    return lambda _: sent


def other_once(tensor: str, source: Path) -> Changed:
    """Other weights for the second worker: in a tensor, the first and the last word change."""
    named = load_file(source / "model.safetensors")
    number, requests = list(named).index(tensor), list[int]()
    changed = named[tensor].copy()
    for place in (0, -1):
        changed.reshape(-1)[place] = np.nextafter(changed.reshape(-1)[place], np.float32(9))

    def of_second(body: dict[str, Any]) -> Named | None:
        if any(part == number for part, *_ in body["pieces"]):
            requests.append(number)
        return {**named, tensor: changed} if len(requests) == 2 else None

    return of_second


OTHERS = {
    "model.layers.1.self_attn.q_proj.weight": "it holds other values of model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight": "it holds other values of model.layers.1.mlp.down_proj.weight",
    "model.norm.weight": "hold different copies of model.norm.weight",
}
"""Tensors that are split by rows and by columns, and one that each worker holds, with what is said of a worker that holds another."""


@pytest.mark.parametrize("tensor", [pytest.param(tensor, marks=[pytest.mark.slow] * (place > 0)) for place, tensor in enumerate(OTHERS)])
def test_worker_or_replica_with_one_other_word_is_refused_until_published_to(
    served: tuple[str, Settings], publisher: Publisher, versions: list[Path], tensor: str
) -> None:
    topology, settings = served
    other = versions[3 + list(OTHERS).index(tensor)]
    number = policy(settings)["version"] + 10  # what was rolled back does not return by itself
    reason = (
        OTHERS[tensor]
        if topology == "tensor"
        else f"data-parallel replica 1 holds other weights than replica 0: it holds other values of {tensor}"
    )
    with pytest.raises(GatewayError, match=rf"publication of version {number} failed at checksum: .*{reason}"):
        send(publisher, number, other, other_once(tensor, other))
    assert fetch(settings.gateway.url + CHAT, ASKED)["error"]["type"] == "engine_down"
    assert fetch(settings.gateway.engine_url + CHAT, ASKED)["error"]["type"] == "engine_paused", "whichever API server takes the call"
    Publisher(settings.gateway).publish(version_of(number, other))
    serves(settings, topology, [versions[0]] * number + [other], number)


@pytest.mark.slow
@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_adapter_into_several_workers_labels_every_token(topology: str, grouped_model: Path, store: StoreSettings, tmp_path: Path) -> None:
    adapters = [grouped_model, *(random_adapter(grouped_model, tmp_path / f"a{seed}", seed=seed) for seed in (1, 2))]
    with engine_of(grouped_model, tmp_path, topology, lora_rank=4) as (engine, _):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, tmp_path / "gateway.log"), Traffic(settings) as traffic:
            publisher = Publisher(settings.gateway)
            for number in (1, 2):
                traffic.wait_for(CALLERS)
                publisher.publish(version_of(number, adapters[number]))
                assert publisher.stages["adapter"] > 0
            traffic.wait_for(CALLERS)
            assert fetch(f"{settings.gateway.url}/admin/policies/policy/rollback", {})["version"] == 1
            traffic.wait_for(CALLERS)
            assert held_checksum(settings.gateway.engine_url) == checksum_directory(adapters[1])
            assert len(api_servers(settings)) == 1, "an adapter is known to the server that loaded it"
            answers = [*traffic.answers, *of_each_replica(settings, topology)]
    assert {version for answer in answers for _, version in answer["spangrad"]["versions"][0]} == {0, 1, 2}
    assert mislabelled(answers, adapters) == []


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "dtype"), [("sampled", "float32"), ("off", "float32"), ("full", "float16"), ("full", "bfloat16")])
def test_engine_that_compares_in_part_or_in_another_dtype_is_published_to(
    scope: str, dtype: str, grouped_model: Path, versions: list[Path], store: StoreSettings, tmp_path: Path
) -> None:
    with engine_of(grouped_model, tmp_path, "tensor", checksum=scope, dtype=dtype, transfer="http") as (engine, _):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, tmp_path / "gateway.log"):
            sender = WeightsSender(TrainerSettings())
            publisher = Publisher(settings.gateway, sender=sender)
            publisher.publish(version_of(1, versions[1]))
            send(publisher, 2, versions[2])
            (backend,) = fetch(f"{settings.gateway.url}/admin/backends")["backends"]
            assert (backend["version"], backend["status"]) == (2, "serving")
            assert backend["uncompared"].startswith("" if scope == "full" else f"engine.checksum = {scope}: ")
            if scope == "full":
                assert (backend["checksum"], backend["uncompared"]) == (checksum_directory(versions[2], dtype), "")
                sender.close()
                return
            changed = stale("model.norm.weight", versions[3], versions[2])
            if scope == "sampled":
                with pytest.raises(GatewayError, match=r"it holds other values of model\.norm\.weight"):
                    send(publisher, 3, versions[3], changed)
            else:
                send(publisher, 3, versions[3], changed)
            sender.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_engine_killed_twenty_times_about_publications_never_mislabels(
    topology: str, grouped_model: Path, versions: list[Path], store: StoreSettings, tmp_path: Path
) -> None:
    """A process of the engine dies at a random moment of a publication; the one that starts again is given the served version."""
    chance, numbered = Random(topology), [grouped_model]
    sender = WeightsSender(TrainerSettings())
    answers: list[dict[str, Any]] = []
    with engine_of(grouped_model, tmp_path, topology, transfer="http") as (engine, first):
        settings = gateway_settings(engine, store)
        child = first
        with running_gateway(settings, tmp_path / "gateway.log"):
            publisher = Publisher(settings.gateway, sender=sender)
            for kill in range(20):
                number = len(numbered)
                numbered.append(versions[1 + kill % 6])
                with Traffic(settings) as traffic:
                    traffic.wait_for(1)
                    publication = threading.Thread(
                        target=_published, args=(publisher, number, numbered[number]), kwargs={"sent": bool(kill % 2)}
                    )
                    publication.start()
                    victims = processes_of(settings)
                    time.sleep(chance.uniform(0, 1.5))
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    publication.join()
                    child.process.wait(60)
                answers += traffic.answers
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
                    child = start("gateway.engine", engine, tmp_path / f"engine-{kill}.log")
                until_warm(settings, child)
                wait_until(lambda: policy(settings)["status"] == "serving", 60, "the gateway", poll_seconds=0.1)
                number = policy(settings)["version"]
                serves(settings, topology, numbered, number)
            publisher.publish(version_of(len(numbered), versions[1]))
            numbered.append(versions[1])
            assert fetch(f"{settings.gateway.url}/admin/policies/policy/rollback", {})["version"] == number
            serves(settings, topology, numbered, number)
            child.stop()
    sender.close()
    assert len(answers) > 20
    assert mislabelled(answers, numbered) == []


def _published(publisher: Publisher, number: int, directory: Path, *, sent: bool) -> None:
    try:
        if sent:
            send(publisher, number, directory)
        else:
            publisher.publish(version_of(number, directory))
    except GatewayError:
        pass  # the engine died of it
