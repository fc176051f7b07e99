"""Sender of whole tensors to an engine's workers over NCCL, from a GPU of the trainer's process to theirs.

In: a version's weights and the gateway's request. Out: the description of the transfer for vLLM's own backend, while a thread sends.
Invariant: each engine has a communicator of its own, so that one that fails delays no other.

The sender is rank 0 of a group with the engine's workers; it is PyTorch's own, since vLLM is not installed beside the trainer: vLLM's
workers join by a unique id. The tests of this project, without a GPU, do not run it.
"""

from __future__ import annotations

import base64
import importlib
import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import TrainerError

logger = logging.getLogger(__name__)


class NcclSender:
    """Connections to engines over NCCL."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        """Connected communicators, by group."""

    def send(self, named: Mapping[str, NDArray[np.float32]], body: Mapping[str, Any]) -> dict[str, Any]:
        """Start to send whole parameters in their order, on the gateway's request; return the transfer's description.

        Raises:
            TrainerError: this process sees no GPU.
        """
        import torch

        nccl: Any = importlib.import_module("torch.cuda.nccl")
        if not torch.cuda.is_available():
            raise TrainerError(
                "engine.transfer = nccl, and the trainer's process sees no GPU. Give it one of its own, beside the engine's, or set "
                "engine.transfer = http."
            )
        group, init = body["group"], None
        if group not in self._groups:
            group, unique_id = secrets.token_urlsafe(8), nccl.unique_id()
            encoded = base64.b64encode(unique_id).decode()
            init = {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": body["workers"] + 1, "packed": False}

            def communicator() -> Any:
                connection = nccl.init_rank(body["workers"] + 1, unique_id, 0)
                # vLLM's workers begin with a sum of one element, which waits for all ranks.
                nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[connection])
                self._groups[group] = connection
                return connection
        else:

            def communicator() -> Any:
                return self._groups[group]

        def send() -> None:
            try:
                to = communicator()
                for array in named.values():
                    nccl.broadcast([torch.from_numpy(array).to("cuda", getattr(torch, body["dtype"]))], comms=[to])
                torch.cuda.synchronize()
            except RuntimeError:
                logger.exception("weights could not be sent to engine %s", body["engine"])

        # Each side waits for the other inside NCCL, so this one begins before the gateway's order has come to the engine.
        threading.Thread(target=send, name=f"sends to {body['engine']}", daemon=True).start()
        shapes = [list(array.shape) for array in named.values()]
        update = {"names": list(named), "dtype_names": [body["dtype"]] * len(named), "shapes": shapes}
        return {"group": group, "init": init, "update": update}
