"""Metrics of each version for TensorBoard, Weights & Biases, MLflow and others, by verl's own tracking.

In: steps, and metrics of versions on held-out rollouts. Out: scalars under grouped names (`train/loss`, `seconds/publish`,
`validate/return`), by version number. Invariant: a tracker gets a version's metrics once it is committed, never before.

verl is imported once there is something to log.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from spangrad.errors import SettingsError
from trainer.monitor.watching import Watcher
from trainer.publish.checkpoint import branch_directory

if TYPE_CHECKING:
    from spangrad.settings import Settings
    from trainer.ledger.tables import LedgerVersion
    from trainer.monitor.watching import CommittedStep

_GROUPS = ("seconds", "validate", "held_out", "staleness", "mean_reward", "logprob_gap")
"""Prefixes of names that are groups of their own; all other names are in the group `train`."""


class Trackers(Watcher):
    """Trackers of trainer.trackers: project = the policy, experiment = its branch."""

    def __init__(self, settings: Settings) -> None:
        """Check that they can be opened. Files are beside the branch's checkpoints, unless the tracker's own variables say otherwise.

        Raises:
            SettingsError: a tracker's package is not installed.
        """
        for name in settings.trainer.trackers:
            if name != "file" and importlib.util.find_spec(name) is None:
                raise SettingsError(f"trainer.trackers names {name!r}, whose package is not installed. Run `pip install {name}`.")
        self._settings = settings
        self._opened: Any = None

    @property
    def _tracking(self) -> Any:
        # Not before there is something to log: a run without a batch opens nothing, and verl is not imported before the optimizer has
        # chosen its platform.
        if self._opened is None:
            self._opened = _open(self._settings)
        return self._opened

    def stepped(self, step: CommittedStep) -> None:
        """Log a version's metrics."""
        metrics = {**step.version.metrics, "seconds_idle_share": step.idle_share}
        data = {grouped(name): value for name, value in metrics.items() if not name.startswith("validate_")}
        self._tracking.log(data=data, step=step.version.version)

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        """Log held-out metrics at the newest version's step, since W&B refuses earlier ones; `validate/version` names their version."""
        data = {grouped(name): value for name, value in version.metrics.items() if name.startswith("validate_")}
        self._tracking.log(data={**data, "validate/version": version.version}, step=newest)

    def close(self) -> None:
        """Flush the trackers and close them."""
        if self._opened is not None:
            self._opened.finish()


def _open(settings: Settings) -> Any:
    trainer = settings.trainer
    branch_files = branch_directory(trainer)
    directories = {
        "TENSORBOARD_DIR": str(branch_files / "tensorboard"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{branch_files / 'mlflow.db'}",
        "WANDB_DIR": str(branch_files),
        "VERL_FILE_LOGGER_PATH": str(branch_files / "metrics.jsonl"),
    }
    defaults = {name: directory for name, directory in directories.items() if name not in os.environ}
    os.environ.update(defaults)
    try:
        from verl.utils.tracking import Tracking

        return Tracking(
            project_name=trainer.policy,
            experiment_name=f"{trainer.branch} of {trainer.run_id}",
            default_backend=list(trainer.trackers),
            config={"trainer": trainer.model_dump(mode="json"), "builder": settings.builder.decides},
        )
    finally:
        for name in defaults:
            del os.environ[name]


def grouped(name: str) -> str:
    """Return a metric's name with its group: `seconds_train` -> `seconds/train`, `loss` -> `train/loss`."""
    for group in _GROUPS:
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"train/{name}"
