"""One flat family of errors, named by the boundary that was crossed.

Every message names the value, the place and the remedy. Bad rollouts are data (`drops`), not errors.
"""

from __future__ import annotations

from collections.abc import Mapping


class SpangradError(Exception):
    """Base of all errors that a user can mend; the command line prints the sentence and exits with `exit_code`."""

    exit_code = 1


class SettingsError(SpangradError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class StoreError(SpangradError):
    """The span store refused, failed or could not be reached."""


class GatewayError(SpangradError):
    """The gateway refused, failed or could not be reached."""


class EngineError(SpangradError):
    """The inference engine did not start, died, or did not take the weights it was given."""


class QueueError(SpangradError):
    """The queue of rollouts refused, failed or could not be reached."""


class PromptError(SpangradError):
    """A prompt is not there, could not be fetched or kept, or its optimisation cannot go on."""


class AgentError(SpangradError):
    """An agent could not be loaded or started at all (a failed attempt is data, not an error)."""


class EnvironmentsError(SpangradError):
    """A service of environments could not be started or reached at all (an attempt that got none is data, not an error)."""


class BuilderError(SpangradError):
    """The transition builder was asked for something it cannot build."""


class RuleError(BuilderError):
    """A rule that is a Python function could not be evaluated; nothing was written of what it was asked about."""


class TrainerError(SpangradError):
    """A batch could not be trained."""


class BadRowsError(TrainerError):
    """Rows of a batch failed a check before anything was changed: weights, moments and gradients are as they were."""

    def __init__(self, message: str, rows: Mapping[int, str]) -> None:
        """Name the rows of the batch that failed, each with the reason to skip its group (`trainer.ledger.skips.SkipReason`)."""
        super().__init__(message)
        self.rows = dict(rows)


class LedgerError(SpangradError):
    """The ledger's facts contradict each other, or a lease was lost."""


class CheckpointError(SpangradError):
    """A checkpoint is missing, incomplete or does not match its checksum."""
