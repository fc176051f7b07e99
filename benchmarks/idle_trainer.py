"""One look of an idle `spangrad train --follow`: CPU of the trainer and of its store, after 1,000 and after 10,000 steps.

In: how many groups a step has trained, and of how many rollouts. Out: a table, and as the last line one JSON object; exit code 1 when a
check fails. Measured is the trainer's own loop over a real ledger and a real `spangrad store` with rows of past steps; each look does also
what it does only once a second otherwise (leases of the dead, held-out rollouts, the demand for the queue). The peer is a look that reads
all history: the statements that the trainer asked before.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.idle_trainer_peer import look_at_all_history
from benchmarks.meter import tree
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import Settings, StoreSettings, TrainerSettings
from spangrad.settings.trainer_learning import SamplingSettings
from spangrad.settings.trainer_service import WeightSyncSettings
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from trainer.data.source import BatchRollout, Group, GroupReader
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import open_ledger
from trainer.ledger.tables import FILE
from trainer.loop import Trainer
from trainer.monitor.evaluate import Evaluation
from trainer.optim.optimizer import VerlOptimizer
from trainer.shutdown import Shutdown

RUN, POLICY = "default", "policy"
METRICS = json.dumps({f"metric_{number}": number * 0.123456789 for number in range(60)})
QUIET_CORES = 0.05
MOST_CPU_MS, MOST_GROWTH = 20.0, 1.5
"""Largest cost of a look after 10,000 steps, and its largest ratio to that after 1,000."""
_BUILDS = """
INSERT INTO spangrad_internal.builds
    (RunId, Mode, BuildSpec, GroupId, GroupSize, TaskId, RolloutId, Attempt, Revision, Content, Calls, Transitions,
    Drops, Watermark, RowsRead, Builder, IngestedAt)
SELECT '{run}', 'train', '{spec}', leftPad(lower(hex(intDiv(number, {size}) * 2654435761 % 4294967296)), 8, '0') AS GroupId, {size}, 'task',
    concat(GroupId, '-', toString(number % {size})), 0, {revision}, number, 10, 10, 0, now64(6), 100, 'benchmark',
    now64(6) - toIntervalMillisecond({age_ms} + ({end} - number) * 10)
FROM numbers({begin}, {end} - {begin})
"""


class _EnoughError(Exception):
    """Raised to end the loop when the requested number of looks is reached."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one look, on average."""

    trainer_cpu_ms: float
    store_cpu_ms: float
    wall_ms: float

    @property
    def cpu_ms(self) -> float:
        """CPU of both."""
        return self.trainer_cpu_ms + self.store_cpu_ms


def main() -> int:
    """Measure both sizes, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16, help="groups that each past step has trained")
    parser.add_argument("--size", type=int, default=4, help="rollouts of a group")
    parser.add_argument("--looks", type=int, default=100)
    parser.add_argument("--peer-looks", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs=2, default=(1_000, 10_000), help="past steps, few and many")
    arguments = parser.parse_args()
    ours: dict[str, Cost] = {}
    peer: dict[str, Cost] = {}
    checked: dict[str, int] = {}
    for name, steps in zip(("1k", "10k"), arguments.steps, strict=True):
        with scratch("idle") as directory:
            ours[name], peer[name], counts = measure(directory, steps, arguments)
        checked |= {key: checked.get(key, 0) + count for key, count in counts.items()}
    for side, costs in (("ours", ours), ("peer", peer)):
        for name, cost in costs.items():
            print(
                f"{side}, {name} steps: {cost.cpu_ms:8.2f} ms CPU ({cost.trainer_cpu_ms:.2f} trainer, {cost.store_cpu_ms:.2f} store), "
                f"{cost.wall_ms:8.2f} ms"
            )
    result = report(ours, peer, checked)
    print(json.dumps(result))
    return exit_code(result["checked"])


def report(ours: Mapping[str, Cost], peer: Mapping[str, Cost], checked: Mapping[str, int]) -> dict[str, Any]:
    """Return the benchmark's JSON object of the costs after few (`1k`) and many (`10k`) steps."""
    most = ours["10k"].cpu_ms > MOST_CPU_MS
    grows = ours["10k"].cpu_ms > MOST_GROWTH * ours["1k"].cpu_ms
    return {
        "benchmark": "idle_trainer",
        "ours": _figures(ours),
        "peer": _figures(peer),
        "ratio": {f"cpu_{name}": round(peer[name].cpu_ms / ours[name].cpu_ms, 1) for name in ours},
        "checked": {**checked, "too_much_cpu": int(most), "grows_with_history": int(grows)},
    }


def _figures(costs: Mapping[str, Cost]) -> dict[str, float]:
    parts = ("cpu_ms", "trainer_cpu_ms", "store_cpu_ms", "wall_ms")
    return {f"{part}_{name}": round(getattr(cost, part), 2) for part in parts for name, cost in costs.items()}


def measure(directory: Path, steps: int, arguments: argparse.Namespace) -> tuple[Cost, Cost, dict[str, int]]:
    """Cost of our look and of the peer's after so many steps, and what went wrong."""
    ports = dict(zip(("otlp-grpc", "otlp-http", "clickhouse"), free_ports(3), strict=True))
    flags = [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
    (directory / "spangrad.toml").touch()
    command = own_command("store", "--config", str(directory / "spangrad.toml"), "--path", str(directory / "store"), *flags)
    child = Child("spangrad store", command, directory / "store.log", inherit_settings=False)
    url = f"http://127.0.0.1:{ports['clickhouse']}"
    try:
        wait_until(lambda: answers(f"{url}/ping"), 60, "the store", [child], poll_seconds=0.05)
        own = TrainerSettings(
            run_id=RUN,
            directory=directory / "policies",
            sampling=SamplingSettings(groups_per_batch=10**6),
            weight_sync=WeightSyncSettings(publish=False),
        )
        settings = Settings(store=StoreSettings(url=url), trainer=own)
        world = World(settings, arguments.groups, arguments.size, child.process.pid)
        world.fill(steps)
        world.settle()
        ours = world.cost(world.poll, arguments.looks)
        counts = world.check(steps)
        peer = world.cost(world.poll_peer, arguments.peer_looks)
        return ours, peer, counts
    finally:
        child.stop()


class World:
    """A ledger, a store and a trainer between them."""

    def __init__(self, settings: Settings, groups: int, size: int, store: int) -> None:
        """Past steps have trained `groups` groups of `size` rollouts; `store` is the store's process id."""
        self.settings = settings
        self.groups, self.size = groups, size
        self.client = connect(settings.store, settled=True)
        self._arrivals = Arrivals(connect(settings.store, settled=True), settings.store, [Topic.BUILDS])
        self.ledger = open_ledger(settings)
        self.ledger.register_initial(checksum="float32:0", path="/model", tokenizer_hash="t", run_id=RUN)
        self.spec = settings.builder.spec
        self._store = psutil.Process(store)
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """A trainer that has looked once: history is read at its start."""
        if self._trainer is None:
            head = self.ledger.frontier()
            assert head
            source = GroupReader(self.client, self.settings, arrived=self._arrivals.lately)
            self._trainer = Trainer(
                settings=self.settings,
                ledger=self.ledger,
                source=source,
                optimizer=None,
                normalise=lambda units: units.values,
                mirror=Mirror(self.client, self.settings.store, self.ledger),
                publisher=None,
                shutdown=Shutdown(),
                loaded=head,
                load_optimizer=lambda _: _no_optimizer(),
                evaluation=Evaluation(self.client, self.settings, source.build_spec),
                arrived=lambda seconds: bool(self._arrivals.wait(seconds)),
            )
            self.poll(2)
        return self._trainer

    def fill(self, steps: int) -> None:
        """Enter past steps into the ledger and into the store."""
        rows = steps * self.groups * self.size
        key = f"'{POLICY}', 'main'"
        with sqlite3.connect(self.settings.trainer.directory / FILE) as database:
            database.execute(
                f"""WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {steps})
                INSERT INTO versions (policy, branch, version, parent, parent_branch, batch_id, run_id, modes, status, checksum, path,
                    tokenizer_hash, metrics)
                SELECT {key}, i, i - 1, 'main', 'b' || i, '{RUN}', 'train', 'committed', 'c', 'p', 't', ? FROM n""",
                [METRICS],
            )
            database.execute(
                f"""WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows - 1})
                INSERT INTO batch_rollouts (policy, branch, run_id, rollout_id, attempt, batch_id, mode, group_id, build_spec, revision)
                SELECT {key}, '{RUN}', printf('%08x', i / {self.size} * 2654435761 % 4294967296) || '-' || (i % {self.size}), 0,
                    'b' || (i / {self.groups * self.size} + 1), 'train', printf('%08x', i / {self.size} * 2654435761 % 4294967296),
                    '{self.spec}', 0
                FROM n"""
            )
            database.execute("UPDATE heads SET version = ?", [steps])
            database.execute("UPDATE changes SET number = number + 1")
        for begin in range(0, rows, 200_000):
            self.build(begin, min(begin + 200_000, rows), age_ms=3_600_000)

    def build(self, begin: int, end: int, *, age_ms: int = 0, revision: int = 0) -> None:
        """Have rollouts built, by their numbers."""
        facts = {"run": RUN, "spec": self.spec, "size": self.size, "begin": begin, "end": end}
        self.client.command(_BUILDS.format(**facts, age_ms=age_ms, revision=revision))

    def settle(self, seconds: float = 60) -> None:
        """Wait until the store has merged what was inserted, or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = self._store_seconds()
            time.sleep(2)
            if (self._store_seconds() - before) / 2 < QUIET_CORES:
                return

    def cost(self, poll: Callable[[int], object], count: int) -> Cost:
        """Average cost of some looks; what a store that rests does anyway is in it."""
        assert self.trainer
        store, own, began = self._store_seconds(), time.process_time(), time.perf_counter()
        poll(count)
        own, wall = time.process_time() - own, time.perf_counter() - began
        return Cost(1e3 * own / count, 1e3 * (self._store_seconds() - store) / count, 1e3 * wall / count)

    def poll(self, count: int) -> None:
        """Look so often, as `--follow` does between two waits, which are left out."""
        trainer, left = self.trainer, count

        def rest(_: float) -> bool:
            nonlocal left
            left -= 1
            trainer.demand.figures(ready=0)
            trainer._checked_at = float("-inf")  # pyright: ignore[reportPrivateUsage]
            if not left:
                raise _EnoughError
            return True

        waits, trainer.arrived = trainer.arrived, rest
        try:
            trainer.run(follow=True)
        except _EnoughError:
            trainer.arrived = waits

    def poll_peer(self, count: int) -> None:
        """Look so often at all history."""
        for _ in range(count):
            look_at_all_history(self.ledger, self.client, self.settings, self.spec)

    def check(self, steps: int) -> dict[str, int]:
        """See that looks notice what is new, and that alone."""
        first = steps * self.groups * self.size
        wrong = {"missed": 0, "early": 0, "duplicated": 0, "not_noticed_as_trained": 0}
        # Of the next group all rollouts but one, and a new revision of one that was trained long ago.
        self.build(first, first + self.size - 1)
        self.build(0, 1, revision=1)
        wrong["early"] += self._ready() != []
        self.build(first + self.size - 1, first + self.size)
        new = self._name(first)
        ready = self._ready()
        wrong["missed"] += new not in ready
        wrong["duplicated"] += len(ready) - len(set(ready)) + len(set(ready) - {new})
        # Another process trains it.
        other = Ledger(self.settings.trainer.directory, POLICY, "main", holder="other-host 7 123 other-boot/pid:[1]")
        group = Group(RUN, "train", self.spec, new)
        lease = other.begin([BatchRollout(group, f"{new}-{number}", 0, 0) for number in range(self.size)])
        assert lease
        wrong["not_noticed_as_trained"] += self._ready() != []
        other.commit(lease, checksum="c", path="p", tokenizer_hash="t", metrics={})
        other.close()
        wrong["not_noticed_as_trained"] += self._ready() != []
        return {name: int(count) for name, count in wrong.items()}

    def _ready(self) -> list[str]:
        """Groups that a look finds, before their rows are loaded: these groups have none."""
        groups = self.trainer.batches._groups  # pyright: ignore[reportPrivateUsage]
        return [group.group_id for group in groups.poll(self.trainer.source)]

    def _name(self, number: int) -> str:
        return f"{number // self.size * 2654435761 % 4294967296:08x}"

    def _store_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in tree([self._store]))


def _no_optimizer() -> VerlOptimizer:
    raise AssertionError("an idle trainer trains nothing")


if __name__ == "__main__":
    sys.exit(main())
