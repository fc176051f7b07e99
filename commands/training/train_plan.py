"""A plan of `spangrad train`, for people and for programs.

In: a `Plan`. Out: a table and a sentence, or JSON. Invariant: what is history (trained before, skipped before) is counted, not listed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.plan import Plan

_WORDS = {
    "batch": "would be trained",
    "left": "waits for others: a batch takes more",
    "skipped": "skipped",
    "incomplete": "waits for rows that the store does not show yet",
    "waiting": "waits for its rollouts",
    "no_group": "rollouts without a group",
    "other_mode": "of a mode that is not trained",
    "under_way": "in a step under way",
}


def show(plan: Plan) -> None:
    """Print a table and the sentence."""
    from rich.table import Table

    from commands.console import plain_console

    console = plain_console()
    table = Table("batch", "group", "mode", "rollouts", "what becomes of it", box=None, pad_edge=False)
    for one in plan.groups:
        if one.fate != "trained":
            rollouts = f"{one.rollouts} of {one.size}" if one.size else str(one.rollouts)
            words = f"{_WORDS[one.fate]}: {one.reason}" if one.reason else _WORDS[one.fate]
            table.add_row(str(one.batch or "-"), one.group_id or "-", one.mode, rollouts, words)
    champion = f" ({plan.best})" if plan.best else ""
    console.print(f"{plan.policy}/{plan.branch}, run {plan.run_id}, from version {plan.version}{champion}", highlight=False, soft_wrap=True)
    if table.row_count:
        console.print(table)
    console.print(plan.sentence[0].upper() + plan.sentence[1:], highlight=False, soft_wrap=True)
    if plan.demand:
        console.print(plan.demand, highlight=False, soft_wrap=True)


def as_json(plan: Plan) -> str:
    """One JSON object: the plan's fields, `batches`, `sentence`, `wanted` (groups), `counts` by fate; trained groups are only counted."""
    facts = asdict(plan)
    facts["groups"] = [asdict(one) for one in plan.groups if one.fate != "trained"]
    counts = Counter(str(one.fate) for one in plan.groups)
    return json.dumps({**facts, "batches": plan.batches, "sentence": plan.sentence, "wanted": plan.missing_groups, "counts": counts})
