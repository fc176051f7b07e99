"""Trained tokens of a batch with one row per rollout: the responses for losses over whole responses.

Invariant: every trained token of a real row has one cell, in whichever rows its rollout's calls are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.batch import Batch


@dataclass(frozen=True)
class RolloutTokens:
    """Position of each trained token among those of its rollout. Arrays have one element per token."""

    row: NDArray[np.int64]
    """Row of each token in the batch."""
    column: NDArray[np.int64]
    """Index of each token in its row's response."""
    rollout: NDArray[np.int64]
    """Number of each token's rollout, from 0, among the rollouts of the batch with a trained token."""
    position: NDArray[np.int64]
    """Index of each token among its rollout's trained tokens."""
    shape: tuple[int, int]
    """Shape of the batch's arrays: rows, response tokens."""

    @classmethod
    def of(cls, batch: Batch) -> RolloutTokens:
        """Return the trained tokens of a batch."""
        row, column = np.nonzero(batch.response_mask[: batch.real_rows])
        order = np.argsort(batch.rollout[row], kind="stable")
        row, column = row[order], column[order]
        rollout = np.unique(batch.rollout[row], return_inverse=True)[1]
        place = np.arange(len(rollout)) - np.searchsorted(rollout, rollout)
        return cls(row, column, rollout, place, batch.response_mask.shape)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of trained tokens of each rollout."""
        return np.bincount(self.rollout)

    def scatter(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Lay out values of the batch's shape with one row per rollout; 0 beyond its tokens."""
        padded = np.zeros((int(self.rollout.max(initial=-1)) + 1, int(self.position.max(initial=-1)) + 1), values.dtype)
        padded[self.rollout, self.position] = values[self.row, self.column]
        return padded

    def gather(self, padded: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return values laid out by `scatter` in the batch's shape; 0 where nothing is trained."""
        values = np.zeros(self.shape, padded.dtype)
        values[self.row, self.column] = padded[self.rollout, self.position]
        return values

    def means(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the mean of values of the batch's shape over each rollout's tokens, one element per token."""
        sums = np.bincount(self.rollout, values[self.row, self.column].astype(np.float64))
        return (sums / np.maximum(self.lengths, 1))[self.rollout]

    def row_means(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the mean of values of the batch's shape over each row's tokens, one element per token."""
        counts = np.bincount(self.row, minlength=self.shape[0])
        sums = np.bincount(self.row, values[self.row, self.column].astype(np.float64), self.shape[0])
        return (sums / np.maximum(counts, 1))[self.row]

    @property
    def row_shares(self) -> NDArray[np.float32]:
        """Return the share of each row in its rollout's trained tokens; 0 where it has none."""
        counts, shares = np.bincount(self.row, minlength=self.shape[0]), np.zeros(self.shape[0], np.float32)
        shares[self.row] = counts[self.row] / self.lengths[self.rollout]
        return shares
