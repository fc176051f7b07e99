"""`spangrad train` with workers under Ray, as processes over a real span store: what it makes, and what is left when it ends in any way."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest

from spangrad.errors import TrainerError
from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import StoreSettings
from tests.support.policies import changed, sampled_rows, trainer_settings
from tests.support.trainer_commands import LIMIT_SECONDS, STEPS, TrainerCommands, loaded, with_groups
from tests.support.trainers import written
from tests.support.worker_kills import lives
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.distributed.cluster import Cluster
from trainer.optim.optimizer import VerlOptimizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(store: StoreSettings, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainerCommands:
    return with_groups(store, tiny_model, tmp_path_factory.mktemp("ray"))


def workers_of(family: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in family if any("ray::WorkerDict" in word for word in process.cmdline())]


def listening(family: list[psutil.Process]) -> set[str]:
    """The addresses at which processes of a trainer listen."""
    return {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_train_with_two_ray_workers_equals_one_process(service: TrainerCommands) -> None:
    service.run_whole("alone")
    with loaded(service, "two") as (trainer, family):
        assert len(workers_of(family)) == 2
        assert listening(family) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        directories = {
            Path(word.split("=", 1)[1]).parents[2] for process in family for word in process.cmdline() if "raylet_socket_name=" in word
        }
    assert trainer.returncode == 0, service.log("two").read_text()
    assert [(path.name[:4], path.exists()) for path in directories] == [("ray-", False)]
    assert service.story("two") == service.story("alone")
    assert len(service.story("two")) == STEPS + 1
    assert service.agree("alone", "two")
    assert not list(Path.home().glob(".ray/auth_token")), "the token of a cluster of its own is written nowhere"
    service.run_whole("one", workers__per_node=1)
    alone, single = (service.weights(branch, STEPS) for branch in ("alone", "one"))
    assert all(np.array_equal(alone[name], single[name]) for name in alone)


def test_ppo_with_critic_from_stored_rollouts_is_alike_on_any_number_of_ranks(service: TrainerCommands) -> None:
    """Loss, gradient and critic agree in each step without ranks and with verl's trainer on one and on two gloo ranks."""
    compared = ("loss", "grad_norm", "critic_loss", "advantage_std", "updated")
    steps = dict[int, list[list[float]]]()
    for ranks in (0, 1, 2):
        branch = f"ppo-{ranks}"
        service.run_whole(branch, workers__per_node=ranks, estimator="gae", critic_learning_rate=1e-4, learning_rate=1e-4)
        assert service.story(branch) == service.story("ppo-0")
        steps[ranks] = [[version.metrics[name] for name in compared] for version in service.committed(branch)]
    assert len(steps[0]) == STEPS
    assert all(values[compared.index("updated")] == 1 and values[compared.index("critic_loss")] > 0 for values in steps[0])
    for ranks in (1, 2):
        for measured, expected in zip(steps[ranks], steps[0], strict=True):
            assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5), ranks
        assert service.agree("ppo-0", f"ppo-{ranks}", 1e-3)


def test_train_on_two_nodes_of_external_ray_cluster(service: TrainerCommands, tmp_path: Path) -> None:
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
            wait_until(lambda node=node: "Ray runtime started" in node.log.read_text(), LIMIT_SECONDS, name, [node])
        service.run_whole("nodes", token, **where)
        stranger = service.start("stranger", {**token, "RAY_AUTH_TOKEN": "another"}, **where)
        assert stranger.wait(LIMIT_SECONDS) == 1
    assert "no Ray cluster let this trainer in at trainer.workers.ray_address" in service.log("stranger").read_text()
    service.run_whole("one process")
    assert service.agree("nodes", "one process")


def test_train_with_killed_ray_worker_undoes_lease_and_next_run_resumes(service: TrainerCommands) -> None:
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
def test_train_stopped_or_killed_leaves_no_process(service: TrainerCommands, number: signal.Signals) -> None:
    branch = number.name.lower()
    with loaded(service, branch) as (trainer, _):
        trainer.send_signal(number)
    if number is signal.SIGTERM:
        assert trainer.returncode == 0
        assert "stopped by SIGTERM" in service.log(branch).read_text()
        assert all(status is not None for _, status, _ in service.story(branch)), "the lease is undone"


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
    version = written(first, tiny_model, tmp_path)
    expected = first.step(rows(tiny_model, first, current=False))
    alone.step(rows(tiny_model, alone, current=False))
    held = dict(first.weights())
    first.close()
    again = close(VerlOptimizer(tiny_model if settings.lora.rank else version.path, settings))
    again.load_state(version.path)
    assert again.step(rows(tiny_model, again, current=False)) == expected
    restored = dict(again.weights())
    assert all(np.array_equal(restored[name], value) for name, value in held.items())
    near = 5e-3 if settings.dtype == "bf16" else 1e-5
    assert max(float(np.abs(held[name] - value).max()) for name, value in alone.weights()) < near


@pytest.mark.parametrize("ranks", [1, 4])
def test_state_of_two_ranks_resumes_on_another_number(
    ranks: int, tiny_model: Path, tmp_path: Path, close: Callable[[VerlOptimizer], VerlOptimizer]
) -> None:
    settings = trainer_settings(learning_rate=1e-3, mini_batches=2, workers__per_node=2)
    first = close(VerlOptimizer(tiny_model, settings))
    first.step(rows(tiny_model, first))
    version = written(first, tiny_model, tmp_path)
    expected, held = first.step(rows(tiny_model, first, current=False)), dict(first.weights())
    first.close()
    again = close(VerlOptimizer(version.path, changed(settings, {"workers__per_node": ranks})))
    again.load_state(version.path)
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
    begun = [" ".join(process.cmdline()) for process in set(psutil.Process().children(recursive=True)) - before if lives(process)]
    assert sum("/raylet/raylet" in words for words in begun) == 1
    cluster.close()
    cluster.close()
    wait_until(lambda: not any(lives(process) for process in set(psutil.Process().children(recursive=True)) - before), 60, "the end of Ray")
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
