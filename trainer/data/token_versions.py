"""Policy version that sampled each response token, and its staleness: the committed versions between it and the one trained.

Invariant: pure functions; a token's version is what the engine recorded for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

UNKNOWN = -1
"""Version of a token that was not sampled; staleness of one whose version is not in the lineage."""


def versions_of_calls() -> pl.Expr:
    """Return the policy versions that sampled a call, in order (lists), of transitions with Version and `Versions.Version`."""
    listed = pl.col("Versions.Version")
    return pl.when(listed.list.len() > 0).then(listed).otherwise(pl.concat_list("Version"))


def token_versions(transitions: pl.DataFrame) -> NDArray[np.int64]:
    """Return the version of every response token, call after call.

    Args:
        transitions: rows with Version, `Versions.Start`, `Versions.Version` (lists; empty: Version sampled all of it) and ResponseIds.

    Returns:
        int64, one element a response token of all rows, in their order.
    """
    lengths = transitions["ResponseIds"].list.len().fill_null(0).to_numpy().astype(np.int64)
    several = pl.col("Versions.Start").list.len() > 0
    segments = (
        transitions.select(
            Start=pl.when(several).then("Versions.Start").otherwise(pl.concat_list(pl.lit(0, pl.UInt32))),
            Version=versions_of_calls(),
            First=pl.Series(np.cumsum(lengths) - lengths),
        )
        .explode("Start", "Version")
        .select(At=pl.col("First") + pl.col("Start"), Version=pl.col("Version").cast(pl.Int64))
    )
    starts = np.append(segments["At"].to_numpy(), lengths.sum())
    return np.repeat(segments["Version"].to_numpy(), np.diff(starts))


def staleness(versions: NDArray[np.int64], lineage: Sequence[int]) -> NDArray[np.int16]:
    """Return the number of committed versions between each token's and the one about to be trained.

    Args:
        versions: of tokens, any shape; UNKNOWN where none was sampled.
        lineage: committed versions, oldest first; the last one is about to be trained.

    Returns:
        int16, shaped as `versions`; 0 is on policy, UNKNOWN where the version is not in the lineage.
    """
    known = np.asarray(lineage, np.int64)
    order = np.argsort(known)
    position = np.searchsorted(known, versions, sorter=order).clip(max=len(known) - 1)
    at = order[position]
    behind = np.where(known[at] == versions, len(known) - 1 - at, UNKNOWN)
    return np.minimum(behind, np.iinfo(np.int16).max).astype(np.int16)
