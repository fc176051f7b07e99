"""Checksum of the parameters in vLLM's memory, equal to that of the checkpoint they were loaded from.

In: a worker's model, its parameters fused and on any device. Out: `float32:00c0ffee00c0ffee`, as
`spangrad.weights.checksums.checksum_directory` writes it. Invariant: only what `named_parameters` lists counts, each once;
buffers (rotary tables, scales) are no weights of a checkpoint, and with it the adapters in the slots that are computed with: vLLM
keeps them padded with zeros, and B multiplied by its scale. What is listed is what is computed with: on a CPU, vLLM
would repack linear layers into an opaque form and drop the parameters, so there they are kept plain.

Runs inside vLLM's workers: `vllm serve --worker-extension-cls gateway.vllm_plugin.worker.SpangradWorker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layers

from spangrad.weights.checksums import MASK, MIX_A, MIX_B

HTTP_BACKEND = "spangrad_http"
CHUNK_WORDS = 2**24
"""Words mixed at once: 128 MiB of int64, several times over."""


_dispatch = layers.dispatch_cpu_unquantized_gemm


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Multiply by a linear layer's own parameter on a CPU, in place of a packed copy of it."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _dispatch(layer, remove_weight)


# vLLM imports this module in each worker before it loads the model. On a GPU the function is not called.
layers.dispatch_cpu_unquantized_gemm = _keep_plain
WeightTransferEngineFactory.register_engine(HTTP_BACKEND, "gateway.vllm_plugin.transfer", "HttpTransferEngine")


class SpangradWorker:
    """Worker extension: methods that collective_rpc may call beside vLLM's own."""

    def spangrad_checksum(self, base_only: bool = False) -> str:
        """Return the checksum of the model's parameters, and of the active adapters unless `base_only`."""
        model = self.get_model()
        parameters = [parameter for _, parameter in model.named_parameters()]
        return checksum(parameters if base_only else [*parameters, *_active_adapters(model)])


def _active_adapters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield A and B of each layer, of each active adapter."""
    manager = getattr(model, "lora_manager", None)
    slots = [] if manager is None else [slot for slot, adapter in enumerate(manager.lora_index_to_id) if adapter is not None]
    for layer in {id(module): module for module in manager.modules.values()}.values() if slots else ():
        if hasattr(layer, "w13_lora_a_stacked"):
            raise ValueError("the model has adapters of experts: vLLM keeps them in another form, which checksums do not know")
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            for matrices in stacked if isinstance(stacked, tuple | list) else (stacked,):
                yield from (matrices[slot] for slot in slots)


@torch.inference_mode()
def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return the multiset checksum of tensors of one floating dtype; the formula is in `spangrad.weights.checksums`.

    Raises:
        ValueError: the dtypes differ, or are not of two or four bytes.
    """
    total, dtypes = 0, set()
    for tensor in tensors:
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        bits = {2: torch.int16, 4: torch.int32}.get(tensor.element_size())
        if bits is None:
            raise ValueError(f"a parameter is {tensor.dtype}: checksums know dtypes of two and four bytes")
        words = tensor.detach().contiguous().view(-1).view(bits)
        for start in range(0, words.numel(), CHUNK_WORDS):
            total += _mix(words[start : start + CHUNK_WORDS], 8 * tensor.element_size())
    if len(dtypes) != 1:
        raise ValueError(f"the parameters are {', '.join(sorted(dtypes)) or 'none'}: one dtype is needed for a checksum")
    return f"{dtypes.pop()}:{total & MASK:016x}"


def _mix(words: torch.Tensor, bits: int) -> int:
    """Return the sum of the mixed words. int64 arithmetic wraps as uint64's does, so only shifts and the sign need care."""
    mixed = words.to(torch.int64) & (2**bits - 1)
    mixed *= _signed(MIX_A)
    mixed ^= (mixed >> 32) & (2**32 - 1)
    mixed *= _signed(MIX_B)
    mixed ^= (mixed >> 29) & (2**35 - 1)
    return int(mixed.sum())


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
