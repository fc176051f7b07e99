"""`spangrad train skipped` and `spangrad train restore`: the groups that the trainer skipped.

In: the ledger of the trainer's branch. Out: a table or JSON; groups that can be trained again. Invariant: listing changes nothing.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from commands.changes import skips
from commands.options import ConfigFile, Overrides, resolve

if TYPE_CHECKING:
    from trainer.ledger.skipped_groups import SkippedGroup
    from trainer.ledger.skips import SkipReason

Groups = Annotated[list[str] | None, Parameter(name="GROUP")]
Reason = Annotated[str | None, Parameter(name="--reason")]


def skipped(*, reason: Reason = None, json: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the groups that the trainer's branch skipped, oldest first, and what helps against each reason.

    Args:
        reason: list only groups that were skipped for this reason.
        json: print the groups as JSON, with the policy version and the settings that each reason depends on.
    """
    from trainer.ledger.recovery import require_ledger

    settings = resolve(config, set_)
    with closing(require_ledger(settings)) as ledger:
        rows = ledger.skips.read(_reason(reason))
    if json:
        from json import dumps

        print(dumps([_facts(row) for row in rows]))
        return
    if not rows:
        branch_name = f"{settings.trainer.policy}/{settings.trainer.branch}"
        print(f"{branch_name} has skipped no group{f' as {reason}' if reason else ''}.")
        return
    from commands.console import print_table

    cells = (
        (
            *(row.group.group_id, row.group.run_id, row.group.mode, row.reason, row.skipped_at.isoformat(timespec="seconds")),
            *(row.group.build_spec, row.detail),
        )
        for row in rows
    )
    print_table(("group", "run", "mode", "reason", "when", "build spec", "detail"), cells)
    for kind in dict.fromkeys(row.reason for row in rows):
        print(f"{kind.value}: {kind.remedy}")


def restore(
    group: Groups = None,
    /,
    *,
    reason: Reason = None,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Make skipped groups trainable again: the trainer checks them again, and skips those that still must not be trained.

    Args:
        group: ids of the groups.
        reason: restore only groups that were skipped for this reason.
        all_: restore all skipped groups.
    """
    from spangrad.errors import SettingsError

    if not group and not reason and not all_:
        raise SettingsError("nothing says which groups to bring back. Give ids of groups, --reason or --all.")
    if all_ and (group or reason):
        raise SettingsError("--all brings back every group, and ids or --reason some: give one of them.")
    restored = skips.restore(group or (), resolve(config, set_), _reason(reason))
    for row in restored:
        print(skips.restored_text(row))
    if not restored:
        print(f"No group was skipped{f' as {reason}' if reason else ''}.")


def _reason(name: str | None) -> SkipReason | None:
    from spangrad.errors import SettingsError
    from trainer.ledger.skips import SkipReason

    if name is None:
        return None
    try:
        return SkipReason(name)
    except ValueError:
        known = ", ".join(reason.value for reason in SkipReason)
        raise SettingsError(f"{name!r} is no reason that groups are skipped for. The reasons are {known}.") from None


def _facts(row: SkippedGroup) -> dict[str, Any]:
    from json import loads

    return {
        "group": row.group.group_id,
        "run": row.group.run_id,
        "mode": row.group.mode,
        "build_spec": row.group.build_spec,
        "reason": row.reason.value,
        "detail": row.detail,
        "remedy": row.reason.remedy,
        "skipped_at": row.skipped_at.isoformat(),
        "depends_on": {"version": row.head, "settings": loads(row.basis)},
    }
