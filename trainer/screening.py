"""Which of the groups that were read for a batch must be put aside: the one judgement of the loop and of the plan.

In: ready groups with what the store holds of them, the ledger's lineage, the trainer's settings. Out: a reason for each that must go.
Invariant: a pure function, so that a plan is what a run then does.
"""

from __future__ import annotations

from collections.abc import Sequence

from spangrad.settings import TrainerSettings
from trainer.credit import CreditRule, live_groups
from trainer.eligibility import ExpiryReason, expiry_reasons
from trainer.learning import ESTIMATORS
from trainer.source import Group, Loaded


def screen(
    groups: Sequence[Group], loaded: Loaded, settings: TrainerSettings, *, lineage: Sequence[int], tokenizer_hash: str
) -> dict[Group, ExpiryReason]:
    """Find the groups that must be put aside.

    Args:
        groups: ready groups.
        loaded: what the store holds of them.
        settings: the trainer's.
        lineage: versions that led to the one about to be trained, which is last.
        tokenizer_hash: the policy's.
    """
    own = loaded.own(settings.policy, settings.selection)
    return expiry_reasons(
        groups,
        loaded.transitions.filter(own),
        lineage=lineage,
        max_staleness=settings.max_staleness,
        tokenizer_hash=tokenizer_hash,
        max_tokens=settings.max_tokens_per_device,
        alone=ESTIMATORS[settings.estimator].scope == "all",
        live=live_groups(loaded.transitions, own, CreditRule.of(settings)) if settings.skip_equal_groups else None,
    )
