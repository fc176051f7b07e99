"""A look of an idle trainer that reads all history: the peer of `idle_trainer`.

In: the ledger and the store. Out: nothing; it is the cost that counts. These are the statements that each look asked before the trainer
kept what it knows: every version with its metrics, every group that was ever trained or skipped, and every build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from spangrad.settings import Settings
from spangrad.store.datasets import builds_sql
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, SKIPPED, VERSIONS, version_of

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_WHOLE = """
SELECT Mode, GroupId FROM {builds} AS v
WHERE Mode IN ('train') AND GroupSize > 0
GROUP BY Mode, GroupId
HAVING uniqExact(RolloutId) >= max(GroupSize)
ORDER BY max(FirstBuiltAt), Mode, GroupId
"""


def look_at_all_history(ledger: Ledger, client: Client, settings: Settings, spec: str) -> int:
    """Look once; return the number of groups that are ready."""
    trainer = settings.trainer

    def own(table: sa.Table) -> list[sa.ColumnElement[bool]]:
        return [table.c.policy == trainer.policy, table.c.branch == trainer.branch]

    with ledger.database.transaction() as transaction:
        rows = transaction.execute(sa.select(VERSIONS).where(*own(VERSIONS)).order_by(VERSIONS.c.version)).mappings()
        _ = [version_of(row) for row in rows]
        taken = [
            sa.select(table.c.mode, table.c.group_id).where(*own(table), table.c.run_id == trainer.run_id)
            for table in (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS, SKIPPED)
        ]
        finished = {(str(mode), str(group)) for mode, group in transaction.execute(sa.union(*taken))}
        batches = sa.select(VERSIONS.c.batch_id).where(*own(VERSIONS), VERSIONS.c.status == "committed", VERSIONS.c.batch_id.is_not(None))
        named = (BATCH_ROLLOUTS, FILE_BATCH_ROLLOUTS)
        groups = sa.union(*(sa.select(table.c.group_id).where(*own(table), table.c.batch_id.in_(batches)) for table in named))
        transaction.execute(sa.select(sa.func.count()).select_from(groups.subquery())).scalar_one()
    builds = builds_sql(None, f"RunId = '{trainer.run_id}' AND BuildSpec = '{spec}'")
    whole = client.query(_WHOLE.format(builds=builds)).result_rows
    return sum((str(mode), str(group)) not in finished for mode, group in whole)
