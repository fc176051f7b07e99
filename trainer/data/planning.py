"""The plan of a run, from the store and the ledger as they stand.

In: settings. Out: a `TrainPlan`. Invariant: store and ledger are only read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.probing.model import vocabulary_size
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from spangrad.types import Mode
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from trainer.credit.learning import check
from trainer.data.plan import LedgerHistory, TrainPlan, planned
from trainer.data.source import GroupReader
from trainer.ledger.demand import ConsumedGroups, Consumption, in_flight
from trainer.ledger.ledger import Ledger
from trainer.ledger.recovery import existing_ledger, require_beginning
from trainer.monitor.evaluate import best, describe_best, versions_with_weights
from trainer.phases import Phases
from trainer.phases import check as check_phases
from trainer.publish.lora import model_of

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


def make_plan(settings: Settings) -> TrainPlan:
    """Return the plan of what `train --once` would do now.

    Raises:
        SpangradError: a setting or the store is not as it must be.
    """
    check(settings.trainer)
    check_phases(settings.trainer)
    require_beginning(settings)
    client = connect(settings.store, consistent=True)
    ledger = existing_ledger(settings)
    try:
        return plan_of(settings, client, ledger)
    finally:
        client.close()
        if ledger:
            ledger.close()


def plan_of(settings: Settings, client: Client, ledger: Ledger | None) -> TrainPlan:
    """Return the plan of a run that reads with `client`. No ledger: nothing has been trained yet."""
    source = GroupReader(client, settings)
    history = history_of(settings, ledger, source.build_spec)
    trainer = settings.trainer
    phases = Phases(ledger, trainer) if ledger else None
    try:
        awaited = tuple(phases.awaited() if phases else trainer.phase_policies)
        history = replace(history, awaited=awaited, of_phases=phases.skips if phases else history.of_phases)
        groups = planned(source.states(), source.load, history, trainer)
    finally:
        if phases:
            phases.close()
    consumed = Consumption(ledger, trainer, source.build_spec).read() if ledger else ConsumedGroups(0, 0, {})
    planned_steps = max((group.batch or 0 for group in groups), default=0) + bool(history.leased)
    consumed = replace(consumed, steps=consumed.steps + planned_steps)
    best_version = best(versions_with_weights(ledger, trainer), trainer) if ledger else None
    return TrainPlan(
        policy=trainer.policy,
        branch=trainer.branch,
        run_id=trainer.run_id,
        build_spec=source.build_spec,
        version=history.lineage[-1],
        groups_per_batch=trainer.sampling.groups_per_batch,
        in_flight=in_flight(trainer, consumed) if Mode.TRAIN in trainer.modes else 0,
        groups=groups,
        unbuilt=source.unbuilt(),
        elsewhere=() if groups else tuple(source.elsewhere()),
        awaited=awaited,
        best=describe_best(best_version, trainer) if best_version else "",
    )


def history_of(settings: Settings, ledger: Ledger | None, build_spec: str) -> LedgerHistory:
    """Return the branch's state in the ledger; for a branch that has not begun, the state with which it will begin."""
    newest = ledger.frontier() if ledger else None
    if ledger is None or newest is None:
        return _beginning(settings, ledger)
    run = settings.trainer.run_id
    finished, leased = ledger.finished_groups(run, build_spec, finetuned=not settings.trainer.sampling.retrain_finetuned)
    lineage, bases = ledger.lineage(), ledger.skips.bases
    known = frozenset(lineage)
    skipped = [row for row in ledger.skips.read() if (row.group.run_id, row.group.build_spec) == (run, build_spec)]
    outdated = {row.group for row in skipped if row.is_outdated(known, bases)}
    kept = {row.group: row.reason for row in skipped if row.group not in outdated}
    done = finished - {(group.mode, group.group_id) for group in outdated}
    return LedgerHistory(
        tuple(lineage),
        newest.tokenizer_hash,
        frozenset(done),
        frozenset(leased),
        kept,
        ledger.claimed,
        vocabulary=vocabulary_size(model_of(Path(newest.policy_version.path))),
    )


def _beginning(settings: Settings, ledger: Ledger | None) -> LedgerHistory:
    """Return the state of a branch without versions: it begins with trainer.model, which may be another branch's version."""
    model = settings.trainer.model
    tokenizer, lineage = tokenizer_hash(model) if model else "", [0]
    if ledger and model:
        path = model.absolute()
        lineage = ledger.beginning(checksum=checksum_directory(path), path=str(path), tokenizer_hash=tokenizer)
    vocabulary = vocabulary_size(model_of(model)) if model else None
    return LedgerHistory(tuple(lineage), tokenizer, frozenset(), frozenset(), {}, vocabulary=vocabulary)
