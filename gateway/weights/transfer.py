"""Requests to a trainer that sends weights straight to an engine's workers, by vLLM's weight-transfer protocol; no file is read.

In: a publication that names the trainer's sender. Out: the sums of what it sends, and the description of a transfer. Invariant: the trainer
sends only what the gateway has asked it for, once the engine is paused; the gateway gives all orders to the engine, and the trainer none.

The sender is asked over HTTP, with the token that came with the publication: `POST /checksum` {"dtype", "others", "scope"} ->
{"tensors", "whole"}, and `POST /transfers` {"engine", "over", "workers", "dtype", "group", "whole"} -> {"group", "init", "update"}. `group`
is the connection that engine and sender have; `init` is null where they have it already, else the information by which the engine makes
it. `whole` asks for all words, since those that the engine holds are not known: differences from them would be wrong.
Over NCCL each of the engine's workers is sent all weights, and keeps its shards. Over HTTP `update` is a plan of which rank of the trainer
has which words, and each worker fetches those that it holds (`gateway/vllm_plugin/fetching.py`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from spangrad.errors import EngineError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService
from spangrad.weights.shards import TensorSums

_T = TypeVar("_T")


class SenderAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address and token of a trainer that is ready to send the weights of a version."""

    url: str
    token: str

    async def ask(self, path: str, body: dict[str, Any], kind: type[_T], seconds: float) -> _T:
        """Ask the trainer, which has so many seconds; return its response.

        Raises:
            EngineError: it does not answer, or refuses.
        """
        remedy = "Set trainer.weight_sync.transfer_host to an address that gateway and engines reach, or trainer.weight_sync.method = disk."
        async with AsyncClient(RemoteService("the trainer", self.url, self.token, EngineError, remedy), seconds=seconds) as client:
            return await client.ask("POST", path, kind, body)


class SenderSums(msgspec.Struct, frozen=True):
    """Sums of the sender's weights."""

    tensors: dict[str, TensorSums]
    """Sums by tensor, as an engine holds them."""
    whole: str
    """Checksum of the weights in the dtype of the version's files; empty: only a sample was summed."""


class TransferAnswer(msgspec.Struct, frozen=True):
    """Description of a transfer, by the sender."""

    group: str
    init: dict[str, Any] | None
    update: dict[str, Any]
