"""Commands that run a builder in their own process: the number of its threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_THREADS = """
import sys
import commands.data.rewards, commands.inspection.inspect, commands.training.build
from commands.options import limit_builder_threads
assert "polars" not in sys.modules, "threads are counted when Polars is imported"
limit_builder_threads()
import polars
print(polars.thread_pool_size())
"""


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("3", 3)])
def test_builder_threads_unless_given_are_one(given: str | None, threads: int) -> None:
    others = {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"}
    environment = others | ({"POLARS_MAX_THREADS": given} if given else {})
    shown = subprocess.run([sys.executable, "-c", _THREADS], env=environment, capture_output=True, text=True, check=True)
    assert int(shown.stdout) == threads
