"""Figures of GPUs, and of what connects them, by which a plan computes seconds.

Figures of GPUs are those of NVIDIA's data sheets, without sparsity: A100 (June 2021), H100 (SXM5, 2023), H200 (SXM, 2024) and L40S (2023).
`memory_bytes` is what PyTorch can allocate, which is less than the name says. Rates are in bytes a second and in one direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from spangrad.errors import SettingsError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    bf16_flops: float
    """Peak of dense products of bfloat16, in operations a second."""
    fp32_flops: float
    memory_rate: float
    """Rate of the GPU's own memory."""
    peer_rate: float
    """Rate to another GPU of the host: NVLink where there is one, else PCIe."""
    host_rate: float
    """Rate to the host's memory (PCIe)."""


GPU_MODELS = {
    gpu.name: gpu
    for gpu in (
        GpuModel("L40S", int(44.4 * _GIB), 362e12, 91.6e12, 864e9, 32e9, 32e9),
        GpuModel("A100-40", int(39.4 * _GIB), 312e12, 19.5e12, 1555e9, 300e9, 32e9),
        GpuModel("A100-80", 79 * _GIB, 312e12, 19.5e12, 2039e9, 300e9, 32e9),
        GpuModel("H100", 79 * _GIB, 989e12, 67e12, 3350e9, 450e9, 64e9),
        GpuModel("H200", int(139.8 * _GIB), 989e12, 67e12, 4800e9, 450e9, 64e9),
    )
}
_BY_SIZE = {40: "A100-40", 48: "L40S", 80: "A100-80", 141: "H200"}
"""Memory in GB by which a GPU is named -> the slowest kind of that memory."""

NETWORK_RATE = 50e9
"""Rate of the network between two hosts: 400 Gbit/s. An assumption."""
DISK_RATE = 1e9
"""Rate at which one process reads or writes a file. An assumption: a shared file system."""
CHECKSUM_RATE = 1.9e9
"""Rate of `checksum_directory` over float32 words, on one core (measured: 1.9 to 2.3 GB/s of CPU time)."""
CAST_CHECKSUM_RATE = 1.8e9
"""Rate of `checksum_directory` over float32 words that are cast to bfloat16, on one core (measured: 1.8 to 1.9 GB/s of CPU time)."""
CAST_RATE = 0.5e9
"""Rate at which a rank casts float32 weights for an engine of trainer.weight_sync.method `transfer` (measured: 0.3 to 0.8 GB/s)."""
TRAINING_MFU = 0.35
"""Share of a GPU's peak that training reaches. An assumption."""
PREFILL_MFU = 0.5
"""Share of a GPU's peak that an engine reaches in batches of many tokens. An assumption."""
ALL_REDUCE_SECONDS = 15e-6
"""Time of a sum over a host's GPUs, however little is summed. An assumption."""
DECODE_SHARE = 0.6
"""Share of the memory's rate that decoding reaches. An assumption."""
_MOST_PER_HOST = 64
"""Largest number of GPUs of a host: no host has more, and the time of a search grows with it."""


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """Hosts with GPUs of one kind."""

    gpu: GpuModel
    per_host: int
    hosts: int
    host_bytes: int | None = None
    """Memory of a host. None: not known, so nothing is held against it."""


def cluster_of(gpus: str, hosts: int, host_gb: float | None = None) -> GpuCluster:
    """Return the cluster that a command line describes.

    Args:
        gpus: COUNTxMEMORY in GB, such as 8x80, or COUNTxNAME, such as 8xH100: the GPUs of one host, at most 64.
        hosts: number of hosts.
        host_gb: memory of a host, in GB.

    Raises:
        SettingsError: it is of another form, or names no known GPU.
    """
    match = re.fullmatch(r"([1-9]\d?)x(.+)", gpus.strip())
    if match is None or int(match[1]) > _MOST_PER_HOST or hosts < 1:
        raise SettingsError(
            f"--gpus {gpus!r} on --nodes {hosts} is no cluster. Write the GPUs of one host, at most {_MOST_PER_HOST}, as COUNTxMEMORY "
            "in GB or COUNTxNAME, such as 8x80 or 8xH100, and the number of hosts as --nodes."
        )
    if host_gb is not None and not 0 < host_gb < 1e9:
        raise SettingsError(f"--host-memory {host_gb:g} is no memory of a node. Give it in GB, such as 2000.")
    return GpuCluster(_gpu(match[2]), int(match[1]), hosts, None if host_gb is None else int(host_gb * 1e9))


def _gpu(text: str) -> GpuModel:
    named = {name.upper(): gpu for name, gpu in GPU_MODELS.items()}.get(text.upper())
    if named:
        return named
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise SettingsError(f"--gpus: {text!r} is no known GPU. Take {', '.join(GPU_MODELS)}, or its memory in GB, such as 8x80.")
    size = int(text)
    if size in _BY_SIZE:
        return GPU_MODELS[_BY_SIZE[size]]
    # Smaller GPUs have no NVLink.
    nearest = GPU_MODELS["L40S" if size < min(_BY_SIZE) else _BY_SIZE[min(_BY_SIZE, key=lambda known: (abs(known - size), known))]]
    return replace(nearest, name=f"{size} GB, computing like {nearest.name}", memory_bytes=size * 10**9)
