"""Restored skips: groups that the trainer skipped become trainable again."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import TYPE_CHECKING

from spangrad.errors import SettingsError
from spangrad.settings import Settings

if TYPE_CHECKING:
    from trainer.ledger.skipped_groups import SkippedGroup
    from trainer.ledger.skips import SkipReason


def restore(groups: Collection[str], settings: Settings, reason: SkipReason | None = None) -> list[SkippedGroup]:
    """Restore skipped groups of the trainer's branch: those of these ids (none: all), of this reason where one is given.

    Raises:
        LedgerError: there is no ledger.
        SettingsError: the branch has not skipped one of them; none is restored then.
    """
    from trainer.ledger.recovery import require_ledger

    with closing(require_ledger(settings)) as ledger:
        unknown = set(groups) - {row.group.group_id for row in ledger.skips.read(reason)}
        if unknown:
            names, branch_name = ", ".join(sorted(unknown)), f"{settings.trainer.policy}/{settings.trainer.branch}"
            raise SettingsError(
                f"{branch_name} has not skipped {names}{f' as {reason}' if reason else ''}. `spangrad train skipped` lists groups."
            )
        return ledger.skips.restore(groups, reason)


def restored_text(row: SkippedGroup) -> str:
    """Return a sentence on a group that was restored."""
    return f"{row.group.group_id} of run {row.group.run_id} is ready again; it was skipped as {row.reason.value}."
