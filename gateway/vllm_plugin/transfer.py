"""vLLM's weight-transfer protocol over plain HTTP: a worker fetches the weights from the trainer, as bytes one after the other.

In: vLLM's orders, with the URL that the trainer gave. Out: the model's parameters. Invariant: between start and finish, the same of vLLM's
own functions are called as by its backend over NCCL, so that only the transport differs: this one needs no GPU.

Runs inside vLLM's workers: `--weight-transfer-config '{"backend": "spangrad_http"}'`, registered by `gateway.vllm_plugin.worker`.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

SECONDS = 60
"""Longest time that the trainer may send nothing."""


@dataclass
class HttpInitInfo(WeightTransferInitInfo):
    """Information for the connection: none, since HTTP needs no process group."""


@dataclass
class HttpUpdateInfo(WeightTransferUpdateInfo):
    """URL of the weights, and their names, dtypes and shapes in the order in which they come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    url: str


class HttpTransferEngine(WeightTransferEngine[HttpInitInfo, HttpUpdateInfo]):
    """Receiver of weights in vLLM's workers."""

    init_info_cls = HttpInitInfo
    update_info_cls = HttpUpdateInfo

    def init_transfer_engine(self, init_info: HttpInitInfo) -> None:
        """Do nothing: there is no connection to make."""

    def start_weight_update(self) -> None:
        """Get the layers ready to be loaded one by one."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Move the loaded weights to the parameters that the model computes with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receive the weights; unlike vLLM's own method, this waits for an accelerator only if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HttpUpdateInfo) -> None:
        """Load each tensor as it comes.

        Raises:
            OSError: the trainer does not answer, or ended before all had come.
        """
        with urllib.request.urlopen(update_info.url, timeout=SECONDS) as answer:
            for name, dtype, shape in _announced(update_info):
                data = bytearray(prod(shape) * dtype.itemsize)
                read = answer.readinto(data)
                while 0 < read < len(data) and (more := answer.readinto(memoryview(data)[read:])):
                    read += more
                if read != len(data):
                    raise OSError(f"the trainer's weights end in {name}, after {read} of {len(data)} bytes")
                self.model.load_weights([(name, torch.frombuffer(data, dtype=dtype).view(shape).to(self.device))])

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


def _announced(update_info: HttpUpdateInfo) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
        yield name, getattr(torch, dtype), shape
