"""Demand for groups: its law, its wire form, and the way from a filtered group to the one that is run in its place."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import SecretStr

from spangrad.client.queue_http import state_demand
from spangrad.errors import LedgerError, QueueError
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.settings import QueueSettings, Settings
from tests.support.policies import skip, trainer_settings
from tests.support.runners import queue_settings, serving
from tests.support.trainers import SPEC, FakeSource, Place, committed, group, settings, wired, write_base
from trainer.data.source import BatchRollout, Group
from trainer.ledger import demand as demand_module
from trainer.ledger.demand import ConsumedGroups, Consumption, DemandReporter, demand, groups_wanted, in_flight, usable
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import SkipReason

BASE = {"checksum": "float32:00", "path": "/v0", "tokenizer_hash": "tokenizer", "run_id": "run"}
MADE = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "tokenizer", "metrics": {}}
TWO = trainer_settings(run_id="run", groups_per_batch=2, max_staleness=1)


@dataclass
class Queue:
    """Keeps the largest level that each branch has asked for, as the real one does; `enqueued` is what its runners were given."""

    asked: list[tuple[str, dict[str, object], str | None]] = field(default_factory=list)
    levels: dict[tuple[object, object], int] = field(default_factory=dict)
    enqueued: int = 0
    answer: tuple[int, bytes] | None = None
    """Status and body of the answer to every request. None: the right answer to each."""
    url: str = ""

    def put(self, path: str, body: dict[str, object], token: str | None) -> tuple[int, bytes]:
        self.asked.append((path, body, token))
        if self.answer:
            return self.answer
        key, groups = (body["policy"], body["branch"]), body["groups"]
        assert isinstance(groups, int)
        self.levels[key] = max(groups, self.levels.get(key, 0))
        return 200, json.dumps({"groups": self.groups, "enqueued": self.enqueued, "cancelled": 0, "branches": []}).encode()

    @property
    def groups(self) -> int:
        return max(self.levels.values(), default=0)


@pytest.fixture
def queue() -> Iterator[Queue]:
    fake_queue = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = fake_queue.put(self.path, body, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake_queue.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield fake_queue
        server.shutdown()


def rollouts(*names: str, mode: str = "train", run: str = "run") -> list[BatchRollout]:
    return [BatchRollout(Group(run, mode, SPEC, name), f"{name}-{i}", 0, 0) for name in names for i in range(2)]


def begun(place: Place) -> Ledger:
    ledger = Ledger(place(), "policy", "main")
    ledger.register_initial(**BASE)
    return ledger


def train(ledger: Ledger, *names: str, mode: str = "train", run: str = "run") -> None:
    lease = ledger.begin(rollouts(*names, mode=mode, run=run))
    assert lease
    ledger.commit(lease, **MADE)  # type: ignore[arg-type]


def test_spent_counts_trained_and_skipped_groups(place: Place):
    ledger = begun(place)
    train(ledger, "a", "b")
    train(ledger, "c", "d", run="another run")
    train(ledger, "e", "f", mode="production")
    skip(ledger, [group("g"), group("h"), group("i"), replace(group("a"), build_spec="spec")], SkipReason.EQUAL)
    skip(ledger, [group("j")], SkipReason.STALE)
    skip(ledger, [replace(group("k"), build_spec="spec"), replace(group("l"), mode="production")], SkipReason.STALE)
    ledger.begin(rollouts("m", "n"))
    assert Consumption(ledger, TWO, SPEC).read() == ConsumedGroups(3, 2, {SkipReason.EQUAL: 3, SkipReason.STALE: 1})
    # Of another specification: what this one skipped may be trained there, and one group is skipped that the other has trained.
    assert Consumption(ledger, TWO, "spec").read() == ConsumedGroups(3, 2, {SkipReason.STALE: 1})
    assert Consumption(ledger, TWO.model_copy(update={"branch": "other"}), SPEC).read() == ConsumedGroups(0, 0, {})


@pytest.mark.parametrize(("steps", "most", "flying"), [(0, 0, 4), (9, 0, 4), (0, 3, 4), (1, 3, 4), (2, 3, 2), (3, 3, 0), (4, 3, 0)])
def test_in_flight_is_bounded_by_staleness_and_steps_left(steps: int, most: int, flying: int):
    chosen = TWO.model_copy(update={"max_steps": most})
    consumed = ConsumedGroups(steps, 2 * steps, {SkipReason.STALE: 5})
    assert in_flight(chosen, consumed) == flying
    assert demand(consumed, chosen, [0, 1, 4]) == DemandRequest(
        policy="policy", branch="main", groups=2 * steps + 5 + flying, oldest_version=1, filled=2 * steps + 5
    )
    assert demand(consumed, chosen, [0], ready=3).filled == consumed.groups + min(3, flying), "of those that are wanted"
    cancelled = ConsumedGroups(steps, 2 * steps, {SkipReason.STALE: 5, SkipReason.CANCELLED: 7})
    assert groups_wanted(cancelled, chosen) == groups_wanted(consumed, chosen), "what was cancelled is not counted as enqueued, either"
    assert demand(consumed, chosen, [7]).oldest_version == 7


def test_in_flight_follows_filtered_share_and_ready_groups():
    """Four groups can be used: of those that are not ready, as many are in flight as the filter is expected to leave four of."""
    flying = {(0, 0, 0): 4, (0, 8, 0): 12, (40, 40, 0): 8, (400, 400, 0): 8, (400, 400, 3): 5, (400, 400, 9): 4, (100, 1000, 0): 12}
    for (trained, filtered, ready), groups in flying.items():
        consumed = ConsumedGroups(trained // 2, trained, {SkipReason.EQUAL: filtered, SkipReason.STALE: 99, SkipReason.CANCELLED: 99})
        assert in_flight(TWO, consumed, ready) == groups, (trained, filtered, ready)
        assert consumed.filtered_share == pytest.approx(filtered / max(trained + filtered, 1))


EVENTS = st.lists(st.sampled_from(["step", "crash", "skip", "restart", "back", "late"]), max_size=24)


@given(EVENTS, st.integers(0, 4), st.randoms(use_true_random=False))
@hypothesis_settings(max_examples=25, deadline=None)
def test_demand_meets_steps_to_come_and_queue_keeps_largest(events: list[str], most: int, random: Random):
    """Law: whatever order of commits, crashed steps, expiries, restarts and rollbacks; and stated levels may come late, or twice."""
    chosen, queue, stated, used, serial = TWO.model_copy(update={"max_steps": most}), Queue(), list[int](), list[int](), 0
    with TemporaryDirectory() as directory:

        def opened() -> Ledger:
            return Ledger(Path(directory), "policy", "main")

        def send_level(level: int) -> None:
            queue.put("", {"policy": "policy", "branch": "main", "groups": level}, None)

        def look() -> None:
            consumed = consumption.read()
            assert consumed == Consumption(ledger, chosen, SPEC).read(), "what is read anew is enough"
            assert consumption.read("b") == Consumption(ledger, chosen, SPEC).read("b")
            needed = usable(chosen, consumed.steps)
            used.append(consumed.groups + needed)
            stated.append(groups_wanted(consumed, chosen, random.randrange(6)))
            assert needed <= stated[-1] - consumed.groups <= 3 * needed
            assert in_flight(chosen, consumed, needed) == needed, "what is ready is not replaced"
            send_level(stated[-1])

        ledger = opened()
        ledger.register_initial(**BASE)
        consumption = Consumption(ledger, chosen, SPEC)
        look()
        for event in events:
            names = [f"g{serial + i}" for i in range(2)]
            serial += 2
            match event:
                case "step":
                    train(ledger, *names)
                case "crash":
                    assert ledger.begin(rollouts(*names))
                    look()
                    ledger.recover()
                case "skip":
                    skip(ledger, [group(name) for name in names], random.choice(list(SkipReason)))
                case "restart":
                    ledger.close()
                    ledger = opened()
                    consumption = Consumption(ledger, chosen, SPEC)
                case "back":
                    ledger.rollback(random.choice(ledger.committed_versions()))
                case _:
                    send_level(random.choice(stated))
            look()
        ledger.close()
    assert used == sorted(used), "what steps can use never falls"
    assert queue.groups == max(stated)


def test_demand_state_over_http_is_checked(queue: Queue):
    there = QueueSettings(url=f"{queue.url}/", token=SecretStr("secret"))
    request = DemandRequest(policy="policy", branch="main", groups=12, oldest_version=3, filled=4)
    assert state_demand(there, "a run/1", request) == DemandState(groups=12, enqueued=0, cancelled=0, branches=[])
    body = {"policy": "policy", "branch": "main", "groups": 12, "oldest_version": 3, "filled": 4}
    path = "/v1/runs/a%20run%2F1/demand"
    assert queue.asked == [(path, body, "Bearer secret")]
    assert unquote(path) == "/v1/runs/a run/1/demand"
    for answer, message in (
        ((401, b'{"error": "no token"}'), r"the queue at .* refuses PUT .*/demand \(401\): no token"),
        ((502, b"<html>"), r"\(502\): <html>"),
        ((200, b'{"groups": 1}'), r"PUT .*/a%20run%2F1/demand with something else than a demand \(.*missing required field `enqueued`\)"),
        ((200, b"<html>"), "does not answer"),
    ):
        queue.answer = answer
        with pytest.raises(QueueError, match=message):
            state_demand(there, "a run/1", request)
    with pytest.raises(QueueError, match=r"queue\.url is not set"):
        state_demand(QueueSettings(), "run", request)


class Runner(FakeSource):
    """Runs as many groups as the queue was asked for; every third question has one answer only, so that nothing differs in its group."""

    def __init__(self, queue: Queue) -> None:
        super().__init__([])
        self.queue, self.equal = queue, dict[str, object]()

    def ready(self) -> list[Group]:
        while self.queue.enqueued < self.queue.groups:
            name = f"g{self.queue.enqueued:02}"
            self.queue.enqueued += 1
            self.names.append(name)
            self.changes[name] = dict(self.equal) | ({"Rewards.Value": [1.0]} if self.queue.enqueued % 3 == 0 else {})
        return super().ready()


def with_queue(chosen: Settings, queue: Queue) -> Settings:
    return chosen.model_copy(update={"queue": QueueSettings(url=queue.url)})


def test_demand_after_skipped_groups_rises_until_batches_are_full(tmp_path: Path, queue: Queue):
    """DAPO: each group skipped raises the level by one, a runner answers it, and training ends with as many groups as were needed."""
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", skip_equal_groups=True, max_staleness=0, max_steps=3)
    source = Runner(queue)
    trainer = wired(with_queue(chosen, queue), source)
    source.version = lambda: trainer.ledger.committed_versions()[-1]
    source.equal = {"TokenizerHash": trainer.ledger.frontier().tokenizer_hash}  # type: ignore[union-attr]
    trainer.run(follow=True)
    levels = [body["groups"] for _, body, _ in queue.asked]
    assert levels == sorted(levels)  # type: ignore[type-var]
    skipped = trainer.ledger.skips.reasons()
    assert set(skipped.values()) == {SkipReason.EQUAL}
    assert len(committed(trainer)) == 4
    assert levels[-1] == queue.enqueued == 6 + len(skipped), "not one more than was needed"
    assert [group for group in skipped if group.group_id == "g02"]
    metrics = trainer.ledger.versions()[-1].metrics
    assert (metrics["groups_wanted"], metrics["groups_skipped"]) == (queue.enqueued, len(skipped))


def test_demand_with_absent_queue_warns_once_and_does_not_block(
    tmp_path: Path, queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    chosen = with_queue(settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=0), queue)
    trainer = wired(chosen, FakeSource(["a", "b"]))
    queue.answer = (503, b'{"error": "the database is away"}')
    monkeypatch.setattr(demand_module, "REQUEST_SECONDS", 0.0)
    trainer.run(follow=False)
    assert len(committed(trainer)) == 2
    assert len(queue.asked) > 1
    assert caplog.text.count("refuses PUT") == 1
    queue.answer = None
    trainer.demand.call()
    assert queue.groups == 4
    sent = len(queue.asked)
    trainer.demand.call()
    assert len(queue.asked) == sent, "nothing has changed"
    monkeypatch.setattr(demand_module, "REPEAT_SECONDS", 0.0)
    skip(trainer.ledger, [group("x")], SkipReason.EQUAL)
    trainer.demand.call()
    queue.levels.clear()
    trainer.demand.call()
    assert queue.groups == 6, "a queue that lost it is told again"


def test_demand_without_queue_or_train_mode_is_not_stated(tmp_path: Path, queue: Queue):
    base = write_base(tmp_path / "base")
    wired(settings(base, tmp_path / "a"), FakeSource([])).run(follow=False)
    wired(with_queue(settings(base, tmp_path / "b", modes=("production",)), queue), FakeSource([])).run(follow=False)
    assert queue.asked == []


async def test_demand_of_another_ledger_in_queue_is_refused_or_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A new ledger gets none of the groups that a deleted one demanded, and would wait for ever."""
    of_queue = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=1)
    trainer = wired(chosen.model_copy(update={"queue": of_queue.queue}), FakeSource([]))
    run, own = chosen.trainer.run_id, {"policy": chosen.trainer.policy, "branch": chosen.trainer.branch}
    async with serving(of_queue) as (client, _):
        await asyncio.to_thread(trainer.demand.call)
        assert not caplog.text
        trainer.demand = DemandReporter(trainer.settings, trainer.branch, SPEC)
        await client.want(run, DemandRequest(**own, groups=6, oldest_version=0))
        await asyncio.to_thread(trainer.demand.call)
        assert "for 6 groups, and this ledger needs 4 and has consumed none. If another ledger trained there" in caplog.text
        await client.want(run, DemandRequest(**own, groups=8, oldest_version=1))
        trainer.demand = DemandReporter(trainer.settings, trainer.branch, SPEC)
        with pytest.raises(LedgerError, match="for version 1, and this ledger ends at version 0"):
            await asyncio.to_thread(trainer.demand.call)


async def test_demand_after_rollback_replaces_version_and_keeps_groups_of_larger_demand(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The queue keeps the larger demand, of a version that the gateway serves no more: no group would be enqueued."""
    of_queue = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", max_staleness=1, groups_per_batch=1)
    trainer = wired(chosen.model_copy(update={"queue": of_queue.queue}), FakeSource(["a", "b"]))
    trainer.run(follow=False)
    assert len(committed(trainer)) == 3
    async with serving(of_queue) as (client, _):
        trainer.demand = DemandReporter(trainer.settings, trainer.branch, SPEC)  # the queue was away before
        await asyncio.to_thread(trainer.demand.call)
        (before,) = (await client.demand(chosen.trainer.run_id)).branches
        trainer.ledger.rollback(1)
        await asyncio.to_thread(trainer.demand.call)
        (after,) = (await client.demand(chosen.trainer.run_id)).branches
        assert (before.groups, before.oldest_version, after.groups, after.oldest_version) == (4, 1, 4, 0)
        assert "another ledger" not in caplog.text
