"""verl's platform interface, for a machine without an accelerator.

In: nothing; verl imports this module because `trainer.optim.optimizer` names it in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu.
Out: a platform named `cpu` in verl's registry. Invariant: every answer is the truth about a CPU (no memory pool, no streams,
no profiler ranges), and collectives go over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuModule:
    """`torch.cpu`, and the members of `torch.cuda` that verl asks of every device module."""

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

    def set_device(self, *_: object) -> None:
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
class PlatformCpu(PlatformBase):
    """One CPU device, always available."""

    @property
    def device_name(self) -> str:
        """PyTorch's device type."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """What verl calls the vendor."""
        return "cpu"

    @property
    def device_module(self) -> Any:
        """What verl uses in the place of `torch.cuda`."""
        return _CpuModule()

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True

    def current_device(self) -> str:
        """The device's name, which PyTorch takes where it takes an index."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is done when its call returns."""

    def manual_seed(self, seed: int) -> None:
        """Seed PyTorch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed PyTorch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no caching allocator."""

    def empty_cache(self) -> None:
        """There is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """CPUs have no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives go over gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A variable that nobody sets."""
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """What Ray calls a CPU."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray sets no visibility of CPUs."""
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """A worker takes as many CPUs as it would take GPUs."""
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        """Device memory handles do not exist."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""
