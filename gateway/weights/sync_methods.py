"""Weight sync methods: an engine reloads files, loads an adapter beside its base, or receives weights straight from the trainer.

In: a release, and what an engine reports that it can take. Out: the orders that have the engine load it. Invariant: what an engine cannot
take is refused before it is touched; an engine that takes adapters keeps the base that it was started with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.pool.backend import Backend
from gateway.pool.upstream import BackendStatus
from gateway.vllm_plugin.middleware import ADAPTER_PATH
from gateway.weights.transfer import SenderAddress, TransferAnswer
from spangrad.errors import EngineError
from spangrad.weights.adapters import PREFIX, adapter_facts
from spangrad.weights.shards import EngineSums, difference


class SyncMethod:
    """A weight sync method, for one release and one engine."""

    step: str
    """Name of the publication step that loads the weights."""
    part = "all"
    """Part of the engine's parameters that it loads, and that is read from memory afterwards: `all` or `adapter`."""

    async def check(self, backend: Backend) -> None:
        """Compare what takes long to compare, while the engine goes on answering.

        Raises:
            EngineError: the engine cannot load it, and holds what it held.
        """

    async def prepare(self, backend: Backend) -> None:
        """Do the work on the paused engine that does not change its weights yet.

        Raises:
            EngineError: the engine cannot load it, and holds what it held.
        """

    async def load(self, backend: Backend) -> None:
        """Have the engine load the weights.

        Raises:
            EngineError: it failed; only the checksum shows what the engine holds.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Reload(SyncMethod):
    """Weight sync in which the engine reads a whole model from a directory."""

    path: str
    step = "reload"

    async def load(self, backend: Backend) -> None:
        """Replace all weights."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": self.path}}
        await backend.order("/collective_rpc", reload, backend.seconds)


@dataclass(frozen=True)
class Adapter(SyncMethod):
    """Weight sync in which the engine reads an adapter in place of the one it has."""

    path: str
    base: Path
    """Directory of the adapter's base model."""
    expected: EngineSums
    """Sums of the base and the adapter, as the engine must hold them."""
    step = "adapter"
    part = "adapter"

    async def check(self, backend: Backend) -> None:
        """Compare the engine's base with the adapter's: both were read once, since adapters leave the base as it is."""
        if backend.held is None:
            return
        reason = difference(_base_of(self.expected).tensors, _base_of(backend.held))
        if reason:
            raise EngineError(f"the engine's base is not {self.base}, which the version is of: {reason}. Start the engine with that model.")

    async def load(self, backend: Backend) -> None:
        """Replace the adapter; vLLM drops the old one once it has the new one."""
        adapter = {"lora_name": backend.policy, "lora_path": self.path, "load_inplace": True}
        await backend.order(ADAPTER_PATH, adapter, backend.seconds)


class _WorldSize(msgspec.Struct):
    world_size: int


class Transfer(SyncMethod):
    """Weight sync in which a sender transfers the weights to one engine."""

    step = "transfer"

    def __init__(self, sender: SenderAddress, dtype: str, *, whole: bool) -> None:
        """Transfer weights in a dtype; `whole`: all words, though the engine may hold another version of them."""
        self._sender = sender
        self._dtype = dtype
        self._whole = whole
        self._update: dict[str, Any] = {}

    async def prepare(self, backend: Backend) -> None:
        """Connect engine and trainer; the engine is paused, since vLLM's workers wait for the trainer."""
        assert backend.info
        workers = (await backend.fetch("/get_world_size", _WorldSize)).world_size
        connection = {"engine": backend.name, "over": backend.info.transfer, "workers": workers, "group": backend.group}
        transfer = {**connection, "dtype": self._dtype, "whole": self._whole}
        answer = await self._sender.ask("/transfers", transfer, TransferAnswer, backend.seconds)
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


def _base_of(sums: EngineSums) -> EngineSums:
    return EngineSums({name: each for name, each in sums.tensors.items() if not name.startswith(PREFIX)}, sums.unread)


def with_base_of(adapter: EngineSums, held: EngineSums | None) -> EngineSums:
    """Return the sums of an adapter, with those of the base that an engine holds."""
    base = _base_of(held) if held else EngineSums({})
    return EngineSums(base.tensors | adapter.tensors, base.unread | adapter.unread)


def refusal_of(backend: Backend, path: Path, sender: SenderAddress | None) -> str:
    """Return the reason why an engine cannot load a release; empty: it can, or the engine was never reached.

    The release is read from its directory, or is sent where there is a sender.

    Raises:
        CheckpointError: an adapter's configuration cannot be read.
    """
    info = backend.info
    if info is None:
        return ""
    if sender:
        if info.transfer:
            return ""
        return (
            f"the engine at {backend.url} takes no weights from a trainer. Start it with engine.transfer = http, or nccl where it and "
            "the trainer have a GPU each; or train with trainer.weight_sync.method = disk."
        )
    adapter = adapter_facts(path)
    if adapter is None:
        return ""
    if not info.lora_rank:
        return (
            f"{path} is an adapter, and the engine at {backend.url} takes none. Start it with engine.lora_rank = {adapter.rank} or more, "
            "or train with trainer.weight_sync.method = disk."
        )
    if adapter.rank > info.lora_rank:
        return (
            f"{path} is an adapter of rank {adapter.rank}, and the engine at {backend.url} takes ranks up to {info.lora_rank}. Start it "
            f"with engine.lora_rank = {adapter.rank}."
        )
    return ""


def sync_method_of(backend: Backend, path: Path, sender: SenderAddress | None, expected: EngineSums) -> SyncMethod:
    """Return the method by which an engine loads a release. One that takes adapters can load a whole model only if that is its base.

    Raises:
        CheckpointError: an adapter's configuration cannot be read.
    """
    info = backend.info
    assert info, "an engine that was never reached is not published to"
    if sender:
        return Transfer(sender, info.dtype, whole=backend.status is not BackendStatus.SERVING)
    adapter = adapter_facts(path)
    if info.lora_rank:
        return Adapter(str(path), adapter.base, expected) if adapter else Adapter(info.zero_adapter, path, expected)
    return Reload(str(path))
