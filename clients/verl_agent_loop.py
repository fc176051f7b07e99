"""Agent loop of verl whose rollouts are made by a rollout service (`POST /v1/process`), and the trainer that has no engine of its own.

In: verl's samples, and its sampling parameters. Out: verl's `AgentLoopOutput`s, with the token ids, logprobs and masks that the service
recorded. Invariant: tokens that the policy did not sample are masked; a sample that is tried again, under the same name, enqueues nothing.

Needs verl (0.9) and aiohttp, which verl brings; copy it beside your trainer. docs/guides/process.md says how verl is told of it.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

_WAIT_SECONDS = 600.0
"""Longest wait of one request, in seconds: the server's limit."""
_SPARE_SECONDS = 60.0
"""Time of a response beyond its wait, in seconds."""
_RETRY_SECONDS = 2.0
_MAY_PASS = frozenset({408, 429, 502, 503, 504})
_ROW_FIELDS = ("extra_info", "reward_model")
"""Columns of verl's data sets that an agent's input has beside the messages, where a row has them."""


class ServedAgentLoop(AgentLoopBase):
    """Agent loop that asks a rollout service for each trajectory."""

    def __init__(self, *args: Any, url: str, run_id: str, data_source: str | None = None, seconds: float = 3600.0, **kwargs: Any) -> None:
        """Store the arguments; those of `AgentLoopBase` follow from verl.

        Args:
            args: of the base class.
            url: URL of the queue.
            run_id: run of the rollouts, which the workers serve.
            data_source: handler of the rollouts. None: the row's own `data_source`.
            seconds: longest wait for a trajectory, in seconds.
            kwargs: of the base class.
        """
        super().__init__(*args, **kwargs)
        self._url, self._run_id, self._data_source, self._seconds = url.rstrip("/") + "/v1/process", run_id, data_source, seconds

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride] - verl's trainer takes several outputs
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of one rollout of a sample: an output for each row of tokens.

        Raises:
            RuntimeError: the service refuses the request, or stays away; or the rollout has no turn or no reward.
        """
        name = f"{kwargs.get('global_steps', 0)}/{kwargs.get('uid') or uuid.uuid4().hex}/{kwargs.get('session_id', 0)}"
        task_input = {"messages": _plain(kwargs["raw_prompt"]), **{key: _plain(kwargs[key]) for key in _ROW_FIELDS if key in kwargs}}
        source = self._data_source if self._data_source is not None else str(kwargs.get("data_source", ""))
        request = {
            "run_id": self._run_id,
            "key": name,
            "tasks": [{"task_id": str(kwargs.get("index", name)), "input": task_input, "data_source": source}],
            "sampling": _sampling(sampling_params, self.rollout_config.response_length),
        }
        return self._outputs(await self._trajectory(request))

    async def _trajectory(self, request: Mapping[str, Any]) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        end, reason = clock() + self._seconds, "it has not ended"
        token = os.environ.get("SPANGRAD_QUEUE__TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            while (left := end - clock()) > 0:
                wait = min(_WAIT_SECONDS, left)
                body, timeout = {**request, "wait_seconds": wait}, aiohttp.ClientTimeout(total=wait + _SPARE_SECONDS)
                try:
                    async with session.post(self._url, json=body, timeout=timeout) as response:
                        if response.status == 200:
                            trajectories = (await response.json(content_type=None))["trajectories"]
                            if trajectories:
                                return trajectories[0]
                            continue
                        reason = f"HTTP {response.status}: {(await response.text(errors='replace'))[:500]}"
                        if response.status not in _MAY_PASS:
                            raise RuntimeError(f"{self._url} refuses the request ({reason})")
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    reason = str(error) or type(error).__name__
                await asyncio.sleep(_RETRY_SECONDS)
        raise RuntimeError(f"{self._url} gave no trajectory of {request['key']} in {self._seconds:g} s ({reason})")

    def _outputs(self, trajectory: Mapping[str, Any]) -> AgentLoopOutput | list[AgentLoopOutput]:
        reward = trajectory["total_reward"]
        if not trajectory["turns"] or reward is None:
            failure = trajectory["failure"] or ", ".join(sorted({drop["reason"] for drop in trajectory["drops"]})) or "no reward"
            raise RuntimeError(f"rollout {trajectory['rollout_id']} has nothing to train on ({failure}): {trajectory['detail']}")
        seconds = trajectory["stage_seconds"]
        metrics = AgentLoopMetrics(generate_sequences=seconds.get("run", 0.0), compute_score=seconds.get("evaluate", 0.0))
        rewards = {item["name"]: item["value"] for item in trajectory["rewards"]}
        outputs: list[AgentLoopOutput] = []
        for row in merged(trajectory["turns"]):
            most = self.rollout_config.response_length
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=row["prompt_ids"],
                    response_ids=row["response_ids"][:most],
                    response_mask=row["mask"][:most],
                    response_logprobs=row["logprobs"][:most],
                    reward_score=reward,
                    num_turns=2 * len(trajectory["turns"]),
                    metrics=metrics,
                    extra_fields={
                        "reward_extra_info": rewards,
                        "min_global_steps": min(row["versions"], default=None),
                        "max_global_steps": max(row["versions"], default=None),
                        "rollout_id": trajectory["rollout_id"],
                    },
                )
            )
        return outputs[0] if len(outputs) == 1 else outputs


def merged(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of tokens: turns whose prompts begin with a row's tokens go on with it, and what came between is masked."""
    rows: list[dict[str, Any]] = []
    for turn in turns:
        prompt, sampled = turn["prompt_ids"], turn["response_ids"]
        versions = [version for _, version in turn["versions"]]
        for row in rows:
            tokens = row["prompt_ids"] + row["response_ids"]
            if prompt[: len(tokens)] == tokens:
                between = prompt[len(tokens) :]
                row["response_ids"] += between + sampled
                row["mask"] += [0] * len(between) + turn["loss_mask"]
                row["logprobs"] += [0.0] * len(between) + turn["logprobs"]
                row["versions"] += versions
                break
        else:
            columns = {"response_ids": list(sampled), "mask": list(turn["loss_mask"]), "logprobs": list(turn["logprobs"])}
            rows.append({"prompt_ids": list(prompt), **columns, "versions": versions})
    return rows


# verl asks for a class of replicas, of which this trainer starts none (actor_rollout_ref.rollout.name=served).
RolloutReplicaRegistry.register("served", lambda: RolloutReplica)


@register_trainer("served")
class ServedTrainer(PPOTrainerSync):
    """Synchronous trainer of verl without engines of its own (trainer.v1.trainer_mode=served, actor_rollout_ref.hybrid_engine=False)."""

    _enable_hybrid_replicas = False

    def __init__(self, config: Any) -> None:
        """Sample and refill as the synchronous trainer does: verl's parts look for the name of its mode."""
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def on_init_end(self) -> None:
        """Do nothing: the service's engines hold the first version."""

    def on_sample_end(self) -> None:
        """Do nothing: no engine of verl's is to sleep."""

    def on_step_end(self) -> None:
        """Do nothing: trainer.save_freq writes the version that is to be published."""


def _sampling(parameters: Mapping[str, Any], response_length: int) -> dict[str, Any]:
    """Return verl's sampling parameters in the service's form; neutral values are left out."""
    sampling: dict[str, Any] = {"temperature": float(parameters["temperature"]), "max_tokens": int(response_length)}
    if 0 < parameters.get("top_p", 1.0) < 1:
        sampling["top_p"] = float(parameters["top_p"])
    if parameters.get("top_k", -1) > 0:
        sampling["top_k"] = int(parameters["top_k"])
    return sampling


def _plain(value: Any) -> Any:
    """Return a value of verl's data sets as JSON's types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
