"""The sender of weights: whom it answers, what it sends in which dtype, and for how long."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from spangrad.errors import SettingsError
from spangrad.processes import free_ports
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import checksum_of
from spangrad.weights.sums import cast_words, tensor_sums
from tests.support.policies import trainer_settings
from tests.support.receivers import no_files, source_of, sums_of_arrays, whole_parts, words_sent
from trainer.publish.offers import WeightSource
from trainer.publish.rank_sender import RankSender
from trainer.publish.sender import WeightsSender
from trainer.publish.shared_file import FilePart

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3) / 3, "b": np.float32([1e30, -0.1])}
ASKED = {"engine": "policy-0", "over": "http", "workers": 1, "dtype": "float32", "group": "", "whole": False}


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    weights_sender = WeightsSender(TrainerSettings())
    yield weights_sender
    weights_sender.close()


@pytest.fixture
def source() -> Iterator[WeightSource]:
    with source_of(WEIGHTS) as held:
        yield held


def ask(sender: WeightsSender, path: str, body: object, token: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {sender.token if token is None else token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(sender.url + path, json.dumps(body).encode(), headers), timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def fetched(plan: dict[str, Any], **changes: Any) -> tuple[int, bytes, Any]:
    """Answer to the request of a worker that holds the last two words of each row of `a`, and `b`."""
    pieces = [[0, 1, [[2, 3], [2, 1]]], [1, 0, [[2, 1]]]]
    body = {"version": plan["version"], "dtype": plan["dtype"], "base": "", "pieces": pieces, **changes}
    headers = {"Authorization": f"Bearer {changes.pop('key', plan['key'])}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(plan["ranks"][0]["url"] + "/words", json.dumps(body).encode(), headers), timeout=30
        ) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_sender_pieces_are_fetched_in_dtype_of_engine(sender: WeightsSender, source: WeightSource):
    held = np.concatenate([WEIGHTS["a"][:, 1:].reshape(-1), WEIGHTS["b"]])
    with sender.offering(source) as offer:
        assert offer == {"url": sender.url, "token": sender.token}
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            status, answer = ask(sender, "/transfers", {**ASKED, "dtype": dtype})
            plan = answer["update"]
            assert (status, answer["group"], answer["init"]) == (200, "http", {})
            assert (plan["names"], plan["shapes"], plan["dtype"], plan["base"]) == (["a", "b"], [[2, 3], [2]], dtype, "")
            assert plan["ranks"] == [{"url": source.ranks()[0].url, "parts": [[0, 0, 6], [1, 0, 2]]}]
            words = cast_words(held.view(np.uint32), "float32", dtype)
            assert [fetched(plan)[:2] for _ in range(2)] == [(200, words.tobytes())] * 2
            assert {name: each.nbytes for name, each in words_sent(plan).items()} == {"a": 6 * size, "b": 2 * size}
            tensors = {name: msgspec.structs.asdict(sums) for name, sums in sums_of_arrays(WEIGHTS, dtype).items()}
            whole = checksum_of(sums_of_arrays(WEIGHTS, "float32"), "float32")
            question = {"dtype": dtype, "others": {}, "scope": "full"}
            assert ask(sender, "/checksum", question) == (200, {"tensors": tensors, "whole": whole})
        assert ask(sender, "/transfers", {**ASKED, "group": "http"})[1]["init"] is None
        pending = ask(sender, "/transfers", ASKED)[1]["update"]
    assert ask(sender, "/transfers", ASKED) == (409, "no version is being published.")
    assert fetched(pending)[0] == 401
    assert sender.sent == {"full": 2 * 6 * 4 + 8 * 4 + 2 * 6 * 2 + 8 * 2, "delta": 0}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"key": "another"}, 401),
        ({"version": "another"}, 409),
        ({"dtype": "float16"}, 409),
        ({"pieces": [[2, 0, [[1, 1]]]]}, 409),
        ({"pieces": [[0, 1, [[2, 3], [3, 1]]]]}, 409),
        ({"pieces": [[0, 3, [[2, -3]]]]}, 409),
        ({"pieces": [[0, -1, []]]}, 409),
        ({"pieces": [[0]]}, 400),
    ],
    ids=["another key", "another version", "another dtype", "no part", "beyond its end", "before its begin", "negative", "no piece"],
)
def test_sender_request_for_other_words_is_refused(sender: WeightsSender, source: WeightSource, changes: dict[str, Any], status: int):
    with sender.offering(source):
        plan = ask(sender, "/transfers", ASKED)[1]["update"]
        assert fetched(plan, **changes)[0] == status
        assert fetched(plan)[0] == 200


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
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_sender_sums_of_sample_and_of_other_dtypes_are_those_of_engine(sender: WeightsSender, source: WeightSource):
    """An engine that is sent bfloat16 and holds one tensor as float32 has the rounded words of it."""
    with sender.offering(source):
        mixed = {"dtype": "bfloat16", "others": {"a": "float32"}, "scope": "full"}
        tensors = ask(sender, "/checksum", mixed)[1]["tensors"]
        sampled = ask(sender, "/checksum", {"dtype": "float32", "others": {}, "scope": "sampled"})[1]
    rounded = {"a": cast_words(WEIGHTS["a"].reshape(-1).view(np.uint32), "float32", "bfloat16")}
    held = tensor_sums(rounded["a"], "bfloat16", "float32")
    assert (tensors["a"], tensors["b"]["dtype"]) == (msgspec.structs.asdict(held), "bfloat16")
    assert sampled["whole"] == ""


def test_sender_reads_weights_from_trainer_on_first_request_only(sender: WeightsSender):
    reads: list[int] = []

    def parts() -> list[FilePart]:
        reads.append(1)
        return whole_parts(WEIGHTS)

    with (
        closing(RankSender(parts, no_files, "127.0.0.1")) as rank,
        sender.offering(WeightSource(lambda: iter(()), lambda: [rank.address])),
    ):
        assert reads == []
        ask(sender, "/transfers", ASKED)
        ask(sender, "/transfers", ASKED)
        assert reads == [1]


def test_sender_wrong_token_or_request_is_refused(sender: WeightsSender, source: WeightSource):
    with sender.offering(source):
        assert ask(sender, "/transfers", ASKED, token="wrong") == (401, "another token is needed.")
        assert ask(sender, "/checksum", {"dtype": "float8_e4m3fn", "others": {}, "scope": "full"})[0] == 409
        assert ask(sender, "/transfers", {**ASKED, "over": "pigeon"}) == (409, "weights are sent over http or nccl, not 'pigeon'.")
        assert ask(sender, "/transfers", {"over": "http"})[0] == 400
        assert ask(sender, "/elsewhere", ASKED) == (409, "there is no /elsewhere.")


def test_sender_whose_rank_does_not_end_a_transfer_reports_no_bytes(sender: WeightsSender, source: WeightSource):
    with sender.offering(source):
        fetched(ask(sender, "/transfers", ASKED)[1]["update"])
    assert sender.sent["full"] > 0
    with (
        closing(RankSender(lambda: whole_parts(WEIGHTS), no_files, "127.0.0.1")) as rank,
        sender.offering(WeightSource(lambda: iter(()), lambda: [rank.address])),
    ):
        ask(sender, "/transfers", ASKED)
        rank.close()
    assert sender.sent == {}, "not those of the transfer before"


def test_sender_nccl_without_gpu_is_refused_with_remedy(sender: WeightsSender, source: WeightSource, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with sender.offering(source):
        status, message = ask(sender, "/transfers", {**ASKED, "over": "nccl"})
    assert (status, "sees no GPU. Give it one of its own" in message) == (409, True)


def test_sender_transfer_port_in_use_raises(sender: WeightsSender):
    taken = int(sender.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=rf"trainer\.weight_sync\.transfer_port = {taken}: cannot listen there"):
        WeightsSender(trainer_settings(transfer_port=taken))
    (free,) = free_ports(1)
    WeightsSender(trainer_settings(transfer_port=free)).close()
