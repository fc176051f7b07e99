"""Significance of a candidate's gain over the prompt that the search began with.

In: scores of both on the same tasks. Out: a mean gain and its p-value. Invariant: only differences within a task count; the same numbers
and seed give the same p-value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_EXACT_TASKS = 14
"""Largest number of differing tasks for which every assignment of signs is counted; beyond it, they are sampled."""
_DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain of one version over another."""

    mean: float
    """Mean of the differences by task."""
    p: float
    """Probability of a mean at least as large, if each task's difference had a random sign."""


def gain(base: Mapping[str, float], candidate: Mapping[str, float], seed: int) -> Gain:
    """Compare two versions on the tasks that both were measured on, by a one-sided paired permutation test.

    p = share of the assignments of signs s to the differences d for which mean(s * d) >= mean(d) (Fisher's randomisation test). Where there
    are too many to count, some are drawn, by the seed.
    """
    tasks = sorted(base.keys() & candidate.keys())
    differences = np.array([candidate[task] - base[task] for task in tasks])
    moved = differences[differences != 0]
    if not len(moved):
        return Gain(0.0, 1.0)
    if len(moved) <= _EXACT_TASKS:
        bits = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        sums = (2 * bits - 1) @ moved
        p = float(np.mean(sums >= moved.sum() - 1e-12))
    else:
        signs = np.random.default_rng(seed).integers(0, 2, (_DRAWS, len(moved))) * 2 - 1
        # The assignment that was observed is one of those that might have been.
        p = float((np.count_nonzero(signs @ moved >= moved.sum() - 1e-12) + 1) / (_DRAWS + 1))
    return Gain(float(differences.mean()), p)
