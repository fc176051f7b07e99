"""`spangrad up --ray` on two nodes of a real Ray cluster: places, addresses, restarts, nodes that die, and nothing left at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.queue.client import QueueClient
from spangrad.errors import SpangradError
from spangrad.http.queue_messages import NewRollout
from spangrad.processes import Child, free_ports, own_command, wait_until
from spangrad.supervisor.placement import Bundle, BundleGroup
from spangrad.supervisor.ray_services import RayCluster
from spangrad.supervisor.run_directory import status_of
from tests.support.fake_engine import FakeEngine
from tests.support.servers import service_addresses
from tests.support.worker_kills import lives

HOME, OTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of the nodes: not loopback's usual one, so that it takes tokens to bind them; what goes there stays on this machine."""
ROOT = Path(__file__).resolve().parents[2]
NODE_OPTIONS = ("--block", "--disable-usage-stats", f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0")
QUICK = {"RAY_health_check_period_ms": "300", "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
UP = """
import sys
from commands.services import places, up
everything = places.training_services
places.training_services = lambda *given: tuple(service for service in everything(*given) if service.name != "train")
up.up(*sys.argv[2:], ray=sys.argv[1])
"""
"""`spangrad up` without a trainer, whose imports take longer than everything else."""
AGENT = """
import json, os, sys, urllib.request
sys.stdin.read()
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "rome?"}], "temperature": 1}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
print(urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).status)
"""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass
class Nodes:
    """Nodes of a cluster, which are processes of this machine."""

    directory: Path
    sockets: str
    port: int = field(default_factory=lambda: free_ports(1)[0])
    other: Child | None = None

    @property
    def address(self) -> str:
        return f"{HOME}:{self.port}"

    def start(self, name: str, *options: str) -> Child:
        ray = str(Path(sys.executable).with_name("ray"))
        node = Child(name, [ray, "start", *NODE_OPTIONS, *options], self.directory / f"{name}.log", QUICK)
        wait_until(lambda: "Ray runtime started" in node.log.read_text(), 120, name, [node])
        return node

    def start_head(self) -> Child:
        head = [f"--node-ip-address={HOME}", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.sockets}"]
        return self.start("head", "--head", "--num-cpus=6", *head)

    def start_other(self) -> None:
        self.other = self.start("other", f"--address={self.address}", f"--node-ip-address={OTHER}", "--num-cpus=2")

    def kill_other(self) -> None:
        """Kill all processes of the node at once, as a machine dies."""
        assert self.other
        for process in [*psutil.Process(self.other.process.pid).children(recursive=True), psutil.Process(self.other.process.pid)]:
            process.kill()
        self.other.stop()
        self.other = None


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sockets:  # the path of a socket must be short
        started = Nodes(tmp_path_factory.mktemp("nodes"), sockets)
        head = started.start_head()
        try:
            started.start_other()
            yield started
        finally:
            for node in (started.other, head):
                if node:
                    node.stop()


@dataclass
class Run:
    """A supervisor in a process of its own, and its status."""

    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in (status_of(self.directory) or {"services": []})["services"]}

    def is_ready(self, *names: str) -> bool:
        assert self.process.poll() is None, self.output()
        services = self.services
        return bool(services) and set(names) <= set(services) and all(services[name]["state"] == "ready" for name in names or services)

    def output(self) -> str:
        return (self.directory.parent / "out").read_text()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the services, and their actors."""
        running = [psutil.Process(each["pid"]) for each in self.services.values() if each["pid"]]
        return [process for service in running for process in (service, service.parent()) if process]


def start(directory: Path, code: str, *words: str, env: dict[str, str] | None = None) -> Run:
    with (directory / "out").open("wb") as out:
        command = [sys.executable, "-P", "-c", code, *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return Run(directory / "up", subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT))


async def until(reached: Callable[[], bool], run: Run, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"{json.dumps(run.services, indent=1)}\n{run.output()}"
        await asyncio.sleep(0.1)


def settings(engine_port: int) -> dict[str, str]:
    values = {
        **service_addresses(engine_port),
        "ENGINE__MODEL": "m",
        "UP__DIRECTORY": "up",
        "UP__WORKERS": 2,
        "RUNNER__RUN_ID": "run",
        **{f"{name}__TOKEN": f"the token of {name}" for name in ("STORE", "GATEWAY", "QUEUE")},
    }
    return {f"SPANGRAD_{name}": str(value) for name, value in values.items()}


async def test_up_on_ray_places_services_and_restarts_those_that_end(nodes: Nodes, tmp_path: Path) -> None:
    engine = FakeEngine()
    variables = settings(engine.port)
    (tmp_path / "agent.py").write_text(AGENT)
    async with engine.running():
        run = start(tmp_path, UP, nodes.address, "--", sys.executable, "agent.py", env=variables)
        try:
            await until(run.is_ready, run, 120)
            where = {name: each["node"] for name, each in run.services.items()}
            assert {name: where[name] for name in ("store", "queue", "gateway")} == dict.fromkeys(("store", "queue", "gateway"), HOME)
            assert {where["worker-1"], where["worker-2"]} == {HOME, OTHER}
            assert f"worker-2: 1 CPU on {where['worker-2']}" in run.output()
            queue = f"http://{HOME}:{variables['SPANGRAD_QUEUE__PORT']}"
            async with QueueClient(queue, "the token of QUEUE") as client:

                async def succeed(name: str) -> None:
                    rollouts = [NewRollout(task_id=name, input=b"1", group_id=name, rollout_id=f"{name}-{i}") for i in range(4)]  # type: ignore[arg-type]
                    await client.enqueue("run", rollouts)
                    for rollout in rollouts:
                        while (state := (await client.rollout(str(rollout.rollout_id))).state) != "succeeded":
                            assert state not in {"dead", "cancelled"}, run.output()
                            await asyncio.sleep(0.1)

                await succeed("first")
                gateway = run.processes()[list(run.services).index("gateway") * 2]
                gateway.kill()
                await until(lambda: run.services["gateway"]["restarts"] == 1 and run.is_ready("gateway"), run)
                worker = psutil.Process(run.services["worker-2"]["pid"])
                actor = worker.parent()
                assert actor
                actor.kill()
                await until(lambda: run.services["worker-2"]["restarts"] == 1 and run.is_ready("worker-2"), run)
                assert not lives(worker)
                await succeed("second")
            running = run.processes()
            shown = await asyncio.to_thread(
                subprocess.run, own_command("ps"), cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True
            )
            assert "its actor on" not in shown.stdout
            assert OTHER in shown.stdout
            down = await asyncio.to_thread(
                subprocess.run, own_command("down"), cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True
            )
            assert down.stdout == "every service has ended\n"
            assert run.process.wait(60) == 0
            await until(lambda: not any(map(lives, running)), run, 60)
        finally:
            run.process.kill()
            run.process.wait()


SLEEPERS = """
import sys, time
from pathlib import Path
from spangrad.supervisor.placement import Bundle, BundleGroup
from spangrad.supervisor.ray_services import RayCluster
from spangrad.supervisor.run_directory import RunDirectory
from spangrad.supervisor.service import RestartPolicy, ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
names = ("home", "a", "b")
command = (sys.executable, "-c", "import time; time.sleep(600)")
services = [ServiceSpec(name, command, Path("up/logs") / f"{name}.log") for name in names]
groups = [BundleGroup((Bundle("home"),), home=True), BundleGroup((Bundle("a"), Bundle("b")), "SPREAD")]
with RunDirectory(Path("up")) as run, RayCluster(sys.argv[1]) as cluster:
    cluster.reserve(groups, print)
    with Supervisor(services, print, policy=RestartPolicy(first_seconds=0.2), launch=cluster.launch) as supervisor:
        while True:
            supervisor.poll()
            run.publish({"services": supervisor.status()})
            time.sleep(0.05)
"""


async def test_services_of_a_dead_node_move_and_end_with_a_killed_supervisor(nodes: Nodes, tmp_path: Path) -> None:
    run = start(tmp_path, SLEEPERS, nodes.address)
    try:
        await until(run.is_ready, run)
        where = {name: each["node"] for name, each in run.services.items()}
        assert where["home"] == HOME
        assert {where["a"], where["b"]} == {HOME, OTHER}
        moved = next(name for name, node in where.items() if node == OTHER)
        on_dead_node = psutil.Process(run.services[moved]["pid"])
        nodes.kill_other()
        await until(lambda: run.services[moved]["node"] == HOME and run.is_ready(moved), run)
        assert not lives(on_dead_node)
        assert f"{moved} ended (exit code -9)" in run.output()
        running = run.processes()
        assert len(running) == 6
        run.process.kill()
        run.process.wait()
        await until(lambda: not any(map(lives, running)), run, 60)
    finally:
        run.process.kill()
        run.process.wait()


def test_cluster_that_lacks_resources_or_does_not_answer_is_named(nodes: Nodes, tmp_path: Path) -> None:
    events: list[str] = []
    with RayCluster(nodes.address) as cluster:
        groups = [BundleGroup((Bundle("store"),), home=True), BundleGroup((Bundle("engine", 1, 4),))]
        with pytest.raises(
            SpangradError, match=rf"no node has room for engine \(1 CPU and 4 GPU on one node\); .* {HOME} \(6 CPU, 0 GPU\)"
        ):
            cluster.reserve(groups, events.append, seconds=1)
    assert [event.partition(":")[0] for event in events] == ["store", "waiting for the cluster"]
    (port,) = free_ports(1)
    refused = subprocess.run(
        own_command("up", "--ray", f"{HOME}:{port}", "--set", "engine.model=m"), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert f"no Ray cluster let this process in at --ray {HOME}:{port} (nothing answers at" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
