"""Calls that are not trained though their rewards count: too old, of an unknown version or another tokenizer, greedy, too long, truncated.

Invariant: a pure function of whole columns; a call's mask depends on no other call, but where trainer.sampling.truncated is `reject`:
there on the policy's other calls of its rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from spangrad.selection import selected_of
from spangrad.settings import TrainerSettings
from trainer.credit.assignment import KEY
from trainer.data.token_versions import UNKNOWN, versions_of_calls
from trainer.ledger.skips import MASKS, SkipReason

_CUT = ("length", "max_tokens", "max_output_tokens")
"""Finish reasons of a truncated response in the APIs of chat completions, messages and responses."""


def masks(transitions: pl.DataFrame, settings: TrainerSettings, *, lineage: Sequence[int], tokenizer_hash: str = "") -> pl.Series:
    """Return the reason for which each call is masked: the first that holds, in the order of `SkipReason`.

    A call is as old as its oldest token.

    Args:
        transitions: of whole groups.
        settings: max_staleness, agent_staleness, max_tokens_per_device and truncated.
        lineage: the committed versions that led to the one about to be trained, which is last.
        tokenizer_hash: the policy's; empty: any will do.

    Returns:
        Strings, a value of `SkipReason` each; null where the call is not masked.
    """
    tokenizer = pl.col("TokenizerHash")
    versions = (
        transitions.select("AgentName", Row=pl.int_range(pl.len()), Version=versions_of_calls())
        .explode("Version")
        .with_columns(pl.col("Version").cast(pl.Int64, strict=False).fill_null(UNKNOWN))  # a span may name any version
        .group_by("Row", maintain_order=True)
        .agg(
            Known=pl.col("Version").is_in(pl.Series(lineage, dtype=pl.Int64).implode()).all(),
            Fresh=_is_fresh(settings, lineage).all(),
        )
    )
    holds = {
        SkipReason.UNKNOWN_VERSION: ~pl.lit(versions["Known"]),
        SkipReason.STALE: ~pl.lit(versions["Fresh"]),
        SkipReason.OTHER_TOKENIZER: (tokenizer != "") & (tokenizer != tokenizer_hash) & bool(tokenizer_hash),
        SkipReason.GREEDY: pl.col("Temperature") <= 0,
        SkipReason.TOO_LONG: pl.col("PromptIds").list.len() + pl.col("ResponseIds").list.len() > settings.max_tokens_per_device,
        SkipReason.TRUNCATED: _is_cut(settings),
    }
    masked = pl.coalesce(pl.when(holds[reason]).then(pl.lit(reason.value)) for reason in MASKS)
    return transitions.select(Masked=masked).to_series()


def _is_fresh(settings: TrainerSettings, lineage: Sequence[int]) -> pl.Expr:
    """Return an expression: True where a version is within the staleness bound of its call's agent."""

    def within(bound: int) -> pl.Expr:
        return pl.col("Version").is_in(pl.Series(lineage[-1 - bound :], dtype=pl.Int64).implode())

    fresh = within(settings.sampling.max_staleness)
    for agent, bound in settings.sampling.agent_staleness.items():
        fresh &= (pl.col("AgentName") != agent) | within(bound)
    return fresh


def is_truncated() -> pl.Expr:
    """Return an expression: True where a call's response was cut at its limit of tokens."""
    return pl.col("FinishReason").is_in(_CUT)


def _is_cut(settings: TrainerSettings) -> pl.Expr:
    """Return an expression: True where trainer.sampling.truncated masks a call.

    Source: overlong filtering (DAPO, https://arxiv.org/abs/2503.14476, section 3.4).
    """
    if settings.sampling.truncated == "train":
        return pl.lit(value=False)
    if settings.sampling.truncated == "reject":
        return (is_truncated() & selected_of(settings.policy, settings.selection)).any().over(*KEY)
    return is_truncated()
