"""A checkpoint of a real engine, as version 1 of policy `p`."""

from __future__ import annotations

from pathlib import Path

from trainer.optim.optimizer import VerlOptimizer
from trainer.publish import checkpoint
from trainer.publish.lora import adapter_of


def written(engine: VerlOptimizer, base: Path, directory: Path) -> checkpoint.Checkpoint:
    """Write what an engine holds; `base` is the model that it began with."""
    return checkpoint.write(
        directory,
        policy="p",
        branch="main",
        version=1,
        parent=0,
        batch_id="b",
        base=base,
        save_weights=engine.save_weights,
        save_state=engine.save_state,
        adapter=adapter_of(base, engine.settings),
    )
