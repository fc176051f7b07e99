"""Optimizers under the Ray that the tests of this package share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ray_cluster.optimizers import RayOptimizers


@pytest.fixture(scope="package")
def ray_optimizers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayOptimizers]:
    """Yield verl's optimizers of `tiny_model` under one Ray: `reset` gives them to a file."""
    shared = RayOptimizers(tiny_model, tmp_path_factory.mktemp("ray-optimizers"))
    yield shared
    shared.close()
