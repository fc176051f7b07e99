"""DAPO's soft overlong punishment: a negative reward for calls whose responses come near the limit of length.

Invariant: a pure function; stored rewards stay as they are, and calls that are short enough get no entry.
"""

from __future__ import annotations

import polars as pl

from spangrad.selection import selected_of
from spangrad.settings import TrainerSettings

OVERLONG = "overlong"
"""Name of the derived reward, by which `trainer.credit.reward_weights` may scale it."""


def punishment(tokens: pl.Expr, longest: int, buffer: int) -> pl.Expr:
    """R_length of a response of so many tokens, from 0 to -1; `longest` is L_max and `buffer` is L_cache, in tokens.

    0 up to L_max - L_cache tokens; (L_max - L_cache - tokens) / L_cache up to L_max; -1 beyond.

    Source: DAPO (https://arxiv.org/abs/2503.14476), eq. 13.
    """
    return ((longest - buffer - tokens.cast(pl.Float64)) / buffer).clip(-1.0, 0.0)


def with_overlong(transitions: pl.DataFrame, settings: TrainerSettings) -> pl.DataFrame:
    """Transitions with a reward `overlong` on each selected call of the policy whose response is longer than L_max - L_cache.

    L_max is trainer.credit.overlong_tokens (0: nothing is punished), L_cache is overlong_buffer.
    """
    if not settings.credit.overlong_tokens:
        return transitions
    length, own = pl.col("ResponseIds").list.len(), selected_of(settings.policy, settings.selection)
    derived = transitions.with_columns(
        _Overlong=pl.when(own).then(punishment(length, settings.credit.overlong_tokens, settings.credit.overlong_buffer)).otherwise(0.0)
    )
    entry = {
        "Rewards.Name": pl.lit(OVERLONG),
        "Rewards.Value": pl.col("_Overlong"),
        "Rewards.CallId": pl.col("CallId"),
        "Rewards.Role": pl.lit(""),
        "Rewards.Turn": pl.col("Turn"),
    }
    longer = [
        pl.when(pl.col("_Overlong") < 0)
        .then(pl.concat_list(pl.col(name), value.cast(transitions.schema[name].inner)))  # type: ignore[attr-defined]
        .otherwise(pl.col(name))
        .alias(name)
        for name, value in entry.items()
        if name in transitions.columns
    ]
    return derived.with_columns(longer).drop("_Overlong")
