"""The sender of weights: whom it answers, what it sends in which dtype, and for how long."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from spangrad.errors import SettingsError
from spangrad.processes import free_ports
from spangrad.settings import TrainerSettings
from spangrad.weights.checksums import sums_of_arrays
from spangrad.weights.shards import checksum_of
from spangrad.weights.sums import cast_words, tensor_sums
from tests.support.policies import trainer_settings
from trainer.publish.sender import WeightsSender

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3) / 3, "b": np.float32([1e30, -0.1])}
ASKED = {"engine": "policy-0", "over": "http", "workers": 1, "dtype": "float32", "group": ""}


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    made = WeightsSender(TrainerSettings())
    yield made
    made.close()


def ask(sender: WeightsSender, path: str, body: object, token: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {sender.token if token is None else token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(sender.url + path, json.dumps(body).encode(), headers), timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def test_sender_weights_are_fetched_once_in_dtype_of_engine(sender: WeightsSender):
    with sender.offering(lambda: iter(WEIGHTS.items())) as said:
        assert said == {"url": sender.url, "token": sender.token}
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            status, answer = ask(sender, "/transfers", {**ASKED, "dtype": dtype})
            url = answer["update"].pop("url")
            update = {"names": ["a", "b"], "dtype_names": [dtype] * 2, "shapes": [[2, 3], [2]]}
            assert (status, answer) == (200, {"group": "http", "init": {}, "update": update})
            data = fetched(url)
            assert len(data) == 8 * size
            if dtype == "float32":
                assert data == b"".join(one.tobytes() for one in WEIGHTS.values())
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetched(url)
            tensors = {name: msgspec.structs.asdict(sums) for name, sums in sums_of_arrays(WEIGHTS, dtype).items()}
            whole = checksum_of(sums_of_arrays(WEIGHTS, "float32"), "float32")
            question = {"dtype": dtype, "others": {}, "scope": "full"}
            assert ask(sender, "/checksum", question) == (200, {"tensors": tensors, "whole": whole})
        assert ask(sender, "/transfers", {**ASKED, "group": "http"})[1]["init"] is None
        pending = ask(sender, "/transfers", ASKED)[1]["update"]["url"]
    assert ask(sender, "/transfers", ASKED) == (409, "no version is being published.")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched(pending)


@pytest.mark.parametrize(
    ("token", "length", "status"),
    [("another", "9999999999", 401), (None, "9999999999", 413), (None, "-1", 411), (None, "x", 411), (None, "", 411)],
    ids=["another token", "too long", "negative", "no number", "none"],
)
def test_sender_checks_token_and_length_before_reading_body(sender: WeightsSender, token: str | None, length: str, status: int):
    """The client sends no body: a sender that waited for it would not answer."""
    host, port = sender.url.removeprefix("http://").split(":")
    lengths = f"Content-Length: {length}\r\n" if length else ""
    head = f"POST /checksum HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token or sender.token}\r\n{lengths}\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(head.encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_sender_each_worker_fetches_weights_once(sender: WeightsSender):
    with sender.offering(lambda: iter(WEIGHTS.items())):
        url = ask(sender, "/transfers", {**ASKED, "workers": 3})[1]["update"]["url"]
        assert len({fetched(url) for _ in range(3)}) == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetched(url)


def test_sender_sums_of_sample_and_of_other_dtypes_are_those_of_engine(sender: WeightsSender):
    """An engine that is sent bfloat16 and holds one tensor as float32 has the rounded words of it."""
    with sender.offering(lambda: iter(WEIGHTS.items())):
        mixed = {"dtype": "bfloat16", "others": {"a": "float32"}, "scope": "full"}
        tensors = ask(sender, "/checksum", mixed)[1]["tensors"]
        sampled = ask(sender, "/checksum", {"dtype": "float32", "others": {}, "scope": "sampled"})[1]
    rounded = {"a": cast_words(WEIGHTS["a"].reshape(-1).view(np.uint32), "float32", "bfloat16")}
    held = tensor_sums(rounded["a"], "bfloat16", "float32")
    assert (tensors["a"], tensors["b"]["dtype"]) == (msgspec.structs.asdict(held), "bfloat16")
    assert sampled["whole"] == ""


def test_sender_reads_weights_from_trainer_on_first_request_only(sender: WeightsSender):
    reads: list[int] = []

    def weights() -> Iterator[tuple[str, Any]]:
        reads.append(1)
        return iter(WEIGHTS.items())

    with sender.offering(weights):
        assert reads == []
        ask(sender, "/transfers", ASKED)
        ask(sender, "/transfers", ASKED)
        assert reads == [1]


def test_sender_wrong_token_or_request_is_refused(sender: WeightsSender):
    with sender.offering(lambda: iter(WEIGHTS.items())):
        assert ask(sender, "/transfers", ASKED, token="wrong") == (401, "another token is needed.")
        assert ask(sender, "/checksum", {"dtype": "float8_e4m3fn", "others": {}, "scope": "full"})[0] == 409
        assert ask(sender, "/transfers", {**ASKED, "over": "pigeon"}) == (409, "weights are sent over http or nccl, not 'pigeon'.")
        assert ask(sender, "/transfers", {"over": "http"})[0] == 400
        assert ask(sender, "/elsewhere", ASKED) == (409, "there is no /elsewhere.")


def test_sender_nccl_without_gpu_is_refused_with_remedy(sender: WeightsSender, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with sender.offering(lambda: iter(WEIGHTS.items())):
        status, said = ask(sender, "/transfers", {**ASKED, "over": "nccl"})
    assert (status, "sees no GPU. Give it one of its own" in said) == (409, True)


def test_sender_transfer_port_in_use_raises(sender: WeightsSender):
    taken = int(sender.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=rf"trainer\.weight_sync\.transfer_port = {taken}: cannot listen there"):
        WeightsSender(trainer_settings(transfer_port=taken))
    (free,) = free_ports(1)
    WeightsSender(trainer_settings(transfer_port=free)).close()
