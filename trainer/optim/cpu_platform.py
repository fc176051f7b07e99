"""Platform plug-in of verl for a machine without an accelerator.

In: nothing; verl imports this module because `trainer.optim.optimizer` names it in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu.
Out: a platform named `cpu` in verl's registry. Invariant: every answer is true of a CPU (no memory pool, no streams,
no profiler ranges), and collectives go over gloo.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _always(value: object) -> Any:
    """Return a method that returns a value, whatever it is called with."""
    return lambda *_, **__: value  # pyright: ignore[reportUnknownLambdaType]


class _CpuModule:
    """Wrapper of `torch.cpu` with the members of `torch.cuda` that verl needs of every device module."""

    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = _always(0)
    mem_get_info = _always((0, 0))
    empty_cache = reset_peak_memory_stats = _always(None)
    get_device_name = _always("CPU")
    manual_seed = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class _PlatformCpu(PlatformBase):
    """Platform with one CPU device, always available, whose work is done when its call returns."""

    device_name: Any = "cpu"
    vendor_name: Any = "cpu"
    device_module: Any = _CpuModule()
    is_available = _always(True)
    current_device = _always("cpu")  # torch takes a CPU by name
    device_count = _always(1)
    set_device = synchronize = _always(None)
    manual_seed: Any = staticmethod(torch.manual_seed)
    manual_seed_all: Any = manual_seed
    set_allocator_settings = empty_cache = _always(None)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CPU_VISIBLE_DEVICES")
    nvtx_range = _always(nullcontext())
    profiler_start = profiler_stop = cudart = _always(None)
    ray_resource_name = _always("CPU")
    ray_noset_envvars = _always(())
    is_ipc_supported = _always(False)

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}
