"""Weights from a trainer's memory into a real vLLM, through its weight-transfer protocol, behind a real gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from spangrad.errors import GatewayError
from spangrad.settings import Settings, StoreSettings, TrainerSettings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from tests.support.gateways import held_checksum
from tests.support.policies import logprobs_of
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, running_engine, running_gateway
from tests.support.receivers import source_of
from trainer.publish.publisher import Publisher
from trainer.publish.sender import WeightsSender

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}], "temperature": 0, "max_tokens": 8}
STEPS = ["check", "pause", "transfer", "checksum", "update_weight_version", "resume", "probe"]
Named = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def taking(tiny_model: Path, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A gateway before an engine that takes weights over HTTP."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("taking")
    engine = engine_settings(tiny_model, directory / "cache", transfer="http", max_model_len=256)
    with running_engine(engine, directory / "engine.log"):
        settings = gateway_settings(engine, store)
        with running_gateway(settings, directory / "gateway.log"):
            yield settings


@pytest.fixture(scope="module")
def publisher(taking: Settings) -> Iterator[Publisher]:
    sender = WeightsSender(TrainerSettings())
    yield Publisher(taking.gateway, sender=sender)
    sender.close()


def weights_times(model: Path, factor: float) -> Named:
    return {name: value * np.float32(factor) for name, value in load_file(model / "model.safetensors").items()}


def version_of(number: int, weights: Named, directory: Path) -> PolicyVersion:
    """Write weights to `directory` and return them as a policy version of a ledger."""
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    checksum = checksum_directory(directory)
    return PolicyVersion("policy", number, number - 1, "b", checksum, str(directory))


def checked(settings: Settings, weights: Named, model: Path, directory: Path) -> None:
    """Check that the logprobs of a greedy answer are those that transformers computes with these weights."""
    import torch
    from transformers import AutoModelForCausalLM

    held = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    held.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    held.save_pretrained(directory)
    answer = fetch(settings.gateway.url + CHAT, {**GREEDY, "logprobs": True, "return_token_ids": True})
    (choice,) = answer["choices"]
    expected = logprobs_of(directory, answer["prompt_token_ids"], choice["token_ids"])
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(expected, abs=2e-5)


def policy(settings: Settings) -> dict[str, Any]:
    """Return the gateway's state of the policy, without its fields in seconds."""
    return {name: value for name, value in fetch(f"{settings.gateway.url}/admin/policies/policy").items() if not name.endswith("_seconds")}


def test_weight_transfer_with_calls_in_flight_publishes_versions(
    taking: Settings, publisher: Publisher, tiny_model: Path, tmp_path: Path
) -> None:
    answers: list[dict[str, Any]] = []
    endless = {**GREEDY, "max_tokens": 200, "ignore_eos": True}
    callers = [
        threading.Thread(target=lambda: answers.extend(fetch(taking.gateway.url + CHAT, endless) for _ in range(2))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for number, factor in ((1, 1.1), (2, 0.9)):
        weights = weights_times(tiny_model, factor)
        version = version_of(number, weights, tmp_path / f"v{number}")
        (tmp_path / f"v{number}/model.safetensors").unlink()  # nobody reads it
        with source_of(weights) as source:
            assert publisher.publish(version, weights=source) > 0
        assert list(publisher.stages) == ["files", *STEPS]
        assert (policy(taking)["version"], held_checksum(taking.gateway.engine_url)) == (number, version.checksum)
        checked(taking, weights, tiny_model, tmp_path / f"whole{number}")
    for caller in callers:
        caller.join()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [200] * 8


def test_weight_transfer_cut_short_takes_engine_out_until_rollback(
    taking: Settings, publisher: Publisher, tiny_model: Path, tmp_path: Path
) -> None:
    number = policy(taking)["version"] + 1
    weights = weights_times(tiny_model, 1.2)
    version = version_of(number, weights, tmp_path / "version")
    others = weights_times(tiny_model, 1.3)
    with source_of(others) as source, pytest.raises(GatewayError, match="the trainer has weights with checksum"):
        publisher.publish(version, weights=source)
    assert policy(taking)["status"] == "serving", "the engine was not touched"
    lacking = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    for sent, step in ((others, "checksum"), (lacking, "(transfer|checksum)")):
        with (
            source_of(weights, lambda _, sent=sent: sent) as source,
            pytest.raises(GatewayError, match=rf"publication of version {number} failed at {step}"),
        ):
            publisher.publish(version, weights=source)
        assert policy(taking)["status"] == "down"
    assert fetch(taking.gateway.url + CHAT, GREEDY)["error"]["type"] == "engine_down"
    assert publisher.publish(version) > 0, "from the files"
    assert publisher.stages["reload"] > 0
    checked(taking, weights, tiny_model, tmp_path / "whole")
    later = version_of(number + 1, others, tmp_path / "later")
    with source_of(others) as source:
        assert publisher.publish(later, weights=source) > 0
    checked(taking, others, tiny_model, tmp_path / "others")
    assert fetch(f"{taking.gateway.url}/admin/policies/policy/rollback", {})["version"] == number
    checked(taking, weights, tiny_model, tmp_path / "again")


def test_weight_transfer_whose_sender_left_keeps_old_version(
    taking: Settings, publisher: Publisher, tiny_model: Path, tmp_path: Path
) -> None:
    before = policy(taking)
    weights = weights_times(tiny_model, 1.4)
    version = version_of(before["version"] + 9, weights, tmp_path / "version")
    body = {"version": version.version, "path": version.path, "checksum": version.checksum}
    for sender, message in (
        ({"url": "http://127.0.0.1:9", "token": "x"}, "does not answer"),
        ({"url": publisher._sender.url, "token": "wrong"}, "another token is needed"),
        ({"url": publisher._sender.url, "token": publisher._sender.token}, "no version is being published"),
    ):
        answer = fetch(f"{taking.gateway.url}/admin/policies/policy/versions", {**body, "sender": sender})
        assert message in answer["error"]["message"]
        assert policy(taking) == before, "the sender is asked for its sums before the engine is touched"
        assert fetch(taking.gateway.url + CHAT, GREEDY)["choices"]
