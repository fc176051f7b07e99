"""`benchmarks.build --small`: from the last root of short rollouts in a running store until their transitions are there.

In: how many rollouts a round, how many rounds. Out: figures and counts that must be 0. Store (`spangrad store`), builder (`spangrad build
--follow`), an idle trainer and the stream of production traces are processes of their own. Measured are rounds of rollouts of 1 to 3 calls
whose other spans have arrived before: their roots are sent in one request, and the round ends when a reader sees a build of each.

`slowness` is the factor by which the machine computes longer than on a fast day, measured between the rounds: all bounds are times that.

`cpu_ms` is CPU of builder and store in a round, without that of taking the roots in, which rounds before the builder's start measure;
`_beside` is the same while production sends traces. `idle_cores` is CPU of store, builder and trainer while nothing arrives.

Invariant: the agent's, the gateway's and the runner's spans go through the store's own receiver; every call is compared with what was sent.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from benchmarks.idle_trainer import World
from benchmarks.meter import calibration, slowness
from benchmarks.scratch import scratch
from benchmarks.small_rollouts import AGENT, TOOL, SmallRollout, request
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import BuilderSettings, Settings, StoreSettings, TrainerSettings
from spangrad.settings.trainer_learning import SamplingSettings
from spangrad.settings.trainer_service import WeightSyncSettings
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from spangrad.types import Stage

QUIET_SECONDS = 3.0
"""`builder.quiet_seconds`: production is built this long after it came."""
MOST_CPU_MS, MOST_WALL_MS, MOST_IDLE_CORES, MOST_BESIDE = 200, 250, 0.02, 2.0
"""Bounds on a fast day, the last one of the ratio of rounds beside production to those without."""
_BETWEEN_ROUNDS = 1.0
_REQUEST_ROLLOUTS = 32
_LONGEST_ROUND = 60.0
_DONE = "SELECT count() FROM spangrad_internal.builds WHERE RunId = '{run}' AND BuildSpec = '{spec}'"
_BUILDS = """
SELECT RolloutId, Mode, Attempts, Transitions, Drops, Failure, length(`StageSeconds.Name`) AS Stages
FROM spangrad.builds AS b INNER JOIN spangrad_internal.builds AS i USING (RunId, BuildSpec, RolloutId, Revision, Content)
WHERE RunId = '{run}'
"""
_TRANSITIONS = """
SELECT RolloutId, CallId, Mode, AgentName, Tools, PromptIds, ResponseIds, Logprobs, arraySum(`Rewards.Value`) AS Reward, Turn
FROM spangrad.transitions WHERE RunId = '{run}' ORDER BY RolloutId, Turn
"""
_PRODUCTION = """
SELECT CallId, Mode FROM spangrad.transitions WHERE Mode = 'production'
UNION ALL SELECT CallId, Mode FROM spangrad.drops WHERE Mode = 'production'
"""
_TOOLS = "SELECT count() FROM spangrad.tool_calls WHERE RunId = '{run}' AND ToolName = '{tool}' AND CallId != '' AND NOT Failed"


@dataclass(frozen=True, slots=True)
class Round:
    """Cost of one round."""

    wall_ms: float
    store_ms: float
    builder_ms: float

    @property
    def cpu_ms(self) -> float:
        """CPU of both."""
        return self.store_ms + self.builder_ms


class Production(threading.Thread):
    """Thread that sends traces of production at a rate, until ended."""

    def __init__(self, url: str, a_second: float) -> None:
        super().__init__(daemon=True)
        self.sent: list[SmallRollout] = []
        self._url, self._pause = url, 1 / a_second
        self._over = threading.Event()

    def run(self) -> None:
        """Send each trace in a request of its own."""
        at = time.monotonic()
        while not self._over.wait(max(0.0, at - time.monotonic())):
            trace = SmallRollout("production", len(self.sent), time.time_ns(), production=True)
            _send(self._url, request(trace.before_root()))
            self.sent.append(trace)
            at += self._pause

    def end(self) -> None:
        """Send no more."""
        self._over.set()
        self.join()


class Bench:
    """A running store, and the processes beside it."""

    def __init__(self, directory: Path, rollouts: int) -> None:
        """Start the store, and wait until it answers."""
        self.directory, self.rollouts = directory, rollouts
        ports = dict(zip(("otlp-grpc", "otlp-http", "clickhouse"), free_ports(3), strict=True))
        self.url = f"http://127.0.0.1:{ports['clickhouse']}"
        self.otlp = f"http://127.0.0.1:{ports['otlp-http']}"
        self.settings = Settings(store=StoreSettings(url=self.url), builder=BuilderSettings(quiet_seconds=QUIET_SECONDS))
        config = directory / "spangrad.toml"
        config.write_text(f'[store]\nurl = "{self.url}"\n[builder]\nquiet_seconds = {QUIET_SECONDS}\n')
        self.config = ["--config", str(config)]
        flags = [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
        self.store = self._child("store", own_command("store", *self.config, "--path", str(directory / "store"), *flags))
        wait_until(lambda: answers(f"{self.url}/ping"), 60, "the store", [self.store])
        self.client = connect(self.settings.store)
        self.reader = connect(self.settings.store, settled=True)
        self.arrivals = Arrivals(self.reader, self.settings.store, [Topic.BUILDS])
        self.builder: Child | None = None
        self.trainer: Child | None = None
        self.sent: dict[str, list[SmallRollout]] = {}
        self.calibrations: list[float] = []

    def start_builder(self) -> None:
        """Start `spangrad build --follow`, and wait until it has built what is there."""
        self.builder = self._child("builder", own_command("build", "--follow", *self.config))
        for run in self.sent:
            self._wait_for(run)

    def start_trainer(self) -> None:
        """Start an idle trainer, which has nothing to train."""
        command = [sys.executable, "-m", "benchmarks.build_small", self.url, str(self.directory / "policies")]
        self.trainer = self._child("trainer", command)
        time.sleep(5)
        self.trainer.check()

    def close(self) -> None:
        """Stop all processes."""
        self.client.close()
        self.reader.close()
        for child in (self.trainer, self.builder, self.store):
            if child:
                child.stop()

    def round(self, run: str) -> Round:
        """Measure one round; without a builder, it ends when the spans are in the tables."""
        rollouts = [SmallRollout(run, number, time.time_ns()) for number in range(self.rollouts)]
        for start in range(0, len(rollouts), _REQUEST_ROLLOUTS):
            _send(self.otlp, request(part for rollout in rollouts[start : start + _REQUEST_ROLLOUTS] for part in rollout.before_root()))
        self.client.command("SELECT 1")
        time.sleep(_BETWEEN_ROUNDS)
        self.calibrations.append(calibration())
        self.sent[run] = rollouts
        roots = request(rollout.root() for rollout in rollouts)
        before = self._cpu()
        self.arrivals.wait(0)
        _send(self.otlp, roots)
        began = time.perf_counter()
        if self.builder:
            self._wait_for(run)
        else:
            self.client.command("SELECT 1")
        wall = time.perf_counter() - began
        store, builder = (1e3 * (after - begin) for after, begin in zip(self._cpu(), before, strict=True))
        return Round(1e3 * wall, store, builder)

    def idle_cores(self, seconds: float) -> tuple[float, float, float]:
        """Return the cores that store, builder and trainer use while nothing arrives."""
        assert self.builder
        assert self.trainer
        children = (self.store, self.builder, self.trainer)
        before = [_cpu_of(child) for child in children]
        began = time.perf_counter()
        time.sleep(seconds)
        wall = time.perf_counter() - began
        store, builder, trainer = ((_cpu_of(child) - begin) / wall for child, begin in zip(children, before, strict=True))
        return store, builder, trainer

    def drain(self, production: Sequence[SmallRollout]) -> None:
        """Wait until production is built, or the time is over."""
        calls, end = sum(len(trace.calls) for trace in production), time.monotonic() + _LONGEST_ROUND
        while len(self.client.query(_PRODUCTION).result_rows) < calls and time.monotonic() < end:
            time.sleep(0.5)

    def check(self, production: Sequence[SmallRollout]) -> dict[str, int]:
        """Compare all that was built with all that was sent."""
        counts: dict[str, int] = dict.fromkeys(("lost", "double", "foreign", "wrong", "wrong_builds", "wrong_tools", "production"), 0)
        for run, rollouts in self.sent.items():
            for name, count in self._check_run(run, rollouts).items():
                counts[name] += count
        rows = self.client.query(_PRODUCTION).result_rows
        expected = {call.call_id for trace in production for call in trace.calls}
        counts["production"] = len(expected ^ {call for call, _ in rows}) + len(rows) - len({call for call, _ in rows})
        return counts

    def _check_run(self, run: str, rollouts: Sequence[SmallRollout]) -> dict[str, int]:
        built = pl.DataFrame(pl.from_arrow(self.client.query_arrow(_TRANSITIONS.format(run=run), use_strings=True)))
        builds = pl.DataFrame(pl.from_arrow(self.client.query_arrow(_BUILDS.format(run=run), use_strings=True)))
        rows = {row["CallId"]: row for row in built.iter_rows(named=True)}
        expected = {call.call_id: (rollout, turn) for rollout in rollouts for turn, call in enumerate(rollout.calls)}
        wrong = sum(not _is_right(rows[name], *expected[name]) for name in rows.keys() & expected.keys())
        by_rollout = {row["RolloutId"]: row for row in builds.iter_rows(named=True)}
        facts = [(rollout.name, "train", 1, rollout.count, 0, "", len(Stage)) for rollout in rollouts]
        wrong_builds = builds.height - len(by_rollout) + sum(tuple((by_rollout.get(fact[0]) or {}).values()) != fact for fact in facts)
        ((tools,),) = self.client.query(_TOOLS.format(run=run, tool=TOOL)).result_rows
        return {
            "lost": len(expected.keys() - rows.keys()),
            "double": built.height - len(rows),
            "foreign": len(rows.keys() - expected.keys()),
            "wrong": wrong,
            "wrong_builds": wrong_builds,
            "wrong_tools": abs(tools - sum(call.tools for rollout in rollouts for call in rollout.calls)),
        }

    def _wait_for(self, run: str) -> None:
        query = _DONE.format(run=run, spec=self.settings.builder.spec)
        end = time.monotonic() + _LONGEST_ROUND
        while self.reader.query(query).result_rows[0][0] < len(self.sent[run]):
            assert self.builder
            self.builder.check()
            if time.monotonic() > end:
                raise SystemExit(f"{run} was not built within {_LONGEST_ROUND:g} s; the builder's log:\n{self.builder.tail()}")
            self.arrivals.wait(1.0)

    def _cpu(self) -> tuple[float, float]:
        return _cpu_of(self.store), _cpu_of(self.builder) if self.builder else 0.0

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(name, command, self.directory / f"{name}.log", inherit_settings=False)


def measure(
    rollouts: int = 128, rounds: int = 7, production_a_second: float = 50, idle_seconds: float = 35, out: Path | None = None
) -> dict[str, Any]:
    """Measure rounds without a builder, idleness, rounds, and rounds beside production; return the benchmark's JSON object."""
    with scratch("build-small") as directory:
        bench = Bench(out or directory, rollouts)
        try:
            return _measure(bench, rounds, production_a_second, idle_seconds)
        finally:
            bench.close()


def _measure(bench: Bench, rounds: int, production_a_second: float, idle_seconds: float) -> dict[str, Any]:
    taken = [bench.round(f"taken-{number}") for number in range(rounds + 1)][1:]
    streams = [Production(bench.otlp, production_a_second)]
    streams[0].start()
    taken_beside = [bench.round(f"taken-beside-{number}") for number in range(rounds)]
    streams[0].end()
    bench.start_builder()
    quiet = [bench.round(f"quiet-{number}") for number in range(rounds + 2)][2:]
    bench.start_trainer()
    idle = bench.idle_cores(idle_seconds)
    assert bench.trainer
    bench.trainer.stop()
    streams.append(Production(bench.otlp, production_a_second))
    streams[1].start()
    time.sleep(2 * QUIET_SECONDS)
    beside = [bench.round(f"beside-{number}") for number in range(rounds)]
    streams[1].end()
    bench.drain([trace for stream in streams for trace in stream.sent])
    ingest, ingest_beside = (median(item.cpu_ms for item in items) for items in (taken, taken_beside))
    cpu, cpu_beside = median(item.cpu_ms for item in quiet) - ingest, median(item.cpu_ms for item in beside) - ingest_beside
    wall, wall_beside = (median(item.wall_ms for item in items) for items in (quiet, beside))
    ours = {
        "cpu_ms": cpu,
        "wall_ms": wall,
        "builder_ms": median(item.builder_ms for item in quiet),
        "store_ms": median(item.store_ms for item in quiet) - ingest,
        "ingest_ms": ingest,
        "wall_ms_max": max(item.wall_ms for item in quiet),
        "cpu_ms_beside": cpu_beside,
        "wall_ms_beside": wall_beside,
        "wall_ms_beside_max": max(item.wall_ms for item in beside),
        "slowness": slowness(bench.calibrations),
        "idle_cores": sum(idle),
        **dict(zip(("idle_store", "idle_builder", "idle_trainer"), idle, strict=True)),
    }
    checked = bench.check([trace for stream in streams for trace in stream.sent]) | beyond_bounds(ours)
    figures = {name: round(value, 4 if "idle" in name else 2 if name == "slowness" else 1) for name, value in ours.items()}
    return {"benchmark": "build_small", "ours": figures, "peer": {}, "ratio": {}, "checked": checked}


def beyond_bounds(ours: Mapping[str, float]) -> dict[str, int]:
    """Return 1 for each bound that the figures exceed, times the machine's slowness."""
    cpu, wall, idle = (bound * ours["slowness"] for bound in (MOST_CPU_MS, MOST_WALL_MS, MOST_IDLE_CORES))
    beyond = {
        "too_much_cpu": ours["cpu_ms"] > cpu,
        "too_slow": ours["wall_ms"] > wall,
        "too_much_beside": ours["cpu_ms_beside"] > MOST_BESIDE * cpu or ours["wall_ms_beside"] > MOST_BESIDE * wall,
        "not_idle": ours["idle_cores"] > idle,
    }
    return {name: int(value) for name, value in beyond.items()}


def _is_right(row: dict[str, Any], rollout: SmallRollout, turn: int) -> bool:
    call = rollout.calls[turn]
    ids = (
        pl.Series(row[name], dtype=dtype)
        for name, dtype in (("PromptIds", pl.UInt32), ("ResponseIds", pl.UInt32), ("Logprobs", pl.Float32))
    )
    digest = hashlib.sha256(b"|".join(series.to_numpy().tobytes() for series in ids)).hexdigest()
    reward = rollout.reward if turn == rollout.count - 1 else 0.0
    facts = (row["RolloutId"], row["Mode"], row["AgentName"], row["Turn"], row["Tools"], row["Reward"])
    return digest == call.digest and facts == (rollout.name, "train", AGENT, turn, [TOOL] * call.tools, reward)


def _cpu_of(child: Child) -> float:
    """Return the CPU seconds of a process, all threads."""
    # The clock of another process's CPU time, in nanoseconds (clock_getcpuclockid).
    return time.clock_gettime((~child.process.pid << 3) | 2)


def _send(url: str, body: bytes) -> None:
    sent = urllib.request.Request(f"{url}/v1/traces", body, {"Content-Type": "application/x-protobuf"})
    with urllib.request.urlopen(sent, timeout=60) as answer:
        answer.read()


def _idle_trainer(url: str, directory: Path) -> None:
    """Run a trainer that has nothing to train, until stopped."""
    own = TrainerSettings(
        run_id="nothing",
        directory=directory,
        sampling=SamplingSettings(groups_per_batch=10**6),
        weight_sync=WeightSyncSettings(publish=False),
    )
    World(Settings(store=StoreSettings(url=url), trainer=own), 0, 0, 1).trainer.run(follow=True)


if __name__ == "__main__":
    _idle_trainer(sys.argv[1], Path(sys.argv[2]))
