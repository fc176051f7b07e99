"""Adapters in a real vLLM behind a real gateway: what is generated is what PEFT computes, whatever is in flight or cached."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from spangrad.processes import wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.weights.checksums import checksum_directory
from tests.support.gateways import held_checksum
from tests.support.policies import build_spelling_model, logprobs_of, random_adapter
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, running_engine, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
LONG = "the quick brown fox jumps over the lazy dog. " * 9
"""Over three blocks of vLLM's prefix cache, of 128 tokens each."""
ASKED: dict[str, Any] = {"model": "policy", "max_tokens": 24, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
EQUAL = 2e-5
FAR = 1e-4
"""Float32's share of a difference after 900 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spelling-model")
    build_spelling_model(directory)
    head_times(directory, 0.25)  # calmer logits: float32 alone is 2.5e-5 off after 400 tokens of the others
    return directory


@pytest.fixture(scope="module")
def adapted(model: Path, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A gateway before an engine that takes adapters of rank 4, and serves the bare base as version 0."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("adapted")
    engine = engine_settings(model, directory / "cache", lora_rank=4, max_model_len=1024)
    with running_engine(engine, directory / "engine.log"):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, directory / "gateway.log"):
            yield settings


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Directories of adapters, by the version that each is; 0 is the base."""
    directory = tmp_path_factory.mktemp("versions")
    return {0: model, **{version: random_adapter(model, directory / f"v{version}", seed=version) for version in range(1, 7)}}


def head_times(directory: Path, factor: float) -> None:
    """Multiply a model's output layer."""
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= factor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def publish(settings: Settings, version: int, path: Path) -> dict[str, Any]:
    body = {"version": version, "path": str(path), "checksum": checksum_directory(path)}
    return fetch(f"{settings.gateway.url}/admin/policies/policy/versions", body)


def policy(settings: Settings) -> dict[str, Any]:
    """Return the gateway's status of the policy, without the fields that count seconds."""
    return {name: value for name, value in fetch(f"{settings.gateway.url}/admin/policies/policy").items() if not name.endswith("_seconds")}


def held(settings: Settings) -> str:
    """Checksum of what the engine computes with."""
    return held_checksum(settings.gateway.engine_url)


def ask(settings: Settings, text: str, **more: object) -> dict[str, Any]:
    return fetch(settings.gateway.url + CHAT, {**ASKED, "messages": [{"role": "user", "content": text}], **more})


def gap(answer: dict[str, Any], directory: Path) -> float:
    """Largest difference between an answer's logprobs and PEFT's."""
    (choice,) = answer["choices"]
    ours = [token["logprob"] for token in choice["logprobs"]["content"]]
    exact = logprobs_of(directory, answer["prompt_token_ids"], choice["token_ids"])
    return max(abs(own - other) for own, other in zip(ours, exact, strict=True))


def test_vllm_adapter_versions_and_rollback_leave_no_stale_cache(adapted: Settings, versions: dict[int, Path]) -> None:
    assert gap(ask(adapted, LONG), versions[0]) < EQUAL
    assert fetch(f"{adapted.gateway.url}/v1/models")["data"][1]["id"] == "policy"
    for version in (1, 2):
        reply = publish(adapted, version, versions[version])
        assert (reply["version"], reply["checksum"]) == (version, checksum_directory(versions[version]))
        assert list(reply["stages"]["policy-0"]) == ["check", "pause", "adapter", "checksum", "update_weight_version", "resume", "probe"]
        answers = [ask(adapted, LONG), ask(adapted, LONG), ask(adapted, "hello"), ask(adapted, LONG, model=None)]
        assert max(gap(answer, versions[version]) for answer in answers) < EQUAL
        assert {answer["model"] for answer in answers} == {"policy"}
        assert gap(answers[0], versions[version - 1]) > 100 * EQUAL, "versions that cannot be told apart prove nothing"
        assert policy(adapted)["version"] == version
    for version in (1, 0):
        assert fetch(f"{adapted.gateway.url}/admin/policies/policy/rollback", {})["version"] == version
        assert (gap(ask(adapted, LONG), versions[version]) < EQUAL, held(adapted)) == (True, checksum_directory(versions[version]))
    assert publish(adapted, 3, versions[3])["version"] == 3
    assert gap(ask(adapted, LONG), versions[3]) < EQUAL


def test_vllm_adapter_publication_moves_calls_in_flight_to_new_version(adapted: Settings, versions: dict[int, Path]) -> None:
    """An order to load in place would stick to calls, and the call that began first would bring its own adapter back."""
    assert publish(adapted, 4, versions[4])["version"] == 4
    flying = [Stream(adapted, "tell", max_tokens=900) for _ in range(16)]
    for stream in flying:
        assert stream.first.wait(30)
    assert publish(adapted, 5, versions[5])["version"] == 5
    beside = [ask(adapted, LONG, max_tokens=4)]
    assert publish(adapted, 6, versions[6])["version"] == 6
    beside_newest = [ask(adapted, LONG, max_tokens=4)]
    assert not all(stream.over.is_set() for stream in flying), "they ended before others could meet them"
    assert max(gap(answer, versions[5]) for answer in beside) < EQUAL
    assert max(gap(answer, versions[6]) for answer in beside_newest) < EQUAL
    for stream in flying:
        assert stream.over.wait(60)
    assert held(adapted) == checksum_directory(versions[6])
    through = [stream for stream in flying if [version for _, version in stream.versions] == [4, 5, 6]]
    assert through
    for stream in through[:2]:
        starts = [start for start, _ in stream.versions]
        for (start, version), end in zip(stream.versions, [*starts[1:], len(stream.tokens)], strict=True):
            exact = logprobs_of(versions[version], stream.prompt, stream.tokens)[start:end]
            gaps = [abs(ours - logprob) for ours, logprob in zip(stream.logprobs[start:end], exact, strict=True)]
            assert max(gaps) < FAR, f"a token from {start} on that version {version} does not give"


def test_vllm_adapter_refused_or_unreadable_leaves_old_version(
    adapted: Settings, model: Path, versions: dict[int, Path], tmp_path: Path
) -> None:
    before, weights = policy(adapted), held(adapted)
    old = ask(adapted, LONG, temperature=0)
    large = random_adapter(model, tmp_path / "large", seed=9, rank=6)
    assert "of rank 6, and the engine at" in publish(adapted, 90, large)["error"]["message"]
    shutil.copytree(model, tmp_path / "other")
    head_times(tmp_path / "other", 2)
    foreign = random_adapter(tmp_path / "other", tmp_path / "foreign", seed=9)
    assert "Start the engine with that model. The engine is serving." in publish(adapted, 90, foreign)["error"]["message"]
    strange = random_adapter(model, tmp_path / "strange", seed=11)
    file = strange / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"down_proj", b"dawn_proj"))
    failed = publish(adapted, 91, strange)["error"]["message"]
    assert "publication of version 91 failed at adapter" in failed
    assert failed.endswith("The engine is serving.")
    assert (policy(adapted), held(adapted)) == (before, weights)
    assert ask(adapted, LONG, temperature=0)["choices"] == old["choices"]


class Stream(threading.Thread):
    """A call that streams: what has come of it."""

    def __init__(self, settings: Settings, text: str, **more: object) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt: list[int] = []
        self.versions: list[list[int]] = []
        """Pairs: a token at which a version begins, and the version."""
        self.first, self.over = threading.Event(), threading.Event()
        body = {**ASKED, "messages": [{"role": "user", "content": text}], "stream": True, **more}
        self._request = urllib.request.Request(
            settings.gateway.engine_url + CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                self.prompt = chunk.get("prompt_token_ids") or self.prompt
                for choice in chunk["choices"]:
                    self.tokens += choice.get("token_ids") or []
                    self.logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
                if self.tokens:
                    self.first.set()
                facts = chunk.get("spangrad", {})
                if "versions" in facts:
                    (self.versions,) = facts["versions"]
        self.over.set()


def test_vllm_base_model_name_is_answered_with_adapter(adapted: Settings, versions: dict[int, Path]) -> None:
    version = policy(adapted)["version"]
    direct = fetch(adapted.gateway.engine_url + CHAT, {**ASKED, "model": "policy-base", "messages": [{"role": "user", "content": "hello"}]})
    assert gap(direct, versions[version]) < EQUAL
    assert direct["spangrad"]["versions"] == [[[0, version]]]
    wait_until(lambda: policy(adapted)["status"] == "serving", 10, "the engine")
