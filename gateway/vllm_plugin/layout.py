"""Layout of a checkpoint's tensors in the parameters of one vLLM worker, as vLLM's own loaders place them.

In: the copies that vLLM makes while it loads a model, or an adapter. Out: for each copy, the place in the checkpoint's tensor and the
place in the worker's memory. Invariant: nothing here knows how a layer is fused, split or padded: every copy of a loader is recorded as
PyTorch runs it, with sizes and strides on both sides, so that a shard's words have the numbers that they have in the file.

Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from spangrad.weights.placements import Dimension, Placement


@dataclass(frozen=True)
class _Source:
    """Tensor of the checkpoint in memory. It is not kept: a loader frees what it has copied."""

    name: str
    begin: int
    words: int
    dtype: torch.dtype
    storage: StorageWeakRef

    def has(self, address: int) -> bool:
        return 0 <= address - self.begin < self.words * self.dtype.itemsize and not self.storage.expired()


@dataclass
class TensorLayout:
    """Placements by the address of the parameter's storage, and the names of all tensors that were loaded."""

    names: set[str] = field(default_factory=set[str])
    _placements: dict[int, dict[tuple[Any, ...], Placement]] = field(default_factory=dict[int, dict[tuple[Any, ...], Placement]])
    _storages: dict[int, StorageWeakRef] = field(default_factory=dict[int, StorageWeakRef])
    """Storages by their address: where a tensor was packed into a new one, its own is freed, and another tensor may be there since."""

    @property
    def placements(self) -> dict[int, dict[tuple[Any, ...], Placement]]:
        """Placements in storages that there are still, by their address."""
        return {address: held for address, held in self._placements.items() if not self._storages[address].expired()}

    def add(self, tensor: torch.Tensor, placement: Placement) -> None:
        """Add a placement in a tensor's storage; a copy to the same place replaces it."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._storages or self._storages[address].expired():
            self._storages[address], self._placements[address] = StorageWeakRef(tensor.untyped_storage()), {}
        place = (placement.target, *((each.size, each.target) for each in placement.dimensions))
        self._placements[address][place] = placement


class CopyRecorder(TorchDispatchMode):
    """Recorder of copies from named tensors, while it is entered."""

    def __init__(self, *, runs: bool = True) -> None:
        """Record; `runs`: also run what is recorded. Otherwise copies and fills are left out, so that nothing changes."""
        super().__init__()
        self.layout = TensorLayout()
        self._runs = runs
        self._sources: list[_Source] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record copies from this tensor, which is contiguous, as copies from the checkpoint's tensor of that name."""
        source = _Source(name, tensor.data_ptr(), tensor.numel(), tensor.dtype, StorageWeakRef(tensor.untyped_storage()))
        self._sources = [source, *(older for older in self._sources if not older.storage.expired())]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a copy, and run the operation."""
        if function is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
            if not self._runs:
                return args[0]
        if not self._runs and function in _FILLS:
            return args[0]
        return function(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        address = 0 if source.is_meta or not source.numel() else source.data_ptr()
        tensor = next((tensor for tensor in self._sources if tensor.has(address)), None)
        if tensor is None:
            return
        self.layout.names.add(tensor.name)
        if source.shape != target.shape or source.dtype != tensor.dtype or target.is_meta:
            return
        sides = zip(target.shape, source.stride(), target.stride(), strict=True)
        dimensions = tuple(sorted((Dimension(*side) for side in sides), key=lambda dimension: -dimension.source))
        first = (address - tensor.begin) // tensor.dtype.itemsize
        placement = Placement(tensor.name, tensor.words, first, target.storage_offset(), dimensions)
        self.layout.add(target, placement)


_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}

_layouts: WeakKeyDictionary[torch.nn.Module, TensorLayout] = WeakKeyDictionary()
_load_weights: Callable[..., None] = DefaultModelLoader.load_weights
_get_all_weights: Callable[..., Iterator[tuple[str, torch.Tensor]]] = DefaultModelLoader.get_all_weights
_recorders: list[CopyRecorder] = []
"""The recorder of the model that is being loaded."""
_loads = 0


def install() -> None:
    """Record the layout of each model that vLLM loads from now on in this process."""
    DefaultModelLoader.load_weights = _recorded_load
    DefaultModelLoader.get_all_weights = _named


def layout_of(model: torch.nn.Module) -> TensorLayout | None:
    """Return the layout of a model's parameters. None: vLLM's default loader did not load it."""
    return _layouts.get(model)


def loads() -> int:
    """Return how often vLLM's default loader has read a checkpoint in this process."""
    return _loads


def recorded(sources: Iterable[tuple[str, torch.Tensor]], load: Callable[[], object]) -> TensorLayout:
    """Return the layout that `load` would copy these tensors to; nothing is changed."""
    with CopyRecorder(runs=False) as recorder:
        for name, tensor in sources:
            recorder.add(name, tensor)
        load()
    return recorder.layout


def _recorded_load(loader: DefaultModelLoader, model: torch.nn.Module, *args: Any, **more: Any) -> None:
    if model in _layouts:
        _load_weights(loader, model, *args, **more)
        return
    with CopyRecorder() as recorder:
        _recorders.append(recorder)
        try:
            _load_weights(loader, model, *args, **more)
        finally:
            _recorders.pop()
    _layouts[model] = recorder.layout


def _named(loader: DefaultModelLoader, *args: Any, **more: Any) -> Iterator[tuple[str, torch.Tensor]]:
    global _loads
    _loads += 1
    for name, tensor in _get_all_weights(loader, *args, **more):
        if _recorders:
            _recorders[-1].add(name, tensor)
        yield name, tensor
