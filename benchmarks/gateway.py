"""Benchmark of the gateway: CPU and time added per call, calls a second, with a check of every span; ours against a peer.

In: how many calls, the peer. Out: a table, and as the last line one JSON object; exit code 1 when a check fails.
A bare proxy of the same HTTP libraries has its turns too: what it adds measures the machine. Invariant: upstream, client and routes are
processes of their own, and only the route's CPU counts; all routes get the same requests for the same upstream, in turns; recording is on,
and a route's CPU is read when its record holds every call of the turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.gateway_bodies import Bodies, text_of
from benchmarks.gateway_client import Order, Part
from benchmarks.gateway_routes import Kind, Setup, bare, ours
from benchmarks.measure import ROOT
from benchmarks.meter import machine_cpu, tree
from benchmarks.peers import agent_lightning_proxy
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, wait_until

PATH = "/v1/chat/completions"
CONNECTIONS = 16
WARM_UP = 2 * CONNECTIONS
STEP_SECONDS = 0.005
"""Seconds between two tokens of a stream, as of an engine under load."""
RECORD_SECONDS = 120
QUIET_SECONDS = 0.3
"""Seconds to wait after a record is complete, for the work that its writer still does."""

Open = Callable[[Path, str], AbstractContextManager[Mapping[str, Setup]]]
PEERS: Mapping[str, Open] = {"agent_lightning": agent_lightning_proxy.running}

ROWS = {
    "cpu_us": "CPU us a whole answer",
    "per_s": f"  answers/s, {CONNECTIONS} in flight",
    "p50_added_ms": "  ms added, alone, p50",
    "p99_added_ms": "  p99",
    f"p50_added_ms_{CONNECTIONS}": f"  ms added, {CONNECTIONS} in flight, p50",
    f"p99_added_ms_{CONNECTIONS}": "  p99",
    "cpu_us_stream": "CPU us a stream",
    "first_added_ms_stream": f"  ms added to the first event, {CONNECTIONS} in flight, p50",
    "p50_added_ms_stream": "  ms added to the last, p50",
    "rss_mb": "MB resident",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of requests to each route in each turn."""

    calls: int
    streams: int
    alone: int
    """Number of calls that are sent one at a time."""

    def share(self, part: float) -> Sizes:
        """Return this share of each number, but at least the number of connections."""
        return Sizes(*(max(CONNECTIONS, round(count * part)) for count in (self.calls, self.streams, self.alone)))


@dataclass(slots=True)
class Tally:
    """Measurements of one route."""

    cpu: dict[Kind, float] = field(default_factory=dict[Kind, float])
    """CPU seconds by kind."""
    turns: list[float] = field(default_factory=list[float])
    """CPU of a whole answer in microseconds, one value a turn."""
    loaded: dict[Kind, list[Part]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    """Parts that were measured under load."""
    direct: dict[Kind, list[Part]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    """Parts of the same load without the route, just before."""
    alone: list[tuple[Part, Part]] = field(default_factory=list[tuple[Part, Part]])
    """Parts of one call at a time, directly and by the route, alternating."""
    ids: list[str] = field(default_factory=list[str])
    """Ids of all answers, the first ones included."""
    answers: dict[Kind, set[str]] = field(default_factory=lambda: {kind: set() for kind in Kind})
    refused: int = 0
    rss: int = 0

    def keep(self, kind: Kind, part: Part) -> Part:
        """Record what the checks need, and return the part."""
        self.ids += part.ids
        self.answers[kind] |= set(part.answers)
        self.refused += len(part.refused)
        for reason in part.refused[:3]:
            print(f"refused: {reason}", file=sys.stderr)
        return part


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="in each, every route has its turn")
    parser.add_argument("--calls", type=int, default=1000, help="whole answers a turn of ours")
    parser.add_argument("--streams", type=int, default=96, help="streams a turn of ours")
    parser.add_argument("--alone", type=int, default=200, help="calls one at a time, a turn of ours")
    parser.add_argument("--peer", choices=PEERS, help="measured in the same run")
    parser.add_argument("--peer-share", type=float, default=0.1, help="of such counts, in a turn of the peer; at least one a connection")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    full = Sizes(arguments.calls, arguments.streams, arguments.alone)
    share = full.share(arguments.peer_share)
    bodies = Bodies(arguments.seed)
    began, machine = time.monotonic(), machine_cpu()
    own = _own_cpu()
    with scratch("gateway") as directory, ExitStack() as stack:
        upstream = stack.enter_context(_Upstream(directory, arguments.seed))
        setups = dict(stack.enter_context(ours(directory / "ours", upstream.url)))
        setups |= stack.enter_context(bare(directory, upstream.url))
        if arguments.peer:
            setups |= stack.enter_context(PEERS[arguments.peer](directory / "peer", upstream.url))
        client = stack.enter_context(_Client(arguments.seed))
        tallies = {name: Tally() for name in setups}
        for turn in range(-1, arguments.rounds):
            for name, setup in setups.items():
                _turn(setup, tallies[name], client, upstream.url, share if name.startswith("peer") else full, first=turn < 0)
                print(f"turn {turn + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
        recorded = {name: dict(setup.check(tallies[name].ids, bodies)) for name, setup in setups.items()}
        others = max(0.0, machine_cpu() - machine - (_own_cpu() - own)) / (time.monotonic() - began)
    result = report(tallies, recorded, bodies)
    result["ours"]["other_cores"] = round(others, 2)
    _print_table({name: result[name] for name in tallies})
    print(json.dumps({"benchmark": "gateway", **result}))
    return exit_code(result["checked"])


def report(tallies: Mapping[str, Tally], recorded: Mapping[str, Mapping[str, int]], bodies: Bodies) -> dict[str, Any]:
    """Figures of all, how many times ours is better than the peer, and what must be 0.

    Args:
        tallies: measurements by route; one route is `ours`.
        recorded: counts of missing and surplus entries in each route's record.
        bodies: requests and responses of the benchmark.
    """
    figures = {name: _figures(tally) for name, tally in tallies.items()}
    own = figures["ours"]
    checked: dict[str, int] = {}
    for name, tally in tallies.items():
        counts = {**recorded[name], "refused": tally.refused, "wrong_texts": _wrong_texts(tally, bodies)}
        if name == "ours":
            counts["wrong_answers"] = _wrong_answers(tally, bodies)
        checked |= {what if name == "ours" else f"{name}_{what}": count for what, count in counts.items()}
    ratio: dict[str, float] = {}
    for name, of_route in figures.items():
        if not name.startswith("peer"):
            continue
        suffix = name.removeprefix("peer")
        for key, short in {"cpu_us": "cpu", "cpu_us_stream": "cpu_stream", "p50_added_ms": "p50_added"}.items():
            if key in of_route:
                ratio[short + suffix] = round(of_route[key] / own[key], 2)
        if "per_s" in of_route:
            ratio["throughput" + suffix] = round(own["per_s"] / of_route["per_s"], 2)
    return {**figures, "ratio": ratio, "checked": checked}


def _turn(setup: Setup, tally: Tally, client: _Client, upstream: str, sizes: Sizes, *, first: bool) -> None:
    """Send one turn of load over one route; a first turn only warms it up."""
    for kind in Kind:
        if kind not in setup.kinds:
            continue
        if first:
            tally.keep(kind, client.ask(kind, CONNECTIONS, WARM_UP, setup.url)[0])
            _wait_recorded(setup, tally)
            continue
        count = sizes.calls if kind == Kind.WHOLE else sizes.streams
        tally.direct[kind] += client.ask(kind, CONNECTIONS, count, upstream)
        before = _cpu(setup)
        tally.loaded[kind].append(tally.keep(kind, client.ask(kind, CONNECTIONS, count, setup.url)[0]))
        _wait_recorded(setup, tally)
        spent = _cpu(setup) - before
        tally.cpu[kind] = tally.cpu.get(kind, 0.0) + spent
        if kind == Kind.WHOLE:
            tally.turns.append(round(spent / count * 1e6, 1))
            direct, through_proxy = client.ask(kind, 1, 2 * sizes.alone, upstream, setup.url)
            tally.alone.append((direct, tally.keep(kind, through_proxy)))
    tally.rss = max(tally.rss, sum(process.memory_info().rss for process in _processes(setup)))


def _figures(tally: Tally) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind, parts in tally.loaded.items():
        if not parts:
            continue
        suffix, direct = "" if kind == Kind.WHOLE else "_stream", tally.direct[kind]
        count = sum(len(part.milliseconds) for part in parts)
        figures |= {
            f"calls{suffix}": count,
            f"cpu_us{suffix}": round(tally.cpu[kind] / max(count, 1) * 1e6, 1),
            f"per_s{suffix}": round(count / sum(part.seconds for part in parts), 1),
        }
        if kind == Kind.STREAM:
            figures |= {
                "first_added_ms_stream": _added(parts, direct, 50, first=True),
                "p50_added_ms_stream": _added(parts, direct, 50),
                "p99_added_ms_stream": _added(parts, direct, 99),
            }
        else:
            direct_alone, alone = zip(*tally.alone, strict=True)
            figures |= {
                "cpu_us_turns": tally.turns,
                "p50_added_ms": _added(alone, direct_alone, 50),
                "p99_added_ms": _added(alone, direct_alone, 99),
                "p50_ms_straight": _percentile(direct_alone, 50),
                f"p50_added_ms_{CONNECTIONS}": _added(parts, direct, 50),
                f"p99_added_ms_{CONNECTIONS}": _added(parts, direct, 99),
            }
    return figures | {"rss_mb": round(tally.rss / 1e6)}


def _percentile(parts: Sequence[Part], percent: int, *, first: bool = False) -> float:
    times = [time_ms for part in parts for time_ms in (part.first_milliseconds if first else part.milliseconds)]
    return round(float(np.percentile(times or [0.0], percent)), 3)


def _added(through_proxy: Sequence[Part], direct: Sequence[Part], percent: int, *, first: bool = False) -> float:
    return round(_percentile(through_proxy, percent, first=first) - _percentile(direct, percent, first=first), 3)


def _wrong_texts(tally: Tally, bodies: Bodies) -> int:
    """Return the number of different answers whose text is not the engine's."""
    texts = [json.loads(answer)["choices"][0]["message"]["content"] for answer in tally.answers[Kind.WHOLE]]
    texts += [text_of(answer.encode()) for answer in tally.answers[Kind.STREAM]]
    return sum(text != bodies.text for text in texts)


def _wrong_answers(tally: Tally, bodies: Bodies) -> int:
    """Return the number of different answers that do not equal, field by field, those of the engine itself."""
    expected = {
        Kind.WHOLE: [json.loads(bodies.whole(ids=False, logprobs=False))],
        Kind.STREAM: _events(b"".join(bodies.events(ids=False, logprobs=False))),
    }
    given = [(Kind.WHOLE, [json.loads(event)]) for event in tally.answers[Kind.WHOLE]]
    given += [(Kind.STREAM, _events(event.encode())) for event in tally.answers[Kind.STREAM]]
    return sum([{**event, "id": ""} for event in answer] != [{**event, "id": ""} for event in expected[kind]] for kind, answer in given)


def _events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]


def _wait_recorded(setup: Setup, tally: Tally) -> None:
    wait_until(lambda: setup.recorded() >= len(tally.ids), RECORD_SECONDS, "the record", setup.children, poll_seconds=0.2)
    time.sleep(QUIET_SECONDS)


def _processes(setup: Setup) -> list[psutil.Process]:
    return tree([psutil.Process(child.process.pid) for child in setup.children])


def _cpu(setup: Setup) -> float:
    return sum(sum(process.cpu_times()[:4]) for process in _processes(setup))


def _own_cpu() -> float:
    """Return the CPU seconds of this process and all its descendants."""
    return sum(sum(process.cpu_times()[:4]) for process in tree([psutil.Process(os.getpid())]))


class _Upstream:
    """The upstream's process (benchmarks.gateway_upstream)."""

    def __init__(self, directory: Path, seed: int) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        options = ["--port", str(port), "--seed", str(seed), "--step-seconds", str(STEP_SECONDS)]
        self._child = Child("upstream", [sys.executable, "-m", "benchmarks.gateway_upstream", *options], directory / "upstream.log")

    def __enter__(self) -> _Upstream:
        wait_until(lambda: answers(f"{self.url}/is_paused"), 20, "the upstream", [self._child])
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()


class _Client:
    """The client's process (benchmarks.gateway_client)."""

    def __init__(self, seed: int) -> None:
        command = [sys.executable, "-m", "benchmarks.gateway_client", "--seed", str(seed)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> _Client:
        assert self._process.stdout
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, kind: Kind, connections: int, count: int, *urls: str) -> list[Part]:
        """Have so many calls made, of all addresses together; what each answered."""
        assert self._process.stdin
        assert self._process.stdout
        addresses = [url + PATH for url in urls]
        self._process.stdin.write(msgspec.json.encode(Order(addresses, kind == Kind.STREAM, connections, count)) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with exit code {self._process.wait()}")
        parts = msgspec.json.decode(line, type=dict[str, Part])
        return [parts[address] for address in addresses]


def _print_table(figures: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':52}" + "".join(f"{name:>18}" for name in figures))
    for key, label in ROWS.items():
        print(f"{label:52}" + "".join(f"{column[key]:>18,}" if key in column else f"{'':>18}" for column in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
