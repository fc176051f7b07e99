"""`spangrad train` with workers under Ray, as processes over a real span store: what it makes, and what is left when it ends in any way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
from safetensors.numpy import load_file

from spangrad.errors import TrainerError
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.types import VersionStatus
from tests.support.built_rollouts import BuiltRollouts
from tests.support.policies import changed, sampled_rows, trainer_key, trainer_settings
from tests.support.trainers import written
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.distributed.cluster import Cluster
from trainer.ledger.ledger import Ledger
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4
LOADED = "is loaded on cpu"
"""Text of the log once the weights are loaded."""


@dataclass
class Service:
    """A store that holds STEPS groups, and trainers of it, each on a branch of its own."""

    store: StoreSettings
    model: Path
    directory: Path
    run: str = field(default_factory=lambda: f"ray-{uuid.uuid4().hex[:8]}")

    def settings(self, branch: str) -> Settings:
        return Settings(
            store=self.store,
            trainer=trainer_settings(run_id=self.run, branch=f"{self.run}-{branch}", directory=self.directory / branch, model=self.model),
        )

    def start(self, branch: str, environment: Mapping[str, str] | None = None, **changes: object) -> subprocess.Popen[str]:
        values: dict[str, object] = {
            "store.url": self.store.url, "store.otlp_endpoint": self.store.otlp_endpoint, "trainer.weight_sync.publish": "false",
            "trainer.directory": self.directory / branch, "trainer.sampling.groups_per_batch": 1,
            "trainer.optim.learning_rate": 1e-3, "trainer.sampling.max_staleness": 99,
            "trainer.branch": f"{self.run}-{branch}", "trainer.run_id": self.run, "trainer.model": self.model,
            **{f"trainer.{trainer_key(name)}": value for name, value in changes.items()},
        }  # fmt: skip
        words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "spangrad", "train", "--once", *words]
        with self.log(branch).open("a") as log:
            return subprocess.Popen(command, stderr=log, text=True, env={**os.environ, "SPANGRAD_CONFIG": "", **(environment or {})})

    def log(self, branch: str) -> Path:
        return self.directory / f"{branch}.log"

    def run_whole(self, branch: str, environment: Mapping[str, str] | None = None, **changes: object) -> None:
        assert self.start(branch, environment, **changes).wait(300) == 0, self.log(branch).read_text()

    def story(self, branch: str) -> list[tuple[int, VersionStatus | None, list[str]]]:
        """Each version with its rollouts; a status of None is a step under way."""
        settings = self.settings(branch).trainer
        ledger = Ledger(settings.directory, settings.policy, settings.branch)
        try:
            return [
                (one.version, one.status, sorted(row.rollout_id for row in ledger.batch(one.policy_version.batch_id or "")))
                for one in ledger.versions()
            ]
        finally:
            ledger.close()

    def trained(self, branch: str) -> list[list[str]]:
        """The rollouts of each committed batch, in order."""
        if not (self.settings(branch).trainer.directory / "ledger.db").exists():
            return []
        return [batch for _, status, batch in self.story(branch) if status is VersionStatus.COMMITTED and batch]

    def weights(self, branch: str, version: int) -> dict[str, np.ndarray]:
        settings = self.settings(branch).trainer
        return load_file(checkpoint.version_directory(settings.directory, settings.policy, settings.branch, version) / checkpoint.WEIGHTS)

    def agree(self, one: str, other: str) -> bool:
        """Whether what training made of the model on two branches differs by rounding alone.

        All weights are judged together: Adam moves one whose gradient is rounding noise as far as any other, and so in any direction.
        """
        begun, left, right = load_file(self.model / "model.safetensors"), self.weights(one, STEPS), self.weights(other, STEPS)
        return distance(left, right) < 1e-4 * distance(left, begun)


@pytest.fixture(scope="module")
def service(store: StoreSettings, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    made = Service(store, tiny_model, tmp_path_factory.mktemp("ray"))
    world = BuiltRollouts(made.settings("world"), tiny_model)
    for i in range(STEPS):
        world.group(f"g{i}", [1.0, 0.0, 0.25], calls=({}, {}))
    return made


@contextlib.contextmanager
def loaded(service: Service, branch: str) -> Generator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A trainer with two workers that has loaded its weights, and every process that it started; at the end none may be left."""
    trainer = service.start(branch, workers__per_node=2)
    try:
        end = time.monotonic() + 240
        while LOADED not in (service.log(branch).read_text() if service.log(branch).exists() else ""):
            assert trainer.poll() is None, service.log(branch).read_text()
            assert time.monotonic() < end, service.log(branch).read_text()
            time.sleep(0.02)
        family = psutil.Process(trainer.pid).children(recursive=True)
        yield trainer, family
        trainer.wait(120)
    finally:
        trainer.kill()
        trainer.wait()
    # Ray's own agents notice the death of a cluster that could not say goodbye after a minute or two.
    wait_until(lambda: not any(lives(one) for one in family), 240, "the end of every process of the trainer's")


def lives(process: psutil.Process) -> bool:
    """Whether it runs; a process that was killed stays visible where nobody asks for its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers_of(family: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in family if any("ray::WorkerDict" in word for word in one.cmdline())]


def listening(family: list[psutil.Process]) -> set[str]:
    """The addresses at which processes of a trainer listen."""
    return {found.laddr.ip for one in family for found in one.net_connections("inet") if found.status == psutil.CONN_LISTEN}


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in one) ** 0.5


def test_train_with_two_ray_workers_equals_one_process(service: Service) -> None:
    service.run_whole("alone")
    with loaded(service, "two") as (trainer, family):
        assert len(workers_of(family)) == 2
        assert listening(family) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        directories = {Path(word.split("=", 1)[1]).parents[2] for one in family for word in one.cmdline() if "raylet_socket_name=" in word}
    assert trainer.returncode == 0, service.log("two").read_text()
    assert [(path.name[:4], path.exists()) for path in directories] == [("ray-", False)]
    assert service.story("two") == service.story("alone")
    assert len(service.story("two")) == STEPS + 1
    assert service.agree("alone", "two")
    assert not list(Path.home().glob(".ray/auth_token")), "the token of a cluster of its own is written nowhere"
    service.run_whole("one", workers__per_node=1)
    alone, one = (service.weights(branch, STEPS) for branch in ("alone", "one"))
    assert all(np.array_equal(alone[name], one[name]) for name in alone)


def test_train_on_two_nodes_of_external_ray_cluster(service: Service, tmp_path: Path) -> None:
    """The commands of docs/start/scaling.md, both nodes on this machine."""
    (port,) = free_ports(1)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    where = {"ray_address": f"127.0.0.1:{port}", "nodes": 2, "workers__per_node": 1}
    with contextlib.ExitStack() as nodes:
        directory = nodes.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))  # the path of a socket must be short
        head = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"]
        for name, words in {"head": head, "other": [f"--address=127.0.0.1:{port}"]}.items():
            node = Child(name, [*start, *words], tmp_path / name, token)
            nodes.callback(node.stop, 60)
            wait_until(lambda node=node: "Ray runtime started" in node.log.read_text(), 120, name, [node])
        service.run_whole("nodes", token, **where)
        stranger = service.start("stranger", {**token, "RAY_AUTH_TOKEN": "another"}, **where)
        assert stranger.wait(300) == 1
    assert "no Ray cluster let this trainer in at trainer.workers.ray_address" in service.log("stranger").read_text()
    service.run_whole("one process")
    assert service.agree("nodes", "one process")


def test_train_with_killed_ray_worker_undoes_lease_and_next_run_resumes(service: Service) -> None:
    """The next start has another number of workers."""
    with loaded(service, "killed") as (trainer, family):
        workers_of(family)[-1].kill()
    assert trainer.returncode == 1, service.log("killed").read_text()
    assert "of 2 died in `" in service.log("killed").read_text()
    assert all(status is not None for _, status, _ in service.story("killed"))
    done = service.trained("killed")
    service.run_whole("killed")
    story = service.trained("killed")
    assert story[: len(done)] == done
    assert story == [[f"g{i}-{j}" for j in range(3)] for i in range(STEPS)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_train_stopped_or_killed_leaves_no_process(service: Service, number: signal.Signals) -> None:
    branch = number.name.lower()
    with loaded(service, branch) as (trainer, _):
        trainer.send_signal(number)
    if number is signal.SIGTERM:
        assert trainer.returncode == 0
        assert "stopped by SIGTERM" in service.log(branch).read_text()
        assert all(status is not None for _, status, _ in service.story(branch)), "the lease is undone"


KILLED = {
    "trainer": "-m spangrad train",
    "rank": "ray::WorkerDict",
    "queue": "ray::TransferQueueController",
    "rows": "ray::SimpleStorageUnit",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs_server ",
}
"""Words of the command line of each process that is killed."""
KILLS = int(os.environ.get("FAULTS_KILLS", "50"))


@pytest.mark.timeout(4 * 3600)
def test_train_with_processes_killed_at_random_points_trains_each_batch_once(service: Service) -> None:
    """Trainer, ranks, the queue of the rows and Ray itself, at any instant from the start on; FAULTS_SEED repeats a run."""
    chance, fell, runs = Random(int(os.environ.get("FAULTS_SEED", "1"))), Counter[str](), 0
    expected = [[f"g{i}-{j}" for j in range(3)] for i in range(STEPS)]
    family: set[psutil.Process] = set()
    while fell.total() < KILLS:
        runs += 1
        branch, done = f"chance-{runs}", list[list[str]]()
        while len(done) < STEPS:
            trainer = service.start(branch, workers__per_node=2, lease_seconds=3)
            kind = chance.choice(list(KILLED)) if fell.total() < KILLS else ""
            killed = bool(kind) and kill_at_random(service, branch, trainer, kind, chance, family)
            code = trainer.wait(600)
            fell[kind] += killed
            assert code in ({0, 1, -signal.SIGKILL} if killed else {0}), (kind, service.log(branch).read_text()[-3000:])
            done = service.trained(branch)
            assert done == expected[: len(done)], (kind, "a batch was repeated or skipped")
    wait_until(lambda: not any(lives(one) for one in family), 240, "the end of every process of the trainers'")
    print(f"{fell.total()} kills in {runs} runs of {STEPS} steps: {dict(sorted(fell.items()))}")


def kill_at_random(
    service: Service, branch: str, trainer: subprocess.Popen[str], kind: str, chance: Random, family: set[psutil.Process]
) -> bool:
    """Kill a process of a trainer, at an instant of its start or of its steps; return whether there was one to kill."""
    log = service.log(branch)
    seen, in_start, patience = log.read_text().count(LOADED), chance.random() < 0.3, chance.uniform(0, 20 if chance.random() < 0.3 else 3)
    end = time.monotonic() + 240
    while not in_start and trainer.poll() is None and log.read_text().count(LOADED) == seen and time.monotonic() < end:
        time.sleep(0.02)
    if not in_start or kind == "trainer":
        time.sleep(patience)
    while trainer.poll() is None and time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children(recursive=True)]
            family |= {*whole[1:]}
            named = [one for one in whole if KILLED[kind] in " ".join([*one.cmdline(), ""])]
            if named:
                named[-1].kill()
                return True
        time.sleep(0.05)
    return False


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters beside a reference": {"lora__rank": 2, "kl_coef": 0.05},
    "bfloat16": {"dtype": "bf16"},
    "entropy": {"entropy_coef": 0.01, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_ray_workers_restarted_continue_exactly(
    name: str, tiny_model: Path, tmp_path: Path, close: Callable[[VerlOptimizer], VerlOptimizer]
) -> None:
    """Two workers, killed after a step, and two others that read what the first wrote; and one process does the same but for rounding."""
    settings = trainer_settings(learning_rate=1e-3, mini_batches=2, workers__per_node=2, model=tiny_model, **VARIANTS[name])
    first, alone = close(VerlOptimizer(tiny_model, settings)), VerlOptimizer(tiny_model, changed(settings, {"workers__per_node": 0}))
    assert first.step(rows(tiny_model, first))["updated"] == alone.step(rows(tiny_model, alone))["updated"] == 2
    made = written(first, tiny_model, tmp_path)
    expected = first.step(rows(tiny_model, first, current=False))
    alone.step(rows(tiny_model, alone, current=False))
    held = dict(first.weights())
    first.close()
    again = close(VerlOptimizer(tiny_model if settings.lora.rank else made.path, settings))
    again.load_state(made.path)
    assert again.step(rows(tiny_model, again, current=False)) == expected
    found = dict(again.weights())
    assert all(np.array_equal(found[name], value) for name, value in held.items())
    near = 5e-3 if settings.dtype == "bf16" else 1e-5
    assert max(float(np.abs(held[name] - value).max()) for name, value in alone.weights()) < near


@pytest.mark.parametrize("ranks", [1, 4])
def test_state_of_two_ranks_resumes_on_another_number(
    ranks: int, tiny_model: Path, tmp_path: Path, close: Callable[[VerlOptimizer], VerlOptimizer]
) -> None:
    settings = trainer_settings(learning_rate=1e-3, mini_batches=2, workers__per_node=2)
    first = close(VerlOptimizer(tiny_model, settings))
    first.step(rows(tiny_model, first))
    made = written(first, tiny_model, tmp_path)
    expected, held = first.step(rows(tiny_model, first, current=False)), dict(first.weights())
    first.close()
    again = close(VerlOptimizer(made.path, changed(settings, {"workers__per_node": ranks})))
    again.load_state(made.path)
    resumed = again.step(rows(tiny_model, again, current=False))
    assert [resumed[name] for name in ("loss", "grad_norm")] == pytest.approx([expected[name] for name in ("loss", "grad_norm")], rel=1e-5)
    assert max(float(np.abs(held[name] - value).max()) for name, value in again.weights()) < 1e-5


def test_ray_worker_that_fails_alone_ends_others(
    tiny_model: Path, close: Callable[[VerlOptimizer], VerlOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first would wait for the second for ever."""
    import ray

    engine = close(VerlOptimizer(tiny_model, trainer_settings(workers__per_node=2)))
    from trainer.distributed import worker_group

    monkeypatch.setattr(worker_group, "_SETTLE_SECONDS", 2.0)
    second = engine._workers._trainer.actor_rollout_wg.workers[1]  # type: ignore[union-attr]
    ray.get(second.__ray_call__.remote(lambda self: self.worker_dict["actor"]._models.clear()))
    with pytest.raises(TrainerError, match=r"worker 1 of 2 failed \(.*KeyError.*and the others were ended"):
        engine.step(rows(tiny_model, engine))


def test_ray_cluster_that_starts_too_slowly_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for its node during 30 s; the first start never hears of it."""
    from ray._private import services

    answer, asked = services.get_node, [0]

    def late(*arguments: Any) -> Any:
        asked[0] += 1
        if asked[0] == 1:
            raise ValueError("timed out")
        return answer(*arguments)

    monkeypatch.setattr(services, "get_node", late)
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(trainer_settings(workers__per_node=1))
    begun = [" ".join(one.cmdline()) for one in set(psutil.Process().children(recursive=True)) - before if lives(one)]
    assert sum("/raylet/raylet" in words for words in begun) == 1
    cluster.close()
    cluster.close()
    wait_until(lambda: not any(lives(one) for one in set(psutil.Process().children(recursive=True)) - before), 60, "the end of Ray")
    assert cluster.directory is not None
    assert not cluster.directory.exists()


@pytest.fixture
def close() -> Iterator[Callable[[VerlOptimizer], VerlOptimizer]]:
    """Ends an engine's workers at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda engine: stack.enter_context(contextlib.closing(engine))


def rows(model: Path, engine: VerlOptimizer, *, current: bool = True) -> Batch:
    frame = pl.DataFrame(sampled_rows(model, 11, temperature=1.0, seed=5, Version=0 if current else -1))
    return layout(separate(frame, pl.Series(np.linspace(-1, 1, 11))), lineage=[0], divisor=engine.data_parallel_size)
