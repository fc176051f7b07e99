"""verl's stock trainer steps by HTTP alone: its rollouts are made by a real worker through vLLM, gateway, store and builder."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from spangrad.processes import Child, own_command
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from tests.support.processes import OF_VERL
from tests.support.runners import queue_settings, serving
from tests.support.servers import raw_server
from transition_builder.loop import build_once

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "tests/agents"
SAMPLES, ROLLOUTS = 2, 4
OVERRIDES = """
actor_rollout_ref.model.use_remove_padding=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.rollout.name=served
actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
actor_rollout_ref.rollout.agent.default_agent_loop=served
actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.hybrid_engine=False
actor_rollout_ref.rollout.n_gpus_per_node=1
actor_rollout_ref.rollout.nnodes=1
algorithm.adv_estimator=grpo
data.train_batch_size=2
data.max_prompt_length=64
data.max_response_length=8
data.dataloader_num_workers=0
reward.num_workers=1
trainer.device=cpu
trainer.logger=[file]
trainer.n_gpus_per_node=1
trainer.nnodes=1
trainer.resume_mode=disable
trainer.save_freq=-1
trainer.test_freq=-1
trainer.total_training_steps=1
trainer.v1.trainer_mode=served
trainer.val_before_train=False
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=16
+ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.object_store_memory=200000000
"""


def turn(prompt: list[int], sampled: list[int], version: int = 0) -> dict[str, Any]:
    ones = [1] * len(sampled)
    return {"prompt_ids": prompt, "response_ids": sampled, "logprobs": [-0.5] * len(sampled), "loss_mask": ones, "versions": [[0, version]]}


def trajectory(*turns: dict[str, Any], reward: float | None = 0.25) -> dict[str, Any]:
    rewards = [{"name": "reward", "value": reward}] if reward is not None else []
    names = {"rollout_id": "r", "failure": "", "detail": "it broke", "drops": [{"reason": "aborted"}]}
    return {**names, "turns": list(turns), "rewards": rewards, "total_reward": reward, "stage_seconds": {"run": 2.0}}


@pytest.fixture(scope="module")
def client() -> Iterator[ModuleType]:
    """The file, imported as verl does it on a machine without an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OF_VERL.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(ROOT / "clients"))
        yield importlib.import_module("verl_agent_loop")


def test_outputs_of_a_trajectory_are_rows_in_verls_form(client: ModuleType) -> None:
    loop = object.__new__(client.ServedAgentLoop)
    loop.rollout_config = SimpleNamespace(response_length=5)
    extended = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 8], [5], version=2)]
    output = loop._outputs(trajectory(*extended))
    columns = {name: values.tolist() for name, values in output.as_dict().items() if isinstance(values, torch.Tensor)}
    assert columns == {
        "prompts": [1, 2],
        "responses": [3, 4, 8, 5],
        "response_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-0.5, -0.5, 0.0, -0.5],
        "rm_scores": [0, 0, 0, 0.25],
    }
    facts = {name: output.extra_fields[name] for name in ("reward_extra_info", "min_global_steps", "max_global_steps")}
    assert facts == {"reward_extra_info": {"reward": 0.25}, "min_global_steps": 0, "max_global_steps": 2}
    apart, cut = loop._outputs(trajectory(turn([1], [2]), turn([7], [3] * 9)))
    assert (apart.response_ids, cut.response_ids, cut.reward_score) == ([2], [3] * 5, 0.25), "cut to verl's length"


@pytest.mark.parametrize(("turns", "reward"), [([], 0.5), ([turn([1], [2])], None)])
def test_outputs_without_turns_or_reward_raise(client: ModuleType, turns: list[dict[str, Any]], reward: float | None) -> None:
    loop = object.__new__(client.ServedAgentLoop)
    with pytest.raises(RuntimeError, match=r"rollout r has nothing to train on \(aborted\): it broke"):
        loop._outputs(trajectory(*turns, reward=reward))


async def test_trajectory_of_a_service_that_never_answers_is_given_up(client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SPARE_SECONDS", 0.1, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        loop = served_loop(client, f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3)
        with pytest.raises(RuntimeError, match=r"gave no trajectory of k in 0\.3 s"):
            await asyncio.wait_for(loop._trajectory({"key": "k"}), 60)


async def test_trajectory_refused_by_a_proxy_in_plain_text_raises_at_once(client: ModuleType) -> None:
    with raw_server([b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"]) as url:
        loop = served_loop(client, url, seconds=600.0)
        with pytest.raises(RuntimeError, match=r"refuses the request \(HTTP 404: none\)"):
            await asyncio.wait_for(loop._trajectory({"key": "k"}), 60)


def served_loop(client: ModuleType, url: str, seconds: float) -> Any:
    """Return an agent loop without verl's configuration."""
    loop = object.__new__(client.ServedAgentLoop)
    loop._url, loop._seconds = url, seconds
    return loop


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(580)
async def test_stock_verl_trainer_steps_on_trajectories_of_the_service(gateway: Settings, tiny_model: Path, tmp_path: Path) -> None:
    queue = queue_settings(f"sqlite:///{tmp_path}/q.db")
    settings = gateway.model_copy(update={"queue": queue.queue})
    values = {
        "store.url": settings.store.url,
        "store.otlp_endpoint": settings.store.otlp_endpoint,
        "gateway.url": settings.gateway.url,
        "queue.url": settings.queue.url,
        "runner.run_id": "verl",
        "runner.directory": tmp_path / "runner",
    }
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    async with serving(settings) as (client, _):
        worker = Child(
            "worker", own_command("worker", "--agent", "plain_agents:ask_row", "--directory", str(AGENTS), *words), tmp_path / "log"
        )
        trainer = _stock_trainer(str(settings.queue.url), tiny_model, tmp_path)
        try:
            while trainer.running:
                worker.check()
                await asyncio.to_thread(build_once, settings)
                await asyncio.sleep(0.2)
        finally:
            trainer.stop()
            worker.stop()
        assert trainer.process.returncode == 0, trainer.tail(60)
        assert (await client.run("verl")).states == {"succeeded": SAMPLES * ROLLOUTS}
    (line,) = [json.loads(line) for line in _metrics(tmp_path).read_text().splitlines()]
    metrics = line["data"]
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["critic/score/max"] <= 1
    assert metrics["training/rollout_probs_diff_max"] < 0.02, "its probabilities, in bfloat16, are those that the engine sampled with"
    client = connect(settings.store)
    recorded = client.query("SELECT count(), sum(length(ResponseIds)) FROM spangrad.transitions WHERE RunId = 'verl'").result_rows
    client.close()
    assert recorded == [(SAMPLES * ROLLOUTS, metrics["response_length/mean"] * SAMPLES * ROLLOUTS)], "it trained what was recorded"


def _stock_trainer(queue_url: str, model: Path, directory: Path) -> Child:
    """Verl's own entry point, with the client and what verl lacks on a CPU."""
    rows = [
        {
            "data_source": "",
            "prompt": [{"role": "user", "content": f"say {city}"}],
            "reward_model": {"style": "rule", "ground_truth": "clock"},
            "extra_info": {"index": number, "city": city},
        }
        for number, city in enumerate(["lima", "rome"])
    ]
    pl.DataFrame(rows).write_parquet(directory / "rows.parquet")
    (directory / "loop.yaml").write_text(
        f"- {{name: served, _target_: verl_agent_loop.ServedAgentLoop, url: '{queue_url}', run_id: verl}}\n"
    )
    files = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": directory / "loop.yaml",
        "data.train_files": directory / "rows.parquet",
        "hydra.run.dir": directory / "hydra",
        "data.val_files": directory / "rows.parquet",
        "trainer.default_local_dir": directory / "checkpoints",
    }
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "clients", ROOT / "tests/programs", ROOT))),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform,verl_cpu,verl_agent_loop",
        "VERL_FILE_LOGGER_ROOT": str(directory / "metrics"),
        "CUDA_VISIBLE_DEVICES": "0",  # of which Ray is told that there is one
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *OVERRIDES.split(), *(f"{name}={value}" for name, value in files.items())]
    return Child("verl", command, directory / "verl.log", variables)


def _metrics(directory: Path) -> Path:
    (file,) = (directory / "metrics").rglob("*.jsonl")
    return file
