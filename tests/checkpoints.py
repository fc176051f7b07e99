"""A checkpoint of a real engine, as version 1 of policy `p`."""

from __future__ import annotations

from pathlib import Path

from trainer import checkpoint
from trainer.engine import Engine


def written(engine: Engine, base: Path, directory: Path) -> checkpoint.Checkpoint:
    """Write what an engine holds; `base` is the model that it began with."""
    names = {"policy": "p", "branch": "main", "batch_id": "b"}
    saving = {"save_weights": engine.save_weights, "save_state": engine.save_state}
    return checkpoint.write(directory, **names, version=1, parent=0, base=base, **saving)
