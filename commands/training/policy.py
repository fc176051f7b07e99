"""`spangrad policy`: the policy versions in the ledger, the one that is served, the one that is trained next, those that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.changes import versions
from commands.changes.versions import VersionKey
from commands.inspection.lineage import version_name
from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import LedgerError
from spangrad.store.rollout.record import counted

if TYPE_CHECKING:
    from trainer.ledger.ledger import Ledger
    from trainer.ledger.policies import Overview
    from trainer.ledger.tables import LedgerVersion

_SHOWN = 20

policy = App(name="policy", help="List policy versions; publish one, roll back to one, pin one.")
Version = Annotated[str, Parameter(name="POLICY@VERSION")]


@policy.command(name="list")
def _list(
    name: Annotated[str | None, Parameter(name="POLICY")] = None,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """List the versions of each branch, newest first, with their parents, the branch's head and the pinned ones.

    Args:
        name: name of a policy; default: all policies.
        all_: list every version; without it, only the newest 20 of each branch, heads and pinned versions.
    """
    from commands.console import print_table

    overview = versions.ledger_overview(resolve(config, set_))
    rows: list[tuple[object, ...]] = []
    counts: dict[tuple[str, str], int] = {}
    hidden = 0
    for version in reversed(overview.versions):
        facts, branch_key = version.policy_version, (version.policy_version.policy, version.branch)
        if name not in {None, facts.policy}:
            continue
        notes = _notes(overview, version)
        counts[branch_key] = counts.get(branch_key, 0) + 1
        if counts[branch_key] > _SHOWN and not notes and not all_:
            hidden += 1
            continue
        returns = f"{version.metrics['mean_return']:+.2f}" if "mean_return" in version.metrics else "-"
        kept = "yes" if _kept(version) else "no"
        rows.append((*branch_key, version.version, versions.status_text(version), _parent(version), returns, kept, ", ".join(notes)))
    if name is not None and not counts:
        known = ", ".join(sorted({policy for policy, _ in overview.heads})) or "none"
        raise LedgerError(f"the ledger knows no policy {name!r}. It knows {known}.")
    print_table(("policy", "branch", "version", "status", "from", "return", "kept", ""), rows)
    if hidden:
        print(f"{counted(hidden, 'older version')}: --all shows {'it' if hidden == 1 else 'them'}")


@policy.command(name="show")
def _show(version: Version, /, *, branch: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print everything that the ledger holds of one version.

    Args:
        version: policy version, as POLICY@VERSION.
        branch: branch of the version, if other branches began with it; default: the branch that made it.
    """
    with versions.opened_version(_key(version, branch), resolve(config, set_)) as (overview, shown, ledger):
        batch = _batch(shown, ledger)
    facts = shown.policy_version
    of_policy = [other for other in overview.versions if other.policy_version.policy == facts.policy]
    children = sorted({other.version for other in of_policy if other.policy_version.parent == shown.version} - {shown.version})
    lines = {
        "version": f"{facts.policy}@{shown.version} on branch {shown.branch}",
        "status": ", ".join([versions.status_text(shown), *_notes(overview, shown)]),
        "from": _parent(shown),
        "next": ", ".join(map(str, children)) or "-",
        "batch": batch,
        "files": f"{facts.path}{'' if _kept(shown) else ' (removed)'}" if facts.path else "-",
        "checksum": facts.checksum or "-",
        "tokenizer": shown.tokenizer_hash or "-",
        **{name: f"{value:.6g}" for name, value in sorted(shown.metrics.items())},
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


@policy.command(name="publish")
def _publish(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Make the gateway serve a version. The version that is trained next stays the same.

    A trainer that publishes makes the gateway serve its branch's head again. To return to an older version for good, use `rollback`.

    Args:
        version: policy version, as POLICY@VERSION.
    """
    print(versions.publish(_key(version), resolve(config, set_)))


@policy.command(name="rollback")
def _rollback(
    version: Version, /, *, branch: str | None = None, publish: bool | None = None, config: ConfigFile = None, set_: Overrides = None
) -> None:
    """Return to an older version: the gateway serves it, and the next training step starts from it.

    Later versions stay in the ledger, with their batches, and their numbers are not used again. A training step in progress is abandoned,
    and its rollouts can be trained again. To undo a rollback, roll back to the later version.

    Args:
        version: policy version, as POLICY@VERSION.
        branch: branch that is rolled back; default: trainer.branch.
        publish: make the gateway serve the version; default: trainer.weight_sync.publish.
    """
    settings = resolve(config, set_, {"trainer.branch": branch, "trainer.weight_sync.publish": publish})
    for sentence in versions.roll_back(_key(version, settings.trainer.branch), settings):
        print(sentence)


@policy.command(name="pin")
def _pin(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Keep a version's checkpoint, even if trainer.checkpoint.keep would remove it.

    Args:
        version: policy version, as POLICY@VERSION.
    """
    print(versions.pin(_key(version), resolve(config, set_)))


@policy.command(name="unpin")
def _unpin(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Undo `pin`: trainer.checkpoint.keep applies to the version's checkpoint again.

    Args:
        version: policy version, as POLICY@VERSION.
    """
    print(versions.unpin(_key(version), resolve(config, set_)))


def _key(text: str, branch: str | None = None) -> VersionKey:
    return VersionKey(*version_name(text), branch)


def _batch(version: LedgerVersion, ledger: Ledger) -> str:
    from trainer.ledger.file_batches import file_batch_of

    batch = version.policy_version.batch_id
    file_batch = file_batch_of(ledger.database, batch)
    if file_batch:
        names = ", ".join(file.name for file in file_batch.files)
        return f"{batch}: {file_batch.method} on {names}, step {file_batch.step} of {file_batch.steps}"
    return f"{batch} of run {version.run_id} ({version.modes})" if batch else "-"


def _parent(version: LedgerVersion) -> str:
    parent = version.policy_version.parent
    if parent is None:
        return "the beginning"
    return str(parent) if version.parent_branch == version.branch else f"{parent} on branch {version.parent_branch}"


def _notes(overview: Overview, version: LedgerVersion) -> list[str]:
    """Return labels of a version: head of its branch, pinned, or the process whose training step it is."""
    branch_key = version.policy_version.policy, version.branch
    holder = overview.holders.get(branch_key, "") if version.status is None else ""
    head = "head" if overview.heads.get(branch_key) == version.version else ""
    return [note for note in (head, "pinned" if (branch_key[0], version.version) in overview.pinned else "", holder) if note]


def _kept(version: LedgerVersion) -> bool:
    return bool(version.policy_version.path) and Path(version.policy_version.path).is_dir()
