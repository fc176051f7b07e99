"""Words from the ranks of a trainer to the parameters of workers that fuse, split and pad tensors, over HTTP, without vLLM."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.vllm_plugin import fetching
from gateway.vllm_plugin.fetching import RankParts, buckets_of, fetch
from spangrad.weights.placements import Dimension, Placement
from spangrad.weights.shards import checksum_of
from tests.support.policies import trainer_settings
from tests.support.receivers import no_files, ranks_of, sums_of_arrays
from trainer.publish import token_server
from trainer.publish.offers import WeightSource
from trainer.publish.rank_sender import RankSender
from trainer.publish.sender import WeightsSender
from trainer.publish.shared_file import FilePart

torch = pytest.importorskip("torch")
placing = pytest.importorskip("gateway.vllm_plugin.placing")

ROWS, COLUMNS, WORKERS = 12, 8, 2
Named = dict[str, NDArray[np.float32]]
NAMES = ["q", "k", "down", "norm"]


def weights(seed: int) -> Named:
    generator = np.random.default_rng(seed)
    shapes = {"q": (ROWS, COLUMNS), "k": (6, COLUMNS), "down": (COLUMNS, ROWS), "norm": (COLUMNS,)}
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def parts_of(named: Named, rank: int, ranks: int) -> Iterator[FilePart]:
    """A range of rows of each tensor, as FSDP2 shards them: the last ranks may have fewer, or none."""
    for name, array in named.items():
        step = -(-len(array) // ranks)
        rows = array[rank * step : (rank + 1) * step]
        yield FilePart(name, array.shape, min(rank * step, len(array)) * array[0].size, rows)


class Worker:
    """A worker that fuses q and k by rows, splits both and `down` between workers, and pads `down` by a column."""

    def __init__(self, number: int, dtype: Any) -> None:
        own_q, own_k, own_down = ROWS // WORKERS, 6 // WORKERS, ROWS // WORKERS
        self.dtype = dtype
        self.fused = torch.zeros(own_q + own_k, COLUMNS, dtype=dtype)
        self.down = torch.zeros(COLUMNS, own_down + 1, dtype=dtype)
        self.norm = torch.zeros(COLUMNS, dtype=torch.float32)
        rows = Dimension(COLUMNS, 1, 1)
        self.placed = {
            self.fused: [
                Placement("q", ROWS * COLUMNS, number * own_q * COLUMNS, 0, (Dimension(own_q, COLUMNS, COLUMNS), rows)),
                Placement("k", 6 * COLUMNS, number * own_k * COLUMNS, own_q * COLUMNS, (Dimension(own_k, COLUMNS, COLUMNS), rows)),
            ],
            self.down: [
                Placement("down", ROWS * COLUMNS, number * own_down, 0, (Dimension(COLUMNS, ROWS, own_down + 1), Dimension(own_down, 1, 1)))
            ],
            self.norm: [Placement("norm", COLUMNS, 0, 0, (rows,))],
        }
        placements = {
            tensor.untyped_storage().data_ptr(): {(place,): each for place, each in enumerate(placed)}
            for tensor, placed in self.placed.items()
        }
        self.targets, self.reason = placing.targets_in(self.placed, placements, NAMES)
        self.held = ""
        self.deltas = 0

    def receive(self, plan: dict[str, Any]) -> None:
        ranks, base = ranks_of(plan), plan["base"] if plan["base"] == self.held else ""
        buckets = buckets_of([(each.placement, each.tensor.dtype == self.dtype) for each in self.targets], ranks, self.dtype.itemsize)
        facts = {"key": plan["key"], "version": plan["version"], "dtype": plan["dtype"], "word_bytes": self.dtype.itemsize}
        for fetched in fetch(buckets, ranks, **facts, base=base):
            placing.place(fetched, self.targets, self.dtype)
            self.deltas += fetched.is_delta
        self.held = plan["version"]

    def holds(self, named: Named, number: int) -> bool:
        """Return True if all words are those of the weights, and the padding is zero."""
        q, k, down, norm = (torch.from_numpy(named[name]).to(self.dtype) for name in NAMES)
        fused = torch.cat([q.chunk(WORKERS)[number], k.chunk(WORKERS)[number]])
        padded = torch.nn.functional.pad(down.chunk(WORKERS, 1)[number], (0, 1))
        return bool((self.fused == fused).all() and (self.down == padded).all() and (self.norm == norm.float()).all())


class Trainer:
    """Ranks that each serve their parts of the same weights, and the process that publishes."""

    def __init__(self, stack: ExitStack, ranks: int, **settings: Any) -> None:
        self.named = weights(0)
        self.senders = [RankSender(lambda rank=rank: parts_of(self.named, rank, ranks), no_files, "127.0.0.1") for rank in range(ranks)]
        self.sender = WeightsSender(trainer_settings(**settings))
        for each in (*self.senders, self.sender):
            stack.enter_context(closing(each))

    def plan(self, dtype: str, *, whole: bool = False) -> dict[str, Any]:
        body = {"engine": "e", "over": "http", "workers": WORKERS, "dtype": dtype, "group": "", "whole": whole}
        return self.ask("/transfers", body)["update"]

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.sender.token}"}
        with urllib.request.urlopen(
            urllib.request.Request(self.sender.url + path, json.dumps(body).encode(), headers), timeout=30
        ) as answer:
            return json.loads(answer.read())

    def step(self, share: float, seed: int) -> None:
        """Change some words of each tensor a little."""
        generator = np.random.default_rng(seed)
        for array in self.named.values():
            array *= np.where(generator.random(array.shape) < share, np.float32(1.01), np.float32(1))

    @property
    def source(self) -> WeightSource:
        return WeightSource(lambda: iter(()), lambda: [each.address for each in self.senders])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 4, 5])
@pytest.mark.parametrize("bucket", [64, 2**24])
def test_workers_fetch_the_words_that_they_hold_from_all_ranks(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: str, bucket: int
) -> None:
    monkeypatch.setattr(fetching, "BUCKET_BYTES", bucket)
    trainer, workers = Trainer(stack, ranks), [Worker(number, getattr(torch, dtype)) for number in range(WORKERS)]
    with trainer.sender.offering(trainer.source):
        for number, worker in enumerate(workers):
            assert worker.reason == ""
            worker.receive(trainer.plan(dtype))
            assert worker.holds(trainer.named, number)
        sums = trainer.ask("/checksum", {"dtype": dtype, "others": {"norm": "float32"}, "scope": "full"})
    words = sum(array.size for array in trainer.named.values()) + COLUMNS
    assert trainer.sender.sent == {"full": words * getattr(torch, dtype).itemsize, "delta": 0}, "each word once, norms once a worker"
    expected = sums_of_arrays(trainer.named, dtype, {"norm": "float32"})
    assert sums["tensors"] == {name: msgspec.structs.asdict(each) for name, each in expected.items()}
    assert sums["whole"] == checksum_of(sums_of_arrays(trainer.named, "float32"), "float32")


def test_buckets_of_ranks_that_lack_words_are_refused(stack: ExitStack) -> None:
    trainer, worker = Trainer(stack, 4), Worker(0, torch.float32)
    trainer.senders.pop()
    with (
        trainer.sender.offering(trainer.source),
        pytest.raises(OSError, match=r"the trainer's ranks have \d+ of the \d+ words"),
    ):
        worker.receive(trainer.plan("float32"))


def test_worker_of_a_rank_that_died_raises_and_names_it(stack: ExitStack) -> None:
    trainer, worker = Trainer(stack, 3), Worker(0, torch.float32)
    with trainer.sender.offering(trainer.source):
        plan = trainer.plan("float32")
        dead = trainer.senders[1].address.url
        trainer.senders[1].close()
        with pytest.raises(OSError, match=f"the trainer's rank at {dead} did not send its words"):
            worker.receive(plan)


def test_worker_of_a_rank_that_died_waits_for_no_other(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worker, end = Trainer(stack, 3), Worker(0, torch.float32), threading.Event()
    stack.callback(end.set)
    with trainer.sender.offering(trainer.source):
        plan = trainer.plan("float32")
        monkeypatch.setattr(trainer.senders[0].service, "words", lambda _: end.wait(60))
        dead = trainer.senders[1].address.url
        trainer.senders[1].close()
        began = time.monotonic()
        with pytest.raises(OSError, match=f"the trainer's rank at {dead} did not send its words"):
            worker.receive(plan)
        assert time.monotonic() - began < fetching.SECONDS / 2


def test_worker_whose_connection_was_closed_in_a_pause_opens_another(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may ask a rank again only minutes later: of many ranks, or of a slow one."""
    monkeypatch.setattr(token_server, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(fetching, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(fetching, "BUCKET_BYTES", 64)
    trainer, worker = Trainer(stack, 1), Worker(0, torch.float32)
    with trainer.sender.offering(trainer.source):
        plan = trainer.plan("float32")
        ranks = ranks_of(plan)
        buckets = buckets_of([(each.placement, True) for each in worker.targets], ranks, 4)
        for place, fetched in enumerate(
            fetch(buckets, ranks, key=plan["key"], version=plan["version"], dtype="float32", word_bytes=4, base="")
        ):
            if not place:
                time.sleep(1.5)
            placing.place(fetched, worker.targets, torch.float32)
    assert worker.holds(trainer.named, 0)


def whole(fetched: Sequence[Any], shapes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    loaded = dict[str, Any]()
    tensors = placing.WholeTensors(shapes, torch.float32, loaded.__setitem__)
    for each in fetched:
        tensors.place(each)
    return loaded


def test_whole_tensors_are_put_together_from_all_ranks_in_order(stack: ExitStack) -> None:
    trainer = Trainer(stack, 4)
    with trainer.sender.offering(trainer.source):
        plan = trainer.plan("float32")
        shapes = list(zip(plan["names"], plan["shapes"], strict=True))
        facts = {"key": plan["key"], "version": plan["version"], "dtype": "float32", "word_bytes": 4, "base": ""}
        fetched = list(fetch(placing.whole_buckets(shapes, ranks_of(plan), 4), ranks_of(plan), **facts))
    loaded = whole(fetched, shapes)
    assert list(loaded) == NAMES
    assert all(np.array_equal(loaded[name].numpy(), trainer.named[name]) for name in NAMES)


def test_whole_buckets_of_many_tensors_go_through_the_parts_of_a_rank_once() -> None:
    """A mixture of experts has 20,000 tensors, and each of 64 ranks a part of every one."""

    class Parts(list[tuple[str, int, int]]):
        passes = 0

        def __iter__(self) -> Iterator[tuple[str, int, int]]:
            self.passes += 1
            return super().__iter__()

    shapes = [(f"w{number}", (4,)) for number in range(20)]
    ranks = [RankParts(f"http://rank{rank}", Parts((name, 2 * rank, 2) for name, _ in shapes)) for rank in range(2)]
    buckets = list(placing.whole_buckets(shapes, ranks, 4))
    requested = [(bucket.rank, piece.part, piece.target, piece.placement.source) for bucket in buckets for piece in bucket.pieces]
    assert requested == [(rank, number, number, 2 * rank) for number in range(20) for rank in range(2)]
    assert [rank.parts.passes for rank in ranks] == [1, 1]


def test_targets_in_tensor_that_is_held_in_another_form_is_named() -> None:
    packed = torch.zeros(4, dtype=torch.int8)
    placements = {packed.untyped_storage().data_ptr(): {(0,): Placement("q", 4, 0, 0, (Dimension(4, 1, 1),))}}
    assert placing.targets_in([packed], placements, ["q"]) == ([], "vLLM holds q as int8")
    assert placing.targets_in([], {}, ["q"]) == ([], "vLLM holds q in another form")


def test_worker_that_holds_the_version_before_is_sent_differences(stack: ExitStack) -> None:
    trainer, (first, second) = Trainer(stack, 4), [Worker(number, torch.bfloat16) for number in range(WORKERS)]
    for seed, share in enumerate((0, 0.05, 0.05, 0)):
        trainer.step(share, seed)
        with trainer.sender.offering(trainer.source):
            plan = trainer.plan("bfloat16")
            first.receive(plan)
            if seed != 2:
                second.receive(plan)
        assert first.holds(trainer.named, 0)
    assert second.holds(trainer.named, 1), "it lacked a version, so it was sent all words"
    assert first.deltas > second.deltas > 0


@pytest.mark.parametrize("reason", ["setting", "whole", "all changed", "float32"])
def test_worker_is_sent_words_where_differences_are_of_no_use(stack: ExitStack, reason: str) -> None:
    trainer = Trainer(stack, 2, **({"delta": False} if reason == "setting" else {}))
    worker = Worker(0, torch.float32 if reason == "float32" else torch.bfloat16)
    for seed in range(2):
        trainer.step(1.0 if reason in {"all changed", "float32"} else 0.01, seed)
        with trainer.sender.offering(trainer.source):
            worker.receive(trainer.plan(str(worker.dtype).removeprefix("torch."), whole=reason == "whole"))
        assert worker.holds(trainer.named, 0)
    assert worker.deltas == 0
    assert trainer.sender.sent["delta"] == 0


def test_parts_kept_between_versions_are_freed_without_delta(stack: ExitStack) -> None:
    trainer = Trainer(stack, 2, delta=False)
    with trainer.sender.offering(trainer.source):
        Worker(0, torch.float32).receive(trainer.plan("float32"))
        assert all(each.service._held for each in trainer.senders)
    assert not any(each.service._held for each in trainer.senders)
