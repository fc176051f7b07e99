"""`spangrad policy`: the versions that a ledger holds; what is served, what is trained next, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.inspection.lineage import version_name
from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import LedgerError
from spangrad.settings import Settings
from spangrad.types import VersionStatus

if TYPE_CHECKING:
    from trainer.ledger.ledger import Ledger
    from trainer.ledger.policies import Overview
    from trainer.ledger.tables import LedgerVersion

_PIPE_WIDTH = 160
_SHOWN = 20
_UNSERVED = "Once it runs, `spangrad policy publish` hands the version to it."

policy = App(name="policy", help="Look at policy versions, publish one, go back to one, keep one.")
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
    """List the versions of each branch, newest first: what each was made from, which is the head, which are pinned.

    Args:
        name: of a policy; without it, all of them.
        all_: show every version, instead of the newest 20 of each branch and those that are pinned or a head.
    """
    from rich.table import Table

    from commands.console import plain_console

    found, _ = _look(resolve(config, set_))
    table = Table("policy", "branch", "version", "status", "from", "return", "kept", "", box=None, pad_edge=False)
    counts: dict[tuple[str, str], int] = {}
    hidden = 0
    for one in reversed(found.versions):
        facts, place = one.policy_version, (one.policy_version.policy, one.branch)
        if name not in {None, facts.policy}:
            continue
        notes = _notes(found, one)
        counts[place] = counts.get(place, 0) + 1
        if counts[place] > _SHOWN and not notes and not all_:
            hidden += 1
            continue
        returns = f"{one.metrics['mean_return']:+.2f}" if "mean_return" in one.metrics else "-"
        table.add_row(*place, str(one.version), _status(one), _parent(one), returns, "yes" if _kept(one) else "no", ", ".join(notes))
    if name is not None and not counts:
        raise LedgerError(f"the ledger knows no policy {name!r}. It knows {', '.join(sorted({one for one, _ in found.heads})) or 'none'}.")
    plain_console(_PIPE_WIDTH).print(table)
    if hidden:
        print(f"{hidden} older versions: --all shows them")


@policy.command(name="show")
def _show(version: Version, /, *, branch: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print what the ledger holds of one version.

    Args:
        version: as POLICY@VERSION.
        branch: where several have begun with it; by default the one that made it.
    """
    found, one, ledger = _version(version, branch, resolve(config, set_))
    facts = one.policy_version
    made = [other for other in found.versions if other.policy_version.policy == facts.policy and other.policy_version.parent == one.version]
    children = sorted({other.version for other in made} - {one.version})
    lines = {
        "version": f"{facts.policy}@{one.version} on branch {one.branch}",
        "status": ", ".join([_status(one), *_notes(found, one)]),
        "from": _parent(one),
        "next": ", ".join(map(str, children)) or "-",
        "batch": _batch(one, ledger),
        "files": f"{facts.path}{'' if _kept(one) else ' (removed)'}" if facts.path else "-",
        "checksum": facts.checksum or "-",
        "tokenizer": one.tokenizer_hash or "-",
        **{name: f"{value:.6g}" for name, value in sorted(one.metrics.items())},
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


@policy.command(name="publish")
def _publish(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Have the gateway serve a version; what is trained next stays as it is.

    A trainer that publishes hands the gateway its branch's head again: `rollback` is for going back for good.

    Args:
        version: as POLICY@VERSION.
    """
    settings = resolve(config, set_)
    _, one, _ = _version(version, None, settings)
    _serve(_verified(one), settings)


@policy.command(name="rollback")
def _rollback(
    version: Version, /, *, branch: str | None = None, publish: bool | None = None, config: ConfigFile = None, set_: Overrides = None
) -> None:
    """Go back to an older version: it is served, and the next step trains it.

    Later versions stay in the ledger, with their batches, and their numbers stay taken. A step that is under way is given up, and its
    rollouts are free again. Rolling back to a later version takes it back.

    Args:
        version: as POLICY@VERSION.
        branch: that goes back; trainer.branch by default.
        publish: hand it to the gateway; trainer.publish by default.
    """
    settings = resolve(config, set_, {"trainer.branch": branch, "trainer.publish": publish})
    _, one, ledger = _version(version, settings.trainer.branch, settings)
    _verified(one)
    holder = ledger.holder()
    back = ledger.rollback(one.version)
    if holder:
        print(f"the step under way ({holder}) is given up")
    print(f"branch {back.branch} of {back.policy_version.policy} is at version {back.version}: the next step trains it")
    if settings.trainer.publish:
        _serve(back, settings)


@policy.command(name="pin")
def _pin(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Keep a version's files, whatever trainer.keep_checkpoints says.

    Args:
        version: as POLICY@VERSION.
    """
    _, one, ledger = _version(version, None, resolve(config, set_))
    _verified(one)
    ledger.pin(one.version)
    print(f"{version} is pinned: {one.policy_version.path} stays")


@policy.command(name="unpin")
def _unpin(version: Version, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Leave a version's files to trainer.keep_checkpoints again.

    Args:
        version: as POLICY@VERSION.
    """
    _, one, ledger = _version(version, None, resolve(config, set_))
    ledger.unpin(one.version)
    print(f"{version} is not pinned: the next step may remove its files")


def _look(settings: Settings) -> tuple[Overview, Ledger]:
    """The ledger, and all that it holds.

    Raises:
        LedgerError: there is none.
    """
    from trainer.ledger.policies import overview
    from trainer.ledger.recovery import existing_ledger

    ledger = existing_ledger(settings)
    if ledger is None:
        raise LedgerError(
            f"{settings.trainer.directory} holds no ledger: nothing was trained there. Set trainer.directory or trainer.ledger_url, or "
            "start with `spangrad train`."
        )
    return overview(ledger.database), ledger


def _version(text: str, branch: str | None, settings: Settings) -> tuple[Overview, LedgerVersion, Ledger]:
    """The ledger, the version that POLICY@VERSION names, and the ledger of its branch.

    Raises:
        LedgerError: there is no such version.
    """
    from trainer.ledger.policies import origin
    from trainer.ledger.recovery import open_ledger

    name, number = version_name(text)
    found, _ = _look(settings)
    one = origin((one for one in found.versions if branch in {None, one.branch}), name, number)
    if one is None:
        where = "" if branch is None else f" on branch {branch}"
        raise LedgerError(f"the ledger knows no version {text}{where}. `spangrad policy list` shows those it knows.")
    own = settings.trainer.model_copy(update={"policy": name, "branch": one.branch})
    return found, one, open_ledger(settings.model_copy(update={"trainer": own}))


def _verified(one: LedgerVersion) -> LedgerVersion:
    """A version that can be loaded.

    Raises:
        LedgerError: it was never committed.
        CheckpointError: its files are gone, or others.
    """
    from trainer.publish import checkpoint

    if one.status is not VersionStatus.COMMITTED:
        raise LedgerError(f"version {one.version} of {one.policy_version.policy} is {_status(one)}: it has no weights.")
    checkpoint.verify(Path(one.policy_version.path), one.policy_version.checksum)
    return one


def _serve(one: LedgerVersion, settings: Settings) -> None:
    from trainer.publish.publisher import Publisher

    seconds = Publisher(settings.gateway, _UNSERVED).publish(one.policy_version, again=True)
    print(f"version {one.version} of {one.policy_version.policy} is served ({seconds:.2f} s)")


def _batch(one: LedgerVersion, ledger: Ledger) -> str:
    from trainer.ledger.file_batches import tuning_of

    batch = one.policy_version.batch_id
    tuning = tuning_of(ledger.database, batch)
    if tuning:
        return f"{batch}: {tuning.method} on {', '.join(file.name for file in tuning.files)}, step {tuning.step} of {tuning.steps}"
    return f"{batch} of run {one.run_id} ({one.modes})" if batch else "-"


def _status(one: LedgerVersion) -> str:
    return one.status.value if one.status else "under way"


def _parent(one: LedgerVersion) -> str:
    parent = one.policy_version.parent
    if parent is None:
        return "the beginning"
    return str(parent) if one.parent_branch == one.branch else f"{parent} on branch {one.parent_branch}"


def _notes(found: Overview, one: LedgerVersion) -> list[str]:
    """What is special about a version."""
    place = one.policy_version.policy, one.branch
    holder = found.holders.get(place, "") if one.status is None else ""
    head = "head" if found.heads.get(place) == one.version else ""
    return [note for note in (head, "pinned" if (place[0], one.version) in found.pinned else "", holder) if note]


def _kept(one: LedgerVersion) -> bool:
    return bool(one.policy_version.path) and Path(one.policy_version.path).is_dir()
