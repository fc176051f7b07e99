"""The plan of `spangrad train --plan`, as a table or as JSON.

In: a `TrainPlan`. Out: a table and a sentence, or JSON. Invariant: what was trained or skipped before is counted, not listed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.plan import TrainPlan

_WORDS = {
    "batch": "would be trained",
    "left": "waits for others: a batch takes more",
    "phase": "waits for its phase: other policies are updated first",
    "skipped": "skipped",
    "incomplete": "waits for rows that the store does not show yet",
    "waiting": "waits for its rollouts",
    "no_group": "rollouts without a group",
    "other_mode": "of a mode that is not trained",
    "under_way": "in a running step",
}


def show(plan: TrainPlan) -> None:
    """Print the plan as a table, followed by its sentence and by the demand for groups."""
    from commands.console import plain_console, plain_table

    console = plain_console()
    table = plain_table("batch", "group", "mode", "rollouts", "what becomes of it")
    for group in plan.groups:
        if group.outcome != "trained":
            rollouts = f"{group.rollouts} of {group.size}" if group.size else str(group.rollouts)
            words = f"{_WORDS[group.outcome]}: {group.reason}" if group.reason else _WORDS[group.outcome]
            table.add_row(str(group.batch or "-"), group.group_id or "-", group.mode, rollouts, words)
    best_version = f" ({plan.best})" if plan.best else ""
    console.print(
        f"{plan.policy}/{plan.branch}, run {plan.run_id}, from version {plan.version}{best_version}", highlight=False, soft_wrap=True
    )
    if table.row_count:
        console.print(table)
    console.print(plan.summary[0].upper() + plan.summary[1:], highlight=False, soft_wrap=True)
    if plan.demand:
        console.print(plan.demand, highlight=False, soft_wrap=True)


def as_json(plan: TrainPlan) -> str:
    """Return the plan as JSON: its fields, `batches`, `summary`, `wanted` (groups), `counts` by outcome. Trained groups are counted."""
    facts = asdict(plan)
    facts["groups"] = [asdict(group) for group in plan.groups if group.outcome != "trained"]
    counts = Counter(str(group.outcome) for group in plan.groups)
    return json.dumps({**facts, "batches": plan.batches, "summary": plan.summary, "wanted": plan.missing_groups, "counts": counts})
