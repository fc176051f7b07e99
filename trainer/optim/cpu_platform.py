"""Platform plug-in of verl for a machine without an accelerator.

In: nothing; verl imports this module because `trainer.optim.optimizer` names it in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu.
Out: a platform named `cpu` in verl's registry. Invariant: every answer is true of a CPU (no memory pool, no streams,
no profiler ranges), and collectives go over gloo.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuModule:
    """Wrapper of `torch.cpu` with the members of `torch.cuda` that verl needs of every device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def max_memory_allocated(self, *_: object) -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        return None

    def reset_peak_memory_stats(self, *_: object) -> None:
        return None

    def get_device_name(self, *_: object) -> str:
        return "CPU"

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


@PlatformRegistry.register(platform="cpu")
class _PlatformCpu(PlatformBase):
    """Platform with one CPU device, always available."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return _CpuModule()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch takes a CPU by name
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: there is no caching allocator."""

    def empty_cache(self) -> None:
        """Do nothing: there is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # verl does not type it
        """Do nothing: there are no profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        """Do nothing: there is no CUDA runtime."""
