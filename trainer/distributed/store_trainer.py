"""verl's PPO trainer, fed with batches that were leased from the ledger (trainer.v1.trainer_mode = spangrad).

In: the phases of a step (`trainer.optim.phases`), rows in TransferQueue. Out: passes by verl's worker groups. Invariant: verl's `step`
calls the phases in its order, once per batch; the lease, the checks, advantages, checkpoints and publication are this project's, so that
nothing of verl's that reads data, saves or restores is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer

from trainer.data.batch import Batch
from trainer.distributed.cluster import Cluster
from trainer.distributed.ranks import QueueActor, QueueCritic
from trainer.distributed.row_queue import LeasedRows
from trainer.optim.phases import StepPhases
from trainer.optim.rank import MESH
from trainer.optim.verl_config import MODE
from trainer.optim.workers import Passed, PassKind

_PASSES = {
    (PassKind.INFER, "policy"): ("actor_rollout_wg", "compute_log_prob"),
    (PassKind.INFER, "reference"): ("ref_policy_wg", "compute_ref_log_prob"),
    (PassKind.INFER, "critic"): ("critic_wg", "infer_batch"),
    (PassKind.ACCUMULATE, "policy"): ("actor_rollout_wg", "accumulate_rows"),
    (PassKind.TRAIN, "critic"): ("critic_wg", "train_batch"),
}
"""Worker group of verl's, and its method, for each pass of a model."""


class StoreTrainer(PPOTrainer):
    """Trainer whose batches come from the span store."""

    _enable_hybrid_replicas = False
    replay_buffer: Any
    """`LeasedRows` of the step's batch."""

    def __init__(self, config: Any, cluster: Cluster, groups: type[RayWorkerGroup]) -> None:
        """Start nothing yet; worker groups of the class `groups` will run in the cluster."""
        self._cluster, self._groups = cluster, groups
        self._phases: StepPhases | None = None
        super().__init__(config)

    def init(self) -> None:
        """Start the ranks and load their models."""
        with _replaced(trainer_base, RayWorkerGroup=self._groups, LLMServerManager=_NoServers):
            super().init()

    def train(self, phases: StepPhases) -> None:
        """Do the phases of one step."""
        self._phases = phases
        self.replay_buffer.hold(phases.batch)
        self.global_steps += 1
        try:
            self.on_step_begin()
            self.step({}, {})
            self.on_step_end()
        finally:
            self._phases = None

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        """Pass rows of the step's batch through a model."""
        rows = self._balance_batch(self.replay_buffer.metadata(batch, role, *outputs, **flags), {})
        group, method = _PASSES[kind, role]
        getattr(getattr(self, group), method)(rows)
        return Passed(self.actor_rollout_wg.pass_metrics()[0], self.replay_buffer.outputs(batch, *outputs))

    @property
    def data_parallel_size(self) -> int:
        """Return the number that a batch's rows must be divisible by."""
        group = self.actor_rollout_wg
        if MESH not in group._dispatch_info:
            group._dispatch_info[MESH] = group._query_dispatch_info(MESH)
        return max(group._dispatch_info[MESH]) + 1

    @property
    def ref_in_actor(self) -> bool:
        """Return False: a reference is a model of its own beside adapters too, as it may be another than their base."""
        return False

    @ref_in_actor.setter
    def ref_in_actor(self, value: bool) -> None:
        """Leave it so, whatever verl derives from its configuration."""

    # verl's hooks.

    def _init_dataloader(self) -> None:
        """Read no files: rows come from the span store."""

    def _build_replay_buffer(self) -> Any:
        return LeasedRows()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        classes = {Role.Actor: QueueActor, Role.RefPolicy: QueueActor, Role.Critic: QueueCritic}
        roles = [Role.Actor, *[Role.RefPolicy] * self.use_reference_policy, *[Role.Critic] * self.use_critic]
        self.role_worker_mapping = {role: ray.remote(classes[role]) for role in roles}
        self.mapping |= dict.fromkeys(roles, "global_pool")
        specification = self.resource_pool_manager.resource_pool_spec
        self.resource_pool_manager = _ReservedPools(self._cluster, resource_pool_spec=specification, mapping=self.mapping)

    def _load_checkpoint(self) -> None:
        """Load nothing: states are read by `VerlOptimizer.load_state`."""
        self.global_steps = 0

    def _save_checkpoint(self) -> None:
        """Save nothing: states are written with the ledger's commit."""

    def prepare_step(self) -> dict[str, Any]:
        """Generate nothing: rollouts are served by the gateway's engines."""
        return {}

    def on_sample_end(self) -> None:
        """Do nothing."""

    def on_step_end(self) -> None:
        """Do nothing: the version is committed and published by `trainer.commits`."""

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return the number of ranks: no-op rows are in the batch already."""
        return dp_size

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *arguments: Any, **options: Any) -> KVBatchMeta:
        """Share rows among ranks by their lengths, as verl does; those of a rank stay in the batch's order."""
        place = {key: at for at, key in enumerate(batch.keys)}
        batch = super()._balance_batch(batch, metrics, *arguments, **options)
        of_rank = len(batch) // self.data_parallel_size
        ranks = [sorted(batch.keys[at : at + of_rank], key=place.__getitem__) for at in range(0, len(batch), of_rank)]
        return batch.select_keys([key for keys in ranks for key in keys])

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self._done(batch, self._phase.compute_old_logprobs)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self._done(batch, self._phase.compute_reference_logprobs)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self._done(batch, self._phase.compute_values)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self._done(batch, self._phase.compute_advantages)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Do nothing: the critic is trained after the policy, whose first pass may be the one that checks the rows."""
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._phase.update_policy()
        return self._done(batch, self._phase.update_critic)

    @property
    def _phase(self) -> StepPhases:
        assert self._phases is not None
        return self._phases

    def _done(self, batch: KVBatchMeta, phase: Callable[[], None]) -> KVBatchMeta:
        phase()
        return batch


class _ReservedPools(ResourcePoolManager):
    """Resource pool in the places that were reserved in the cluster, one per rank."""

    def __init__(self, cluster: Cluster, **specification: Any) -> None:
        super().__init__(**specification, max_colocate_count=1)
        self._cluster = cluster

    def create_resource_pool(self) -> None:
        super().create_resource_pool()
        groups = self._cluster.reserve()
        for pool in self.resource_pool_dict.values():
            pool.pgs = groups

    def _check_resource_available(self) -> None:
        """Do nothing: `Cluster.reserve` checks, for CPUs as well."""


register_trainer(MODE)(StoreTrainer)


class _NoServers:
    """Manager of verl's inference servers, of which there are none."""

    @classmethod
    def create_empty(cls, **_: Any) -> _NoServers:
        return cls()

    def get_replicas(self) -> list[Any]:
        return []


@contextmanager
def _replaced(module: Any, **values: Any) -> Generator[None]:
    """Replace names of a module of verl, for which it has no setting, until the block ends."""
    original = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(module, name, value)
