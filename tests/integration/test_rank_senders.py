"""Weights from real gloo ranks, FSDP2's shards in each, to engines: nothing is gathered, and a rank that dies costs no served version."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from gateway.vllm_plugin import fetching
from spangrad.settings import GatewaySettings, Settings, StoreSettings, TrainerSettings
from spangrad.weights.checksums import checksum_directory, sums_of_directory
from spangrad.weights.shards import checksum_of
from spangrad.weights.sums import cast_words
from tests.support.built_rollouts import BuiltRollouts
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import staged
from tests.support.policies import trainer_settings
from tests.support.ranks import start_fork_server
from tests.support.receivers import words_sent
from trainer.credit.estimators import estimator
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import open_ledger, prepare
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish import publishing
from trainer.publish.offers import WeightSource
from trainer.publish.publisher import publisher_of
from trainer.publish.sender import WeightsSender
from trainer.shutdown import Shutdown

ranks_module = pytest.importorskip("benchmarks.publish_ranks")
random_model = pytest.importorskip("benchmarks.random_model")

COUNT = 4


@pytest.fixture(scope="module")
def ranks(tiny_model: Path) -> Iterator[Any]:
    start_fork_server(ranks_module.__name__, "transformers.models.llama.modeling_llama")
    with ranks_module.TrainerRanks(COUNT, tiny_model) as started:
        yield started


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    opened = WeightsSender(TrainerSettings())
    yield opened
    opened.close()


def never() -> Iterator[Any]:
    raise AssertionError("weights were gathered")


def source_of(ranks: Any) -> WeightSource:
    return WeightSource(never, lambda: ranks.addresses)


def ask(sender: WeightsSender, path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {sender.token}"}
    with urllib.request.urlopen(urllib.request.Request(sender.url + path, json.dumps(body).encode(), headers), timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_send_their_shards_and_sums_of_all_weights(ranks: Any, sender: WeightsSender, tmp_path: Path, dtype: str) -> None:
    ranks.step(1e-3, seed=1)
    ranks.gather(tmp_path)
    with sender.offering(source_of(ranks)):
        plan = ask(sender, "/transfers", engine="e", over="http", workers=2, dtype=dtype, group="", whole=False)["update"]
        sums = ask(sender, "/checksum", dtype=dtype, others={}, scope="full")
        sent = words_sent(plan)
    named = load_file(tmp_path / "model.safetensors")
    assert len(plan["ranks"]) == COUNT
    assert max(words for rank in plan["ranks"] for _, _, words in rank["parts"]) < max(array.size for array in named.values()) / 2
    assert sums["whole"] == checksum_directory(tmp_path)
    assert sums["tensors"] == {name: msgspec.structs.asdict(each) for name, each in sums_of_directory(tmp_path, dtype).items()}
    assert set(sent) == set(named)
    for name, array in named.items():
        assert np.array_equal(sent[name], cast_words(array.reshape(-1).view(np.uint32), "float32", dtype)), name


def test_ranks_send_files_of_version_amid_the_next_step(ranks: Any, sender: WeightsSender, tmp_path: Path) -> None:
    """Words and differences are those of the version's files, whatever the ranks have in memory by then."""
    bases = list[str]()
    for version in range(2):
        ranks.step(1e-3, seed=10 + version)
        written = tmp_path / f"v{version}"
        ranks.gather(written)
        ranks.step(1e-3, seed=20 + version)
        with sender.offering(replace(source_of(ranks), directory=written)):
            plan = ask(sender, "/transfers", engine="e", over="http", workers=2, dtype="bfloat16", group="", whole=False)["update"]
            sums = ask(sender, "/checksum", dtype="bfloat16", others={}, scope="full")
            sent = words_sent(plan)
        bases.append(plan["base"])
        assert sums["whole"] == checksum_directory(written)
        for name, array in load_file(written / "model.safetensors").items():
            assert np.array_equal(sent[name], cast_words(array.reshape(-1).view(np.uint32), "float32", "bfloat16")), name
    assert bases[1] != "", "what changed since the version before is known"


def test_no_process_holds_the_whole_model_to_send_files_amid_a_step(sender: WeightsSender, tmp_path: Path) -> None:
    """A rank holds its share of the model in the engine's dtype and one part in float32; the publishing process, almost nothing."""
    random_model.write_model(tmp_path / "v0", hidden=512, layers=3, words=8000, seed=0)
    with ranks_module.TrainerRanks(COUNT, tmp_path / "v0") as ranks:
        ranks.step(1e-3, seed=1)
        source = replace(source_of(ranks), directory=tmp_path / "v0")
        with sender.offering(source):
            planned_and_summed(sender, "float16")  # buffers that do not grow with a model are there from now on
        before = ranks.memory(reset=True)
        tracemalloc.start()
        try:
            with sender.offering(source):
                plan = planned_and_summed(sender, "bfloat16")
            published = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        after = ranks.memory()
    whole = sum(memory.share for memory in before) // 2
    assert whole > 30e6
    pieces = [sum(words for _, _, words in rank["parts"]) * 2 for rank in plan["ranks"]]
    assert sum(pieces) == whole
    assert max(pieces) < 1.01 * whole / COUNT
    assert published < whole / 10
    taken = [own.peak - memory.resident for own, memory in zip(after, before, strict=True)]
    assert max(taken) < 0.75 * whole, f"{taken} bytes of {whole}"


def planned_and_summed(sender: WeightsSender, dtype: str) -> dict[str, Any]:
    """Return the plan of a publication, whose words the ranks have copied and summed."""
    ask(sender, "/checksum", dtype=dtype, others={}, scope="full")
    return ask(sender, "/transfers", engine="e", over="http", workers=2, dtype=dtype, group="", whole=False)["update"]


@pytest.mark.slow
async def test_overlapped_steps_are_published_from_ranks(
    store: StoreSettings, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run with verl's optimizer: no publication reads whole tensors, and the engine holds what the ledger committed."""

    def gather(file: Path) -> Iterator[Any]:
        raise AssertionError(f"{file} was read whole")

    monkeypatch.setattr(publishing, "_read_weights", gather)
    steps, run = 3, f"overlapped-{uuid.uuid4().hex[:8]}"
    facts = {"run_id": run, "branch": run, "model": tiny_model, "directory": tmp_path / "policies", "groups_per_batch": 1}
    learning = trainer_settings(**facts, learning_rate=1e-3, max_staleness=99, weight_sync__method="transfer")

    def train(url: str) -> tuple[list[LedgerVersion], int]:
        settings = Settings(store=store, trainer=learning, gateway=GatewaySettings(url=url))
        world = BuiltRollouts(settings, tiny_model)
        for number in range(steps):
            world.group(f"g{number}", [1.0, 0.0, 0.25])
        ledger = open_ledger(settings)
        optimizer = VerlOptimizer(tiny_model, learning)
        trainer = Trainer(
            settings=settings,
            ledger=ledger,
            source=GroupReader(world.client, settings),
            optimizer=optimizer,
            normalise=estimator(learning),
            mirror=Mirror(world.client, store, ledger),
            publisher=publisher_of(settings),
            shutdown=Shutdown(),
            loaded=prepare(ledger, settings),
            load_optimizer=lambda version: pytest.fail(f"version {version.version} was loaded anew"),
        )
        try:
            trainer.start()
            trainer.run(follow=False)
            return ledger.versions(), len(optimizer.rank_senders)
        finally:
            trainer.close()
            ledger.close()

    async with staged(FakeEngine(transfer="http", checksum=checksum_directory(tiny_model, "float32"))) as stage:
        await stage.readiness("serving")
        versions, senders = await asyncio.to_thread(train, str(stage.client._base_url).rstrip("/"))  # pyright: ignore[reportPrivateUsage]
        assert (len(versions), senders) == (1 + steps, 1)
        assert stage.engine.version == steps
        assert stage.engine.checksum == versions[-1].policy_version.checksum
    assert "reload_weights" not in stage.engine.orders
    assert versions[-1].metrics["bytes_publish_full"] > 0


async def test_rank_killed_amid_a_transfer_fails_it_and_files_restore_the_engine(
    tiny_model: Path, sender: WeightsSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = list[int]()
    monkeypatch.setattr(fetching, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(fetching, "SECONDS", 10)
    connections, ask_rank = fetching._Connections, fetching._Connections.ask
    with ranks_module.TrainerRanks(2, tiny_model) as ranks:
        ranks.gather(tmp_path)
        checksum = checksum_directory(tmp_path)

        def dies(self: Any, bucket: Any, *arguments: Any) -> Any:
            requests.append(bucket.rank)
            if len(requests) == 5:
                ranks.processes[1].kill()
                ranks.processes[1].join()
            return ask_rank(self, bucket, *arguments)

        monkeypatch.setattr(connections, "ask", dies)
        async with staged(FakeEngine(transfer="http")) as stage:
            await stage.readiness("serving")
            with sender.offering(source_of(ranks)) as offer:
                body = {"version": 1, "path": str(tmp_path), "checksum": checksum, "sender": offer}
                async with stage.client.post("/admin/policies/policy/versions", json=body) as answer:
                    assert (answer.status, "failed at transfer" in await answer.text()) == (502, True)
            assert len(requests) >= 5
            assert (await stage.chat())[0] == 503, "its weights are not known"
            async with stage.client.post("/admin/policies/policy/versions", json={**body, "sender": None}) as answer:
                assert answer.status == 200
            assert stage.engine.checksum == checksum == checksum_of(sums_of_directory(tmp_path), "float32")
            assert (await stage.chat())[0] == 200
            with sender.offering(source_of(ranks)) as offer:
                body = {"version": 2, "path": str(tmp_path), "checksum": "float32:0000000000000001", "sender": offer}
                async with stage.client.post("/admin/policies/policy/versions", json=body) as answer:
                    assert (answer.status, "the trainer's rank at" in await answer.text()) == (502, True)
            assert (await stage.chat())[0] == 200, "the engine was not touched"
