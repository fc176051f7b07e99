"""Weight sync straight from the trainer to an engine's workers, by vLLM's weight-transfer protocol; no file is read.

In: a publication that names the trainer's sender. Out: the orders to the engine between which the trainer sends. Invariant: the trainer
sends only what the gateway has asked it for, once the engine is paused; the gateway gives all orders to the engine, and the trainer none.

The sender is asked over HTTP, with the token that came with the publication: `POST /checksum` {"dtype", "others", "scope"} ->
{"tensors", "whole"}, and `POST /transfers` {"engine", "over", "workers", "dtype", "group", "whole"} -> {"group", "init", "update"}. `group`
is the connection that engine and sender have; `init` is null where they have it already, else the information by which the engine makes
it. `whole` asks for all words, since those that the engine holds are not known: differences from them would be wrong.
Over NCCL each of the engine's workers is sent all weights, and keeps its shards. Over HTTP `update` is a plan of which rank of the trainer
has which words, and each worker fetches those that it holds (`gateway/vllm_plugin/fetching.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.pool.backend import Backend
from spangrad.weights.shards import ChecksumScope, TensorSums


class SenderAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and token of a trainer that is ready to send the weights of a version."""

    url: str
    token: str


class SenderSums(msgspec.Struct, frozen=True):
    """Sums of the sender's weights."""

    tensors: dict[str, TensorSums]
    """Sums by tensor, as an engine holds them."""
    whole: str
    """Checksum of the weights in the dtype of the version's files; empty: only a sample was summed."""


class _Transfer(msgspec.Struct, frozen=True):
    group: str
    init: dict[str, Any] | None
    update: dict[str, Any]


class _WorldSize(msgspec.Struct):
    world_size: int


class Transfer:
    """Weight sync in which a sender transfers the weights to one engine."""

    step = "transfer"
    part = "all"

    def __init__(self, sender: SenderAddress, dtype: str, *, whole: bool) -> None:
        """Transfer weights in a dtype; `whole`: all words, though the engine may hold another version of them."""
        self._sender = sender
        self._dtype = dtype
        self._whole = whole
        self._update: dict[str, Any] = {}

    async def check(self, backend: Backend) -> None:
        """Do nothing: the release's checksum is that of the sender's weights."""

    async def prepare(self, backend: Backend) -> None:
        """Connect engine and trainer; the engine is paused, since vLLM's workers wait for the trainer."""
        assert backend.info
        workers = (await backend.fetch("/get_world_size", _WorldSize)).world_size
        connection = {"engine": backend.name, "over": backend.info.transfer, "workers": workers, "group": backend.group}
        transfer = {**connection, "dtype": self._dtype, "whole": self._whole}
        answer = await backend.ask_sender(self._sender.url, self._sender.token, "/transfers", transfer, _Transfer)
        if answer.init is not None:
            backend.group = ""
            await backend.order("/shutdown_weight_transfer_engine", seconds=backend.seconds)
            await backend.order("/init_weight_transfer_engine", {"init_info": answer.init}, backend.seconds)
            backend.group = answer.group
        self._update = answer.update

    async def load(self, backend: Backend) -> None:
        """Have the workers receive the weights; a transfer that is not finished leaves the engine broken."""
        group, backend.group = backend.group, ""
        await backend.order("/start_weight_update", seconds=backend.seconds)
        await backend.order("/update_weights", {"update_info": self._update}, backend.seconds)
        await backend.order("/finish_weight_update", seconds=backend.seconds)
        backend.group = group


async def sender_sums(backend: Backend, sender: SenderAddress, dtype: str, others: Mapping[str, str], scope: ChecksumScope) -> SenderSums:
    """Ask the sender for the sums that an engine must show once it has the sender's weights.

    Args:
        backend: the engine.
        sender: the trainer.
        dtype: dtype in which the weights are sent.
        others: dtypes of the tensors that the engine holds in another one, by name.
        scope: all words, or a sample.

    Raises:
        EngineError: the sender does not answer.
    """
    question = {"dtype": dtype, "others": dict(others), "scope": scope}
    return await backend.ask_sender(sender.url, sender.token, "/checksum", question, SenderSums)
