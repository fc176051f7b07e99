"""The optimizer: it passes a batch forward and backward through the workers, and steps the weights.

Invariant: weights change only in a step whose first forward pass reproduced the logprobs that its rows were sampled with, and whose every
gradient was finite; a step that fails a check leaves weights, moments, gradients and random states as before. The parts of a step are
`trainer.optim.phases`; the workers are one in this process, or several under Ray (`trainer.optim.workers`).

Code that needs PyTorch and verl is in `rank`, `verl_worker`, `rows`, `losses`, `credit.estimators` and `process`; it is imported once an
`VerlOptimizer` is made or values are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError, LedgerError, TrainerError
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import TensorSums
from trainer.credit.learning import check
from trainer.data.batch import Batch, TokenValues
from trainer.monitor import logprob_check
from trainer.monitor.row_check import RowCheck
from trainer.optim.phases import StepPhases
from trainer.optim.process import dtype_of, held_versions
from trainer.optim.workers import begin
from trainer.publish.rank_sender import RankAddress


class VerlOptimizer:
    """Model with its optimizer, and the step of both."""

    def __init__(self, model: Path, settings: TrainerSettings, *, engine_dtype: str = "auto") -> None:
        """Load the weights of `model` (a Hugging Face directory), in float32 for any dtype of the file, and those of the reference.

        Raises:
            SettingsError: the settings cannot be carried out, or have no meaning.
        """
        check(settings)
        self.settings = settings
        self._workers = begin(model, settings)
        self.device = self._workers.device
        self.data_parallel_size = self._workers.size
        """Number that a batch's rows must be divisible by."""
        sync = settings.weight_sync
        sends = sync.publish and sync.method == "transfer"
        # They start with the ranks: a rank takes no call amid a step, and its sender answers then.
        self.rank_senders: Sequence[RankAddress] = self._workers.everywhere("serve_parts") if sends else ()
        """Senders of the ranks' own parts of the parameters of `weights`. Empty: weights are not sent."""
        import torch

        self._order = torch.Generator()  # of mini-batches; it begins with the same state every time
        self._check = RowCheck(settings, logprob_check.engine_dtype(engine_dtype), dtype_of(settings, self.device))
        self._held_versions = 0
        self.token_values = TokenValues(*[np.zeros((0, 0), np.float32)] * 3)
        """Values of the sampled tokens in the last step."""
        self.pass_seconds: dict[str, float] = {}
        """Metrics of the last step: seconds_forward and seconds_backward of the first rank."""

    @property
    def versions_to_hold(self) -> int:
        """Return the number of earlier versions whose weights are held to check calls of them."""
        return 0 if self.settings.lora.rank else held_versions(self.settings)

    def hold(self, checkpoints: Sequence[Path]) -> None:
        """Hold the weights of the versions before the loaded one, as if this process had made the steps.

        Args:
            checkpoints: their directories, oldest first, without a gap; `versions_to_hold` at most.

        Raises:
            CheckpointError: one of them cannot be loaded into the model.
        """
        for directory in checkpoints:
            self._workers.everywhere("hold_weights", directory.absolute())
            self._held_versions += 1

    def step(self, batch: Batch, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Train on a batch: trainer.optim.epochs x trainer.optim.mini_batches optimizer steps, without those whose gradient is 0.

        A step of zero gradient would still move the weights by AdamW's moments, so it is left out; the logprobs of the batch are checked
        all the same.

        Args:
            batch: rows that are trained.
            before_update: called once, before weights, moments or critic change; at the end where nothing does.

        Returns:
            Means over the optimizer steps of loss, entropy (nats, over trained tokens), and where the loss reports them clip_fraction,
            clip_low, clip_high, ppo_kl and reference_kl; advantage_mean and advantage_std, over trained tokens; mfu, where verl knows the
            GPU's peak; grad_norm (before clipping, the largest); `RowCheck.compare`'s, absent where no token was sampled; correction_*;
            `reshaped.corrected`'s, where rows are reshaped; updated (number of optimizer steps).

        Raises:
            BadRowsError: rows fail a check, and everything is as before; or ranks that were stuck meanwhile have been ended.
            LedgerError: `before_update` raised it, and the same holds.
        """
        self._check.require_recorded(batch)
        order = self._order.get_state()
        phases = self.phases(batch, before_update)
        self._workers.everywhere("begin_step", phases.several or phases.has_critic)
        try:
            self._workers.run(phases)
            metrics = phases.end()
        except (BadRowsError, LedgerError) as refusal:
            try:
                self._workers.everywhere("undo_step")
            except TrainerError:  # ranks that were stuck were ended, as the next step says; the refusal must be kept for the next start
                raise refusal from None
            self._order.set_state(order)
            raise
        self.token_values = phases.token_values()
        self.pass_seconds = self._workers.everywhere("pass_times")
        self._workers.everywhere("end_step")
        self._held_versions = min(self._held_versions + 1, held_versions(self.settings))
        return metrics

    def phases(self, batch: Batch, before_update: Callable[[], None] | None = None) -> StepPhases:
        """Return the phases of a step on a batch, none of which is done."""
        return StepPhases(batch.numbered(), self.settings, self._workers, self._check, self._order, self._held_versions, before_update)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield every parameter by its Hugging Face name, tied ones once, with adapters merged."""
        return self._workers.weights()

    def collect(self, *, state: bool = True) -> None:
        """Copy to main memory what `write` writes.

        That is the parameters of `weights`, and with `state` AdamW's moments, schedule, random states, adapters beside their base, and the
        critic.
        """
        self._workers.everywhere("collect", self._order.get_state(), state)

    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Write what was collected into a directory, from any thread, until the next update; under Ray each worker writes its part.

        Returns:
            Sums of the parameters that were written, by name.
        """
        return self._workers.write(directory.absolute())

    def weight_sums(self) -> dict[str, TensorSums]:
        """Return the sums of the parameters of `weights`, which no process gathers for it."""
        return self._workers.weight_sums()

    def load_state(self, directory: Path) -> None:
        """Read the state that `write` wrote, so that training resumes as if it had never stopped. A critic that it lacks starts untrained.

        The number of workers may differ from the number that wrote it.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings.
        """
        self._order.set_state(self._workers.everywhere("load_state", directory.absolute()))

    def load_adapters(self, directory: Path) -> None:
        """Give the policy the adapters of a state that `write` wrote, and leave all else as it is: another branch begins with them.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings.
        """
        self._workers.everywhere("load_adapters", directory.absolute())

    def load_weights(self, directory: Path) -> None:
        """Give the policy the weights of a checkpoint, and leave all else as it is.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        self._workers.everywhere("load_weights", directory.absolute())

    def offload(self) -> None:
        """Move the models and their moments to main memory, and give the devices' memory back, until `load_back`."""
        self._workers.everywhere("offload")

    def load_back(self) -> None:
        """Move the models and their moments to the devices again."""
        self._workers.everywhere("load_back")

    def close(self) -> None:
        """End the workers; nothing may be called after that."""
        self._workers.close()
