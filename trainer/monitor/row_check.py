"""Checks of a batch's rows before an optimizer step: values that are not finite, and logprobs that differ from the recorded ones.

In: a batch, the trainer's logprobs of its tokens, settings. Out: metrics; or the rows that failed, as a `BadRowsError`. Invariant: a token
is compared with the weights that sampled it. Those of the trained version are loaded. Tokens of earlier versions that agree with them pass
at once; the others are compared with the weights of their version where they are held in memory, and else a drift is allowed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError
from spangrad.settings import TrainerSettings
from trainer.credit.learning import clip_range
from trainer.data.batch import Batch
from trainer.monitor import logprob_check
from trainer.monitor.logprob_check import Dtype

LOGPROB_GAP, NOT_FINITE = "logprob_gap", "not_finite"
"""Values of `trainer.ledger.skips.SkipReason`."""
Logprobs = NDArray[np.float32]
EarlierLogprobs = Callable[[NDArray[np.bool_], int], Logprobs | None]
"""Function from a mask of tokens and their staleness (versions) to their logprobs (nats) under their version; None: it is not held."""


class RowCheck:
    """Checks of rows by the trainer's settings."""

    def __init__(self, settings: TrainerSettings, engine: Dtype, trainer: Dtype) -> None:
        self._alarm = settings.alarms.logprob
        self._limits = logprob_check.limits_of(settings.alarms.logprob, engine, trainer)
        self._clip = clip_range(settings)

    def require_recorded(self, batch: Batch) -> None:
        """Check the logprobs that the engine recorded, before anything is computed from them.

        Raises:
            BadRowsError: a logprob is not finite.
        """
        self._require_finite(batch, batch.logprobs, "engine")

    def compare(self, batch: Batch, computed: Logprobs, earlier: EarlierLogprobs) -> dict[str, float]:
        """Compare recorded logprobs with the trainer's at the start of the step; `earlier` is called at most once for an earlier version.

        Returns:
            `logprob_check.metrics` of all tokens but those of reshaped rows, which were recorded of another distribution; and, of versions
            whose weights were asked, `held_gap_mean_behind_N`: mean |difference| from those (nats). Nothing where there is no such token.

        Raises:
            BadRowsError: rows differ by more than trainer.alarms.logprob allows, or the trainer's logprobs are not finite.
        """
        self._require_finite(batch, computed, "trainer")
        mask = batch.response_mask.astype(bool) & ~batch.reshaped[:, None]
        if not mask.any():
            return {}
        metrics = logprob_check.metrics(batch.logprobs[mask], computed[mask], batch.staleness[mask], self._clip)
        bad: dict[int, list[str]] = {}
        for behind in np.unique(batch.staleness[mask & (batch.staleness >= 0)]).tolist():
            chosen = mask & (batch.staleness == behind)
            other, limits = computed, self._limits
            rows = logprob_check.bad_rows(batch.logprobs, other, chosen, limits)
            if behind and len(rows):
                if (then := earlier(chosen, behind)) is None:
                    limits = limits.after(behind * self._alarm.drift)
                else:
                    self._require_finite(batch, then, "trainer")
                    other = then
                    metrics[f"held_gap_mean_behind_{behind}"] = float(np.abs(other - batch.logprobs)[chosen].mean())
                rows = logprob_check.bad_rows(batch.logprobs, other, chosen, limits)
            if len(rows):
                named = chosen & np.isin(np.arange(len(chosen)), rows)[:, None]
                beyond = logprob_check.beyond(batch.logprobs, other, named, limits)
                bad |= dict.fromkeys(rows.tolist(), beyond or ["a row's mean |difference| out of proportion"])
        if bad:
            raise BadRowsError(_bad_rows_message(bad, batch), dict.fromkeys(bad, LOGPROB_GAP))
        return metrics

    def _require_finite(self, batch: Batch, logprobs: Logprobs, side: str) -> None:
        rows = np.flatnonzero((batch.response_mask.astype(bool) & ~np.isfinite(logprobs)).any(axis=1))
        if len(rows):
            raise BadRowsError(
                f"logprobs of {len(rows)} of {batch.real_rows} rows are NaN or infinite, as the {side} gives them, so no step was taken. "
                f"Look for NaN in the weights that the {side} holds.",
                dict.fromkeys(rows.tolist(), NOT_FINITE),
            )


def blame_gradient(batch: Batch, computed: Logprobs, norm: float) -> BadRowsError:
    """Return the error of a gradient that is not finite."""
    values = (computed, batch.advantages, batch.logprobs)
    mask = batch.response_mask.astype(bool)
    rows = np.flatnonzero((mask & ~np.logical_and.reduce([np.isfinite(value) for value in values])).any(axis=1))
    named = rows.tolist() or list(range(batch.real_rows))
    return BadRowsError(
        f"the gradient's norm is {norm}, so no step was taken. It comes of {len(named)} of {batch.real_rows} rows: look for extreme "
        "rewards or logprobs in them. Lower trainer.optim.learning_rate if earlier steps' norms grew.",
        dict.fromkeys(named, NOT_FINITE),
    )


def _bad_rows_message(bad: dict[int, list[str]], batch: Batch) -> str:
    reasons = "; ".join(dict.fromkeys(", ".join(beyond) for beyond in bad.values()))
    systematic = len(bad) == batch.real_rows
    remedy = (
        "every row differs, so that the fault is not a row's own: check that the engine served this very version, that it dropped its "
        "prefix cache at the reload, and that the temperature of calls is recorded"
        if systematic
        else "check the calls of these rows"
    )
    return (
        f"the logprobs that {len(bad)} of {batch.real_rows} rows were sampled with differ from the trainer's ({reasons}: "
        f"trainer.alarms.logprob), so no step was taken; {remedy}. Logprobs must be processed ones (--logprobs-mode processed_logprobs), "
        "without top-p, top-k, penalties or grammars, of the trainer's tokenizer, in the dtypes that engine.dtype and trainer.dtype name."
    )
