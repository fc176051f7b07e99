"""Additions to verl's stock trainer for a machine without an accelerator, loaded in every process by VERL_USE_EXTERNAL_MODULES.

In: nothing. Out: FSDP2 on the platform `cpu`, process groups of gloo alone, and no module of this project.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
_init = torch.distributed.init_process_group


def _by_gloo(backend: str | None = None, **arguments: Any) -> None:
    """Begin a group; verl names a backend for the CPU and one for its device, which is the CPU."""
    _init("gloo" if backend and "gloo" in backend else backend, **arguments)


torch.distributed.init_process_group = _by_gloo


class _NoneOfOurs:
    """Finder that refuses modules of this project: the trainer knows the service by HTTP alone."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in {"spangrad", "runner", "gateway", "transition_builder", "span_processors"}:
            raise AssertionError(f"verl's process imports {name}")


assert not {"spangrad", "runner", "gateway"} & {name.partition(".")[0] for name in sys.modules}
sys.meta_path.insert(0, _NoneOfOurs())  # type: ignore[arg-type]
