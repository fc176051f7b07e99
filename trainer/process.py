"""This process as verl and PyTorch see it: its device, its group of one worker, and silence.

In: the machine. Out: the device's name. Invariant: no Ray cluster and no port is needed for one worker; what verl prints goes to the
log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

logger = logging.getLogger(__name__)


def choose_platform() -> str:
    """Tell verl, before anything of it is imported, whether there is a GPU, and return the device's name: cuda or cpu."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="trainer.cpu_platform")
    return device


def prepare_process() -> str:
    """Tell verl and PyTorch about this process of one worker, and return the device's name."""
    import torch

    device = choose_platform()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    if not torch.distributed.is_initialized():
        # A group of one needs no rendezvous over a port.
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    return device


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep verl's prints and third parties' deprecation warnings from the user's terminal; errors and our own log lines pass."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if printed.getvalue().strip():
        logger.debug("verl: %s", printed.getvalue().strip())
