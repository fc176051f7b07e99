"""Loading of a model by verl in which each rank reads its own rows of the files.

In: verl's loading of a model directory. Out: the same sharded model. Invariant: parameters are made without memory, sharded, and only then
filled, so that no rank holds a whole model; parameters that the files lack are initialised by their own modules, alike on every rank.

verl reads the whole model on its first rank, on every rank where embedding and head are one tensor, and sends it from there. That remains
where names or shapes of the files are others than those of the model (PyTorch's own files, quantised ones, conversions of transformers).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from spangrad.errors import CheckpointError, SettingsError
from trainer.optim.states.weight_files import WeightFiles
from trainer.optim.weight_shards import held_parts

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def each_rank_reads_its_rows() -> Generator[None]:
    """Have verl load one model by rows, if its files allow it."""
    from transformers import PreTrainedModel
    from verl.workers.engine.fsdp import transformer_impl

    verls: Any = transformer_impl
    model_class: Any = PreTrainedModel
    from_pretrained = model_class.__dict__["from_pretrained"]
    shard, load = verls.apply_fsdp2, verls.fsdp2_load_full_state_dict
    readable: list[WeightFiles] = []

    def from_files(cls: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        model = _without_memory(cls, options)
        if files := _readable(model, Path(path)):
            readable.append(files)
            return model
        return from_pretrained.__get__(None, cls)(path, *arguments, **options)

    def apply_fsdp2(module: Any, *arguments: Any, **options: Any) -> None:
        if readable:
            _initialise_adapters(module)
        shard(module, *arguments, **options)

    def load_state(module: Any, full_state: Any, device_mesh: Any = None, cpu_offload: Any = None) -> None:
        if readable:
            _fill(module, readable.pop(), device_mesh, offloaded=cpu_offload is not None)
        else:
            load(module, full_state, device_mesh, cpu_offload)

    model_class.from_pretrained = classmethod(from_files)
    verls.apply_fsdp2, verls.fsdp2_load_full_state_dict = apply_fsdp2, load_state
    try:
        yield
    finally:
        model_class.from_pretrained = from_pretrained
        verls.apply_fsdp2, verls.fsdp2_load_full_state_dict = shard, load


def _without_memory(cls: Any, options: dict[str, Any]) -> Any:
    """Return a model whose parameters are on the meta device, and its buffers in memory."""
    from accelerate import init_empty_weights

    dtype = options.get("dtype", options.get("torch_dtype"))
    with init_empty_weights():
        model = cls._from_config(options["config"], dtype=dtype)
    model.tie_weights()  # each registration made a parameter of its own
    return model.eval()


def _readable(model: Any, directory: Path) -> WeightFiles | None:
    """Return the files by whose rows the model can be filled; what they lack is initialised. None: they cannot be read so."""
    if getattr(model.config, "quantization_config", None):
        return None
    parameters = dict(model.named_parameters())
    try:
        files = WeightFiles(directory)
        lacking = files.lacking(held_parts(model, parameters))
    except (CheckpointError, SettingsError) as error:
        logger.debug("the weights of %s are read whole: %s", directory, error)
        return None
    # A critic's head is new. What the model itself lacks, and a tensor of another shape, is transformers' to judge.
    if any(name.startswith(f"{model.base_model_prefix}.") or name not in parameters or files.holds(name) for name in lacking):
        return None
    for module_name in dict.fromkeys(name.rpartition(".")[0] for name in lacking):
        module = model.get_submodule(module_name)
        module.to_empty(device="cpu", recurse=False)
        model._init_weights(module)
    return files


def _initialise_adapters(module: Any) -> None:
    """Give PEFT's adapters the values that it gave them before it moved them to the meta device, where their weights are."""
    for layer in module.modules():
        if hasattr(layer, "reset_lora_parameters"):
            for adapters in (layer.lora_A, layer.lora_B):
                adapters.to_empty(device="cpu")
            for name in layer.lora_A:
                layer.reset_lora_parameters(name, True)


def _fill(module: Any, files: WeightFiles, mesh: Any, *, offloaded: bool) -> None:
    """Give the parameters of a sharded model memory, and read this rank's rows into them."""
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    home = torch.device("cpu") if offloaded else device
    empty = {name for name, value in module.named_parameters(remove_duplicate=False) if value.is_meta}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    module._apply(placed)
    with files:
        for part in held_parts(module, empty):
            files.read(part)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
