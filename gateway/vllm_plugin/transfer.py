"""vLLM's weight-transfer protocol over plain HTTP: a worker fetches the words that it holds, from all ranks of the trainer at once.

In: vLLM's orders, with the trainer's plan of the transfer. Out: the model's parameters. Invariant: words go to the places to which vLLM's
own loaders copied them when the model was loaded (`gateway.vllm_plugin.layout`); where vLLM keeps them in another form, the worker fetches
whole tensors, and calls the same of vLLM's own functions as its backend over NCCL does. The checksum shows afterwards whether all arrived.

A worker asks for differences only from the version that it received last, if nothing else was loaded since.

Runs inside vLLM's workers: `--weight-transfer-config '{"backend": "spangrad_http"}'`, registered by `gateway.vllm_plugin.worker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gateway.vllm_plugin import layout
from gateway.vllm_plugin.fetching import RankParts, buckets_of, fetch
from gateway.vllm_plugin.placing import Target, WholeTensors, place, targets_in, whole_buckets

# Below vLLM's own name, whose handlers write to the engine's log.
logger = init_logger("vllm.spangrad.transfer")


@dataclass
class HttpInitInfo(WeightTransferInitInfo):
    """Information for the connection: none, since HTTP needs no process group."""


@dataclass
class HttpUpdateInfo(WeightTransferUpdateInfo):
    """The trainer's plan of a transfer."""

    version: str
    """Name of the words that are sent: none of another version or trainer has it."""
    base: str
    """Name of the version from which the trainer's ranks have differences. Empty: of none."""
    key: str
    """Token of the transfer."""
    dtype: str
    names: list[str]
    shapes: list[list[int]]
    ranks: list[dict[str, Any]]
    """`url`, and `parts`: number of the tensor, of the part's first word, and of its words."""

    def parts(self) -> list[RankParts]:
        """Return the parts of each rank."""
        return [RankParts(rank["url"], [(self.names[name], first, words) for name, first, words in rank["parts"]]) for rank in self.ranks]


class HttpTransferEngine(WeightTransferEngine[HttpInitInfo, HttpUpdateInfo]):
    """Receiver of weights in vLLM's workers."""

    init_info_cls = HttpInitInfo
    update_info_cls = HttpUpdateInfo
    _held = ("", -1)
    """Version that was received last, and the number of loads by vLLM until then."""
    _received = ""
    _by_layers = False
    """True between start and finish if vLLM loads whole tensors."""

    def init_transfer_engine(self, init_info: HttpInitInfo) -> None:
        """Do nothing: there is no connection to make."""

    def start_weight_update(self) -> None:
        """Do nothing: whether vLLM loads whole tensors is known with the plan."""
        self._received, self._by_layers = "", False

    def finish_weight_update(self) -> None:
        """Move what was loaded to the parameters that the model computes with, and derive what attention layers keep beside them."""
        if self._by_layers:
            finalize_layerwise_reload(self.model, self.model_config)
        else:
            for layer in self.model.modules():
                if is_deferred_attention_layer(layer):
                    layer.process_weights_after_loading(self.model_config.dtype)
        self._held = self._received, layout.loads()

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Receive the weights; unlike vLLM's own method, this waits for an accelerator only if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HttpUpdateInfo) -> None:
        """Fetch the words and put them in place, bucket by bucket.

        Raises:
            OSError: a rank of the trainer does not answer, or ended before all had come.
        """
        (held, loads), self._held = self._held, ("", -1)
        dtype, plan = getattr(torch, update_info.dtype), update_info
        targets, reason = self._targets()
        if reason:
            logger.warning_once("weights from the trainer are fetched as whole tensors: %s", reason)
            self._receive_whole(plan, dtype)
        else:
            ranks = plan.parts()
            buckets = buckets_of([(each.placement, each.tensor.dtype == dtype) for each in targets], ranks, dtype.itemsize)
            base = plan.base if plan.base == held and loads == layout.loads() else ""
            for fetched in fetch(buckets, ranks, **_facts(plan, dtype), base=base):
                place(fetched, targets, dtype)
        self._received = plan.version

    def _receive_whole(self, plan: HttpUpdateInfo, dtype: torch.dtype) -> None:
        initialize_layerwise_reload(self.model)
        self._by_layers = True
        ranks = plan.parts()
        shapes = list(zip(plan.names, plan.shapes, strict=True))
        whole = WholeTensors(shapes, dtype, lambda name, tensor: self.model.load_weights([(name, tensor.to(self.device))]))
        for fetched in fetch(whole_buckets(shapes, ranks, dtype.itemsize), ranks, **_facts(plan, dtype), base=""):
            whole.place(fetched)

    def _targets(self) -> tuple[list[Target], str]:
        loaded = layout.layout_of(self.model)
        if loaded is None:
            return [], "vLLM's default loader did not load this model"
        for name, layer in self.model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
                return [], f"{type(method).__name__} of {name} keeps weights in a form of its own"
        return targets_in(self.model.parameters(), loaded.placements, loaded.names)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


def _facts(plan: HttpUpdateInfo, dtype: torch.dtype) -> dict[str, Any]:
    return {"key": plan.key, "version": plan.version, "dtype": plan.dtype, "word_bytes": dtype.itemsize}
