"""Optimizer of a version: its weights and its state; steps since the last state that was written are replayed from the store.

In: the ledger, the checkpoints, the store. Out: an optimizer that goes on as if it had never stopped. Invariant: no version is made and
none changes. A replay trains the batches of the ledger at the revisions that were trained, and whatever it leads to, the weights in the end
are exactly the version's own.

On one device and the same settings a replay repeats every step bit by bit. Where it does not (kernels that are not deterministic, another
number of ranks, a changed learning rate), moments differ a little from those that were lost, and that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import BadRowsError, CheckpointError
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import checksum_of
from trainer.data.assemble import assemble
from trainer.data.source import GroupReader
from trainer.ledger.file_batches import has_trainers_state
from trainer.ledger.ledger import Ledger
from trainer.ledger.optimizer_state import steps_since_state
from trainer.ledger.recovery import earlier_checkpoints
from trainer.ledger.tables import LedgerVersion
from trainer.publish import checkpoint
from trainer.publish.lora import model_of

if TYPE_CHECKING:
    from trainer.credit.assignment import Normalise
    from trainer.optim.optimizer import VerlOptimizer

logger = logging.getLogger(__name__)


def restore(
    version: LedgerVersion,
    ledger: Ledger,
    source: GroupReader,
    settings: TrainerSettings,
    normalise: Normalise,
    make: Callable[[Path], VerlOptimizer],
) -> VerlOptimizer:
    """Return the optimizer of a version of the ledger's branch; `make` makes one of a Hugging Face model directory.

    Steps since its last state are replayed with batches that `source` reads.

    Raises:
        CheckpointError: a checkpoint is not what was committed, or a step cannot be replayed.
    """
    checkpoint.verify(Path(version.policy_version.path), version.policy_version.checksum)
    base, steps = steps_since_state(ledger, version)
    path = Path(base.policy_version.path)
    if steps:
        checkpoint.verify(path, base.policy_version.checksum)
    model = model_of(path)
    optimizer = make(model)
    try:
        if has_trainers_state(ledger.database, base):
            optimizer.load_state(path)
        elif model != path:
            optimizer.load_adapters(path)
        optimizer.hold(earlier_checkpoints(ledger, base, optimizer.versions_to_hold))
        if steps:
            logger.info(
                "the optimizer's state was last written with version %d: the steps of versions %s are replayed",
                base.version, ", ".join(str(step.version) for step in steps),
            )  # fmt: skip
            _replay(optimizer, base, steps, ledger, source, settings, normalise)
            _take_weights(optimizer, version)
    except BaseException:
        optimizer.close()
        raise
    return optimizer


def _replay(
    optimizer: VerlOptimizer,
    base: LedgerVersion,
    steps: Sequence[LedgerVersion],
    ledger: Ledger,
    source: GroupReader,
    settings: TrainerSettings,
    normalise: Normalise,
) -> None:
    """Train the batches that led from one version to another again.

    Raises:
        CheckpointError: the store lacks rows of a batch, or the optimizer refuses some.
    """
    parent = base
    for number, version in enumerate(steps, 1):
        loaded = source.load_batch(ledger.batch(version.policy_version.batch_id or ""))
        refusal = next(iter(loaded.incomplete.values()), None)
        if refusal is None:
            lineage, rows, tokenizer = ledger.lineage(parent.version), optimizer.data_parallel_size, parent.tokenizer_hash
            batch, _, _ = assemble(loaded, settings, normalise, lineage=lineage, divisor=rows, tokenizer_hash=tokenizer)
            try:
                optimizer.step(batch)
            except BadRowsError as error:
                refusal = str(error)
        if refusal is not None:
            raise CheckpointError(
                f"the step of version {version.version} cannot be replayed: {refusal} Restore the rows in the store from a copy, or go on "
                f'from version {base.version} with trainer.checkpoint.after_crash = "orphan".'
            )
        logger.info("the step of version %d is replayed (%d of %d)", version.version, number, len(steps))
        parent = version


def _take_weights(optimizer: VerlOptimizer, version: LedgerVersion) -> None:
    """Load a version's own weights, unless the replay led to exactly these."""
    if checksum_of(optimizer.weight_sums(), "float32") == version.policy_version.checksum:
        return
    optimizer.load_weights(Path(version.policy_version.path))
    logger.warning(
        "the replay led to other weights than those of version %d, which are kept: settings have changed since, or this device does not "
        "compute the same twice. The optimizer's moments are those of the replay.",
        version.version,
    )
