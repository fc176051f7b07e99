"""Tensors of training beside a version's weights, in a directory into which each rank writes the shards that it holds.

In: tensors by name, sharded or alike on every rank. Out: files of torch.distributed.checkpoint, and the same tensors on any number of
ranks. Invariant: a rank copies, writes and reads its own shards and nothing else; what cannot be read changes nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from spangrad.errors import CheckpointError, SettingsError

_MOMENTS = ".moments."
_SECONDS = 86400.0
"""Time limit of a rank's wait for the others' writes, in seconds; a rank that dies ends it at once."""


class _Writer(FileSystemWriter):
    """Writer that makes no directory above its own: on a host that does not see the trainer's files, it must not write elsewhere."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Make the directory."""
        Path(self.path).mkdir(exist_ok=True)
        return super().prepare_local_plan(plan)


class StoredTensor(NamedTuple):
    """Tensor in a directory."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def new_group() -> Any:
    """Return a process group of all ranks on main memory, whose calls may run beside those of the passes; collective."""
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=_SECONDS))


def host_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and other values by name, with this rank's shards in main memory; adapters are copied even from there."""
    return {name: _host_copy(value, copy=".lora_" in name) for name, value in state.items()}


def _host_copy(value: Any, *, copy: bool) -> Any:
    if isinstance(value, DTensor):
        # A mesh of GPUs holds it in name alone: `from_local` would move the copy to a GPU again.
        spec: Any = getattr(value, "_spec")  # noqa: B009
        return DTensor(value.to_local().detach().to("cpu", copy=copy), spec, requires_grad=False)
    return value.detach().to("cpu", copy=copy) if isinstance(value, torch.Tensor) else value


def write(directory: Path, state: Mapping[str, Any], group: Any) -> None:
    """Write this rank's shards, and have them on the disk; collective. What all ranks hold alike is written by one.

    The directory is made, in one that exists. Tensors are in main memory. `group` is of all ranks (`new_group`), and nothing else uses it
    meanwhile.

    Raises:
        OSError: a rank could not write; raised on every rank.
    """
    failures = _failures(lambda: save(dict(state), storage_writer=_Writer(directory), process_group=group))
    for cause in failures:
        if isinstance(cause, OSError) and cause.errno:
            raise OSError(cause.errno, cause.strerror, cause.filename)
    if failures:
        raise OSError(str(failures[0]))


def entries(directory: Path) -> dict[str, StoredTensor | None]:
    """Return what a directory holds, by name. None: a value that is no tensor.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except (OSError, EOFError, LookupError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise _unreadable(directory, str(error)) from error
    return {
        name: StoredTensor(tuple(held.size), held.properties.dtype) if isinstance(held, TensorStorageMetadata) else None
        for name, held in metadata.state_dict_metadata.items()
    }


def read(directory: Path, state: dict[str, Any], group: Any) -> None:
    """Fill the tensors of `state` with this rank's shards of what `write` wrote, and give names with None their values; collective.

    Raises:
        CheckpointError: it cannot be read; raised on every rank.
    """
    failures = _failures(lambda: load(state, storage_reader=FileSystemReader(directory), process_group=group))
    if failures:
        raise _unreadable(directory, str(failures[0]) or type(failures[0]).__name__)


def moments(prefix: str, module: Any, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state of each parameter, by `prefix`, the parameter's name and the field's.

    Raises:
        SettingsError: the optimizer does not shard its state as its parameters are.
    """
    state: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        for field, value in optimizer.state.get(parameter, {}).items():
            is_part = isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.ndim > 0
            if is_part and not isinstance(value, DTensor) and torch.distributed.get_world_size() > 1:
                raise SettingsError(
                    f"{type(optimizer).__name__} keeps {field} of {name} in a form that is not sharded as the parameter is, and cannot be "
                    "written by several ranks. Set another optimizer in trainer.verl."
                )
            state[f"{prefix}{_MOMENTS}{name}.{field}"] = value
    return state


def empty(entry: StoredTensor | None) -> torch.Tensor | None:
    """Return a tensor to fill that every rank has alike; None stands for a value that is no tensor."""
    return entry and torch.empty(entry.shape, dtype=entry.dtype)


def moments_like(prefix: str, module: Any, held: Mapping[str, StoredTensor | None]) -> dict[str, Any]:
    """Return tensors to fill with the moments that a directory holds, sharded as the parameters are.

    Raises:
        CheckpointError: they are of another model.
    """
    parameters = dict(module.named_parameters())
    tensors: dict[str, Any] = {}
    for key, entry in held.items():
        if not key.startswith(prefix + _MOMENTS):
            continue
        name = key.removeprefix(prefix + _MOMENTS).rpartition(".")[0]
        parameter = parameters.get(name)
        if parameter is None or (entry and entry.shape not in {(), tuple(parameter.shape)}):
            raise CheckpointError(
                f"{key} of the optimizer's state is not of this model. Set trainer.model and trainer.verl as they were, or begin a branch "
                "with these weights (trainer.branch, trainer.model)."
            )
        tensors[key] = torch.empty_like(parameter, dtype=entry.dtype) if entry and entry.shape else empty(entry)
    return tensors


def load_moments(prefix: str, module: Any, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Give an optimizer moments that were read; rates, betas and decay stay as in the settings."""
    numbers = {parameter: number for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"])}
    own: dict[int, dict[str, Any]] = {}
    parameters = dict(module.named_parameters())
    for key, value in state.items():
        if key.startswith(prefix + _MOMENTS):
            name, _, field = key.removeprefix(prefix + _MOMENTS).rpartition(".")
            own.setdefault(numbers[parameters[name]], {})[field] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def named(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with a prefix, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}


def _unreadable(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{directory} cannot be read ({reason}). Restore {directory.parent} from a copy.")


def _failures(call: Callable[[], object]) -> list[BaseException]:
    """Call a function of PyTorch's, and return the ranks' errors in it.

    PyTorch raises them as one that is no `Exception`. Ray ends a rank whose error has such a cause, so ours are raised after it.
    """
    try:
        call()
    except CheckpointException as error:
        return [cause for _, (cause, _) in sorted(error.failures.items())]
    return []
