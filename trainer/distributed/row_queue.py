"""Rows of one batch in TransferQueue, between the trainer and its ranks.

In: the batch that was leased. Out: what verl's trainer calls a replay buffer. Invariant: only rows of the step under way are in the queue;
they are cleared when it ends, whichever way. Rows are written once, before a pass of the models; what a loss reads of them is written again
where it changed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Coroutine
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from numpy.typing import NDArray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta, SequentialSampler, interface
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies
from transfer_queue.utils.zmq_utils import process_zmq_server_info

from spangrad.errors import TrainerError
from spangrad.ray_connection import first_line
from trainer.data.batch import Batch
from trainer.optim.rows import by_response, flags_of, response_columns

_LOOK_SECONDS = 2.0
"""Interval at which a call of the queue that is not answered looks whether the queue lives, in seconds."""
_ROWS = ["prompts", "responses", "response_length", "response_mask", "temperature_of_row"]
"""Columns that every pass reads. verl's own flag `temperature` is one for all rows."""
PER_ROW = {"temperature_of_row", "row_share", "rollout_log_ratio"}
"""Columns of one value per row, shape [rows, 1]."""


class RowQueue:
    """TransferQueue of this process: one controller, and a storage unit on each node."""

    _users = 0
    _actors: tuple[Any, ...] = ()
    """Controller and storage units."""

    @classmethod
    def open(cls, nodes: int) -> Any:
        """Start the queue in the Ray cluster that this process is connected to, unless it runs; return the controller's handle.

        Its actors have no names, so that trainers of one cluster have a queue each, and take no CPU from the ranks.
        """
        if not cls._users:
            settings = OmegaConf.create({"metrics": {"enabled": False}, "controller": {}}, flags={"allow_objects": True})
            controller_class: Any = TransferQueueController
            controller = controller_class.options(num_cpus=0).remote(sampler=SequentialSampler(), polling_mode=False)
            storage = {"total_storage_size": None, "required_node_resource": None, "ssd_offload": None, "_run_id": uuid.uuid4().hex}
            places = get_node_round_robin_scheduling_strategies(nodes)
            units = {
                f"rows-{at}": SimpleStorageUnit.options(num_cpus=0, scheduling_strategy=place).remote(config=storage)
                for at, place in enumerate(places)
            }
            settings.controller.zmq_info = process_zmq_server_info(controller)
            settings.backend = {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {"num_data_storage_units": nodes, "zmq_info": process_zmq_server_info(units)},
            }
            ray.get(controller.store_config.remote(settings))
            attach(controller)
            cls._actors = (controller, *units.values())
        cls._users += 1
        return cls._actors[0]

    @classmethod
    def close(cls) -> None:
        """End the queue with its last user."""
        cls._users -= 1
        if cls._users:
            return
        if ray.is_initialized():
            for actor in cls._actors:
                ray.kill(actor)
        cls._actors = ()
        transfer_queue.close()

    @classmethod
    def look(cls) -> None:
        """Raise where the queue has ended: TransferQueue's own calls would wait for its controller for ever.

        Raises:
            TrainerError: it has.
        """
        for actor in cls._actors:
            try:
                ray.get(actor.get_zmq_server_info.remote(), timeout=_LOOK_SECONDS)
            except GetTimeoutError:
                continue
            except RayError as error:
                raise TrainerError(
                    f"the queue of the rows between this trainer and its workers has ended ({first_line(error)}), and they were "
                    "ended. The batch is trained again at the next start."
                ) from error

    @classmethod
    def call(cls, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a call of TransferQueue.

        Raises:
            TrainerError: the queue has ended.
        """
        future = asyncio.run_coroutine_threadsafe(work, transfer_queue.get_client()._loop)
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                cls.look()


def attach(controller: Any) -> None:
    """Make this process a client of the queue, a trainer or a rank."""
    from verl.utils import transferqueue_utils

    interface._TQ_CONTROLLER = controller  # pyright: ignore[reportPrivateUsage]  # without it the client would look for one by name
    transfer_queue.init()
    transferqueue_utils.TQ_INITIALIZED = True


class LeasedRows:
    """Rows of the batch that was leased, in the place of verl's replay buffer."""

    def __init__(self) -> None:
        """Hold no batch yet."""
        self._partition = f"step-{uuid.uuid4().hex}"
        self._batch: Batch | None = None
        self._keys: list[str] = []
        self._stored: dict[str, None] = {}
        self._loss_columns: Batch | None = None

    def hold(self, batch: Batch) -> None:
        """Take the batch of a step."""
        self._batch = batch

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Write the rows of the batch, whole as it was leased, in this trainer's own partition; return their metadata, and no metrics."""
        batch = self._batch
        assert batch is not None
        self._keys = [f"{batch.group[row]}_{batch.rollout[row]}_{row}" for row in range(batch.real_rows)]
        self._loss_columns = None
        self._put(batch, _row_columns(batch), tags=True)
        return self.metadata(batch, "policy"), {}

    def metadata(self, part: Batch, role: str, *outputs: str, **flags: Any) -> KVBatchMeta:
        """Return the metadata of rows of the batch for a pass, once all of them and what its loss reads are written.

        `role` names the model of the pass. Of its outputs those of these names, verl's, are kept.
        """
        columns = _response_columns(part) if flags.get("compute_loss", True) else {}
        lacking = any(key not in self._stored for key in self.keys_of(part))  # a smaller part adds no-op rows, with a loss or without
        if lacking or (columns and part is not self._loss_columns):
            self._put(part, columns)
            self._loss_columns = part if columns else self._loss_columns
        widths = {"prompt_width": part.prompts.shape[1], "response_width": part.responses.shape[1]}
        counts = {"global_token_num": " ".join(map(str, part.token_counts))}  # a list would be taken for a column
        return KVBatchMeta(
            keys=self.keys_of(part),
            tags=_tags(part),
            partition_id=self._partition,
            fields=list(dict.fromkeys([*_ROWS, *columns])),
            extra_info={**flags_of(part, role, **flags), **counts, **widths, "outputs": " ".join(outputs)},
        )

    def keys_of(self, part: Batch) -> list[str]:
        """Return the keys of rows of the batch; no-op rows are numbered."""
        assert part.index is not None
        return [self._keys[row] if row >= 0 else f"no-op-{at}" for at, row in enumerate(part.index.tolist(), -part.real_rows)]

    def outputs(self, part: Batch, *names: str) -> dict[str, NDArray[np.float32]]:
        """Return outputs of the last pass of rows, of the batch's shape [rows, response]; 0 where nothing was sampled."""
        if not names:
            return {}
        got = transfer_queue.async_kv_batch_get(keys=self.keys_of(part), partition_id=self._partition, select_fields=list(names))
        values = RowQueue.call(got)
        return {name: by_response(values[name], part) for name in names}

    def clear(self) -> None:
        """Remove the rows from the queue."""
        self._batch = self._loss_columns = None
        if self._stored:
            RowQueue.call(transfer_queue.async_kv_clear(keys=list(self._stored), partition_id=self._partition))
        self._stored = {}

    def _put(self, part: Batch, columns: dict[str, Any], *, tags: bool = False) -> None:
        keys = self.keys_of(part)
        if any(key not in self._stored for key in keys) and not tags:  # no-op rows of a smaller part
            columns, tags = {**_row_columns(part), **columns}, True
        self._stored |= dict.fromkeys(keys)
        fields = TensorDict(columns, batch_size=len(keys))
        new_tags = _tags(part) if tags else None
        RowQueue.call(transfer_queue.async_kv_batch_put(keys=keys, partition_id=self._partition, fields=fields, tags=new_tags))


def _lengths(batch: Batch) -> NDArray[np.int64]:
    return batch.attention_mask[:, batch.prompts.shape[1] :].sum(axis=1)


def _tags(batch: Batch) -> list[dict[str, Any]]:
    return [{"status": "success", "seq_len": count, "is_padding": row >= batch.real_rows} for row, count in enumerate(batch.token_counts)]


def _row_columns(batch: Batch) -> dict[str, Any]:
    """Return the columns `_ROWS`, without padding."""
    prompts = batch.attention_mask[:, : batch.prompts.shape[1]].sum(axis=1)
    return {
        "prompts": _jagged([row[len(row) - count :] for row, count in zip(batch.prompts, prompts.tolist(), strict=True)]),
        "responses": _by_token(batch.responses, batch),
        "response_length": torch.from_numpy(_lengths(batch))[:, None],
        "response_mask": _by_token(batch.response_mask, batch),
        "temperature_of_row": torch.from_numpy(batch.temperature)[:, None],
    }


def _response_columns(batch: Batch) -> dict[str, Any]:
    return {
        name: _by_token(values, batch) if values.ndim == 2 else torch.from_numpy(values)[:, None]
        for name, values in response_columns(batch).items()
    }


def _by_token(values: NDArray[Any], batch: Batch) -> Any:
    """Return values of a batch's response tokens; a no-op row, which has none, has one value all the same."""
    return _jagged([row[: max(count, 1)] for row, count in zip(values, _lengths(batch).tolist(), strict=True)])


def _jagged(rows: list[NDArray[Any]]) -> Any:
    return torch.nested.as_nested_tensor([torch.from_numpy(row.copy()) for row in rows], layout=torch.jagged)
