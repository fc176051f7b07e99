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


class TransferAnswer(msgspec.Struct, frozen=True):
    """Description of a transfer, by the sender."""

    group: str
    init: dict[str, Any] | None
    update: dict[str, Any]


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
