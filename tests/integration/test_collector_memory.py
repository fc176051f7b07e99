"""Both allocators of the store's process are told to keep memory, before the engine is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ENGINE = """
from collector.memory import keep_memory
keep_memory()
import chdb
print(chdb.query("SELECT * FROM system.jemalloc_stats", "TSVRaw"))
"""
_PYTHON = """
import resource
from collector.memory import keep_memory
keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [b"x" * (24 * 2**20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def output_of(program: str, **environment: str) -> str:
    """Return the standard output of a Python program that runs in a fresh process."""
    variables = {name: value for name, value in os.environ.items() if name != "JE_MALLOC_CONF"} | environment
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=variables).stdout


@pytest.mark.parametrize(
    ("environment", "decay"),
    [({}, "opt.dirty_decay_ms: 60000"), ({"JE_MALLOC_CONF": "dirty_decay_ms:7000"}, "opt.dirty_decay_ms: 7000")],
    ids=["ours", "the environment's"],
)
def test_store_process_keeps_database_memory(environment: dict[str, str], decay: str) -> None:
    assert decay in output_of(_ENGINE, **environment)


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="other C libraries keep what they like")
def test_store_process_keeps_python_memory() -> None:
    # 20 times 96 MiB are 490,000 pages; what is kept is paid for once.
    assert int(output_of(_PYTHON)) < 10_000
