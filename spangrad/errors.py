"""Errors that users see, one class for each part that raises them, and Python's own errors for JSON that cannot be read.

Every message names the value, the place and the remedy. Bad rollouts are data (`DropReason`), not errors.
"""

from __future__ import annotations

from collections.abc import Mapping

JSON_ERRORS = (ValueError, RecursionError)
"""Errors of json, and of msgspec from 0.21 on, for a text that cannot be read: where it is no JSON or no UTF-8, a ValueError of any
class; where it is nested too deep, a RecursionError."""


class SpangradError(Exception):
    """Base of all errors that a user can fix; the command line prints the sentence and exits with `exit_code`."""

    exit_code = 1
    http_status: int | None = None
    """HTTP status by which a service refused a request. None: the error is no such refusal."""


class SettingsError(SpangradError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class StoreError(SpangradError):
    """The span store refused, failed or could not be reached."""


class GatewayError(SpangradError):
    """The gateway refused, failed or could not be reached."""


class EngineError(SpangradError):
    """The inference engine did not start, died, or did not load the weights that it was sent."""


class QueueError(SpangradError):
    """The queue of rollouts refused, failed or could not be reached."""


class PromptError(SpangradError):
    """A prompt is missing, could not be fetched or stored, or its optimisation cannot continue."""


class AgentError(SpangradError):
    """An agent could not be loaded or started at all (a failed attempt is data, not an error)."""


class SandboxError(SpangradError):
    """A sandbox cannot be started as it was asked for: its engine is missing, or what it would show or reach is not allowed."""


class SandboxRequestError(SandboxError):
    """A running sandbox refuses a request or has ended, which programs in it can cause."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        """Keep the message, and the system's number of the error inside; None: it has none."""
        super().__init__(message)
        self.errno = errno


class EnvironmentsError(SpangradError):
    """An environment service could not be started or reached at all (an attempt without an environment is data, not an error)."""


class BuilderError(SpangradError):
    """The transition builder was given a build that it cannot do."""


class RuleError(BuilderError):
    """A rule, of a Python function or an expression, could not be evaluated; nothing was written of the rollouts that it was for."""


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
