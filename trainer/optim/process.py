"""Set-up of this process for verl and PyTorch: its device, its group of workers, and its output.

Invariant: no Ray cluster and no port is needed for one worker; verl's prints go to the log.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Literal

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from trainer.credit.learning import merges

logger = logging.getLogger(__name__)


_CPU = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform"}
_QUIET = {"VERL_LOGGING_LEVEL": "ERROR", "TQ_LOGGING_LEVEL": "ERROR"}
RENDEZVOUS = "SPANGRAD_RENDEZVOUS"
"""Environment variable of a rank's process: URL at which the ranks meet."""
LOGITS_CHUNK = 512
"""Largest number of tokens whose distributions over the vocabulary are computed at once (`trainer.optim.losses.trained_logits`)."""
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def choose_platform() -> str:
    """Tell verl, before anything of it is imported, whether there is a GPU, and return the device's name: cuda or cpu."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ.update(_CPU)
    return device


def prepare_process() -> str:
    """Tell verl and PyTorch about this process of one worker, and return the device's name."""
    import torch

    device = choose_platform()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    _silence_torch()
    if not torch.distributed.is_initialized():
        # A group of one needs no rendezvous over a port.
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group(_BACKENDS[device], store=store, rank=0, world_size=1)
    return device


def import_worker() -> ModuleType:
    """Import verl, and return the module that makes its workers.

    In a thread: modules of verl keep the errors of imports that they can do without, with all frames below them for the life of the
    process. Among the caller's frames those of the first optimizer would be, and its models would never be freed.
    """
    with ThreadPoolExecutor(1, "import") as pool:
        return pool.submit(importlib.import_module, "trainer.optim.verl_worker").result()


def check_device(settings: TrainerSettings, device: str) -> None:
    """Refuse settings that a device does not support.

    Raises:
        SettingsError: rows are to be packed on a CPU, or without flash attention.
    """
    if settings.packing and device == "cpu":
        raise SettingsError("trainer.packing = true needs a GPU, and there is none. Set trainer.packing = false.")
    if settings.packing and importlib.util.find_spec("flash_attn") is None:
        raise SettingsError("trainer.packing = true needs the package flash-attn. Install it, or set trainer.packing = false.")


def dtype_of(settings: TrainerSettings, device: str) -> Literal["fp32", "bf16"]:
    """Return the dtype that a model is computed in (trainer.dtype)."""
    return settings.dtype or ("fp32" if device == "cpu" else "bf16")


def held_versions(settings: TrainerSettings) -> int:
    """Return the number of earlier versions whose weights are held to check calls of them (trainer.alarms.logprob.held_versions)."""
    held = settings.alarms.logprob.held_versions
    return settings.sampling.max_staleness if held is None else held


def is_packed(settings: TrainerSettings, device: str) -> bool:
    """Return whether rows are packed end to end (trainer.packing)."""
    if settings.packing is None:
        return device != "cpu" and importlib.util.find_spec("flash_attn") is not None
    return settings.packing


def recomputes_activations(settings: TrainerSettings, device: str) -> bool:
    """Return whether the backward pass recomputes activations (trainer.gradient_checkpointing)."""
    return device != "cpu" if settings.gradient_checkpointing is None else settings.gradient_checkpointing


def describe_choices(settings: TrainerSettings, device: str) -> str:
    """Return in one line how a device trains, with the values of settings that are left to the device or the estimator."""
    switches = {
        "packing": is_packed(settings, device),
        "gradient_checkpointing": recomputes_activations(settings, device),
        "merge": merges(settings),
    }
    processes = max(settings.workers.per_node, 1) * settings.workers.nodes
    choices = {
        "device": device + (f" x {processes}" if processes > 1 else ""),
        "dtype": dtype_of(settings, device),
        **{name: "on" if value else "off" for name, value in switches.items()},
        "max_tokens_per_device": settings.max_tokens_per_device,
        "estimator": settings.credit.estimator,
        "loss": f"{settings.loss.name} ({settings.loss.aggregation})",
        "lora.rank": settings.lora.rank or "none",
        "weight_sync": settings.weight_sync.method if settings.weight_sync.publish else "none",
    }
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def worker_environment(device: str, *, own: bool) -> dict[str, str]:
    """Return the environment variables that a worker's process needs before it imports verl.

    Args:
        device: cuda or cpu.
        own: True if all workers are on this machine, and need no other interface than loopback.
    """
    interfaces = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {**_QUIET, **(_CPU if device == "cpu" else {}), **(interfaces if own else {})}


def gpu_of_process() -> Callable[[], None]:
    """Return a function that chooses the GPU which this process was given, in any thread.

    Each thread chooses its own, and Ray calls methods in another thread than the constructor.
    """
    import torch

    return functools.partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else lambda: None


def join_group() -> None:
    """Make this process a rank of the group that its environment names, with its share of the machine's cores, unless it is one.

    The environment is verl's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and `RENDEZVOUS` where the ranks meet elsewhere.
    """
    import torch

    if torch.distributed.is_initialized():
        return
    _silence_torch()
    on_this_machine = int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // on_this_machine))
    torch.distributed.init_process_group(
        _BACKENDS["cpu" if os.environ.get("VERL_PLATFORM") == "cpu" else "cuda"],
        init_method=os.environ.get(RENDEZVOUS, "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _silence_torch() -> None:
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of a rename on the first step


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep verl's prints and third parties' deprecation warnings from the user's terminal; errors and our own log lines pass."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if printed.getvalue().strip():
        logger.debug("verl: %s", printed.getvalue().strip())
