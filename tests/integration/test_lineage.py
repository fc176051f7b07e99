"""`spangrad lineage` over a real store: from versions to spans and back, around a rollback and across branches."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict
from pathlib import Path

import pytest

from commands.inspection.lineage import span_name, span_text, version_name, version_text
from spangrad.errors import SettingsError, StoreError
from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.lineage import Ancestor, BatchRolloutRow, SpanLineage, TrainedSpan, VersionLineage, descendants, of_span, of_version
from tests.support.built_rollouts import BuiltRollouts, trainer_over
from tests.support.policies import changed, trainer_settings
from tests.support.processes import run_spangrad


@pytest.fixture
def run() -> str:
    return f"lineage-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def settings(store: StoreSettings, tiny_model: Path, tmp_path: Path, run: str) -> Settings:
    # The policy is the run's own: what other tests train is none of it.
    own = {"run_id": run, "policy": run, "model": tiny_model, "directory": tmp_path / "policies", "max_staleness": 9, "checkpoint__keep": 9}
    return Settings(store=store, trainer=trainer_settings(**own, groups_per_batch=1, publish=False))  # type: ignore[arg-type]


def test_lineage_leads_from_version_to_spans_and_from_span_to_versions(settings: Settings, tiny_model: Path, run: str) -> None:
    """Versions 0 <- 1 <- 2, back to 1, 1 <- 3; branch `fork` begins with 3 and makes 4 to 7, of the same rollouts and one more."""
    world = BuiltRollouts(settings, tiny_model)
    trainer = trainer_over(world, settings)
    for name in ("a", "b"):
        world.group(name, [1.0, None, 0.0], Policy=run)
        trainer.run(follow=False)
    trainer.ledger.rollback(1)
    world.group("c", [1.0, 0.0], Policy=run)
    trainer.run(follow=False)
    paths = {one.version: one.policy_version.path for one in trainer.ledger.versions()}
    checksums = {one.version: one.policy_version.checksum for one in trainer.ledger.versions()}
    batches = {one.version: one.policy_version.batch_id or "" for one in trainer.ledger.versions()}
    of_fork = {"branch": "fork", "model": Path(paths[3]), "directory": settings.trainer.directory}
    fork = trainer_over(world, settings.model_copy(update={"trainer": changed(settings.trainer, of_fork)}))
    world.group("d", [1.0, 0.0], Policy=run)
    fork.run(follow=False)

    lineage = of_version(world.client, run, 3, None, 2)

    def rollout(group: str, i: int, *, dropped: bool = False) -> BatchRolloutRow:
        name = f"{group}-{i}"
        spans = [] if dropped else [TrainedSpan(*(f"{kind}-{run}-{name}" for kind in ("TraceId", "SpanId", "CallId", "TransitionId")))]
        return BatchRolloutRow(run, "train", group, name, 0, 0, spans)

    def ancestor(version: int, parent: int | None, groups: int, rollouts: int, shown: list[BatchRolloutRow] | None) -> Ancestor:
        facts = ("committed", parent, "main" if parent is not None else "", batches[version], run, "train" if groups else "")
        return Ancestor("main", version, *facts, checksums[version], paths[version], groups, rollouts, batch_rollouts=shown)

    assert lineage == VersionLineage(
        run,
        [
            ancestor(3, 1, 1, 2, [rollout("c", 0), rollout("c", 1)]),
            ancestor(1, 0, 1, 3, [rollout("a", 0), rollout("a", 1, dropped=True), rollout("a", 2)]),
            ancestor(0, None, 0, 0, None),
        ],
    )
    assert version_text(lineage)[:2] == [
        f"{run}@3 on branch main, committed, from {run}@1, batch {batches[3]}: 1 group, 2 rollouts of run {run} (train)",
        f"  checksum {checksums[3]}, {paths[3]}",
    ]
    assert "  rollout a-1, attempt 0, revision 0, group a: no call of this policy was trained" in version_text(lineage)
    assert f"    span TraceId-{run}-a-0/SpanId-{run}-a-0, call CallId-{run}-a-0" in version_text(lineage)

    of_the_fork = of_version(world.client, run, 4, None, 0)
    assert [(one.branch, one.version, one.batch_rollouts) for one in of_the_fork.ancestors] == [
        ("fork", 4, None), ("main", 3, None), ("main", 1, None), ("main", 0, None),
    ]  # fmt: skip
    assert version_text(of_the_fork)[0].startswith(f"{run}@4 on branch fork, committed, from {run}@3, batch ")
    assert of_version(world.client, run, 3, "fork", 0).ancestors == of_version(world.client, run, 3, None, 0).ancestors

    back = of_span(world.client, f"TraceId-{run}-a-0", f"SpanId-{run}-a-0")
    assert [(one.version, one.rollout, one.transition, one.descendants) for one in back.versions] == [
        (4, "a-0", f"TransitionId-{run}-a-0", [5, 6, 7]), (1, "a-0", f"TransitionId-{run}-a-0", [2, 3, 4, 5, 6, 7]),
    ]  # fmt: skip
    of_4 = of_the_fork.ancestors[0]
    assert span_text(back) == [
        f"span SpanId-{run}-a-0 of trace TraceId-{run}-a-0, rollout a-0",
        f"  {run}@4 on branch fork: transition TransitionId-{run}-a-0 in group a, batch {of_4.batch}, and by descent 5-7",
        f"  {run}@1 on branch main: transition TransitionId-{run}-a-0 in group a, batch {batches[1]}, and by descent 2-7",
    ]
    # A tool's span, say: no transition is its own, and yet its rollout trained a version.
    beside = {
        "RunId": run,
        "RolloutKey": "b-0",
        "RolloutKeySource": "rollout",
        "RowKind": "span",
        "TraceId": f"tool-{run}",
        "SpanId": "tool",
    }
    world.insert("rollout_spans", [beside])
    of_tool = of_span(world.client, f"tool-{run}", "tool")
    assert [(one.version, one.transition, one.descendants) for one in of_tool.versions] == [
        (5, "", [6, 7]),
        (2, "", []),
    ]
    assert span_text(of_tool)[0].endswith("no trained call itself; its rollout's calls trained")
    world.insert("rollout_spans", [{**beside, "RolloutKey": f"untrained-{run}", "SpanId": "other"}])
    nothing = of_span(world.client, f"tool-{run}", "other")
    assert nothing == SpanLineage(f"tool-{run}", "other", [f"untrained-{run}"], [])
    assert span_text(nothing) == [f"span other of trace tool-{run}, rollout untrained-{run}: trained no version"]

    with pytest.raises(StoreError, match=rf"knows no version {run}@9\. The newest are {run}@3 on main, .*, {run}@7 on fork"):
        of_version(world.client, run, 9, None, 1)
    with pytest.raises(StoreError, match=r"on branch nowhere\."):
        of_version(world.client, run, 3, "nowhere", 1)
    with pytest.raises(StoreError, match=r"knows no version unknown@1\. It has versions of 'lineage-.*\. A version that `spangrad"):
        of_version(world.client, "unknown", 1, None, 1)
    with pytest.raises(StoreError, match="holds no span x/y of a rollout"):
        of_span(world.client, "x", "y")

    printed = spangrad(settings, "lineage", f"{run}@3", "--depth", "2", "--json")
    assert json.loads(printed) == json.loads(json.dumps(asdict(lineage)))
    assert spangrad(settings, "lineage", "--span", f"TraceId-{run}-a-0/SpanId-{run}-a-0").splitlines() == span_text(back)
    trainer.ledger.close()
    fork.ledger.close()


def test_lineage_leaves_out_spans_of_masked_calls(settings: Settings, tiny_model: Path, run: str) -> None:
    """The second calls are of another tokenizer: their rewards count in the batch, and no version was trained on them."""
    world = BuiltRollouts(settings, tiny_model)
    world.group("g", [1.0, 0.0], Policy=run, calls=[{}, {"TokenizerHash": "another"}])
    trainer = trainer_over(world, settings)
    trainer.run(follow=False)
    (batch, *_) = of_version(world.client, run, 1, None, 1).ancestors
    assert batch.batch_rollouts
    assert [[span.call for span in rollout.spans] for rollout in batch.batch_rollouts] == [[f"CallId-{run}-g-{i}"] for i in range(2)]
    spans = [of_span(world.client, f"TraceId-{run}-{place}", f"SpanId-{run}-{place}") for place in ("g-0", "g-0-1")]
    assert [[(one.version, one.transition) for one in span.versions] for span in spans] == [[(1, f"TransitionId-{run}-g-0")], [(1, "")]]
    trainer.ledger.close()


def spangrad(settings: Settings, *arguments: str) -> str:
    ended = run_spangrad(*arguments, "--set", f"store.url={settings.store.url}", env={**os.environ, "SPANGRAD_CONFIG": ""})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("chosen", ["Version = 100", "RolloutId = 'rollout-09900'", "TraceId = 'trace-9900' AND SpanId = 'span-9900'"])
def test_lineage_table_reads_as_many_rows_as_its_answer_needs(store: StoreSettings, chosen: str) -> None:
    """An answer about some of 20,000 rollouts, 100 a version, reads some granules of calls, and all versions."""
    policy = f"reads-{uuid.uuid4().hex[:8]}"
    names = "RunId, BuildSpec, GroupId, RolloutId"
    rollout = f"'{policy}', 's', toString(intDiv(number, 10)), concat('rollout-', leftPad(toString(number), 5, '0'))"
    tables = {
        "builds": (names, rollout),
        "transitions": (
            f"{names}, Policy, CallId, TraceId, SpanId",
            f"{rollout}, '{policy}', toString(number), concat('trace-', toString(number)), concat('span-', toString(number))",
        ),
        "batches": (f"{names}, Policy, Version", f"{rollout}, '{policy}', intDiv(number, 100) + 1"),
    }
    with connect(store) as client:
        for table, (columns, values) in tables.items():
            client.command(f"INSERT INTO spangrad_internal.{table} ({columns}) SELECT {values} FROM numbers(20000)")
        client.command(f"INSERT INTO spangrad_internal.policy_versions (Policy, Version) SELECT '{policy}', number + 1 FROM numbers(200)")
        lineage = f"SELECT * FROM spangrad.lineage WHERE Policy = '{policy}' AND {chosen}"
        assert len(client.query(lineage).result_rows) == (100 if "Version" in chosen else 1)
        read = sum(row["rows"] for row in client.query(f"EXPLAIN ESTIMATE {lineage}").named_results())
    assert read <= 4 * 1024


def test_version_name_and_span_name_parse_or_raise() -> None:
    assert (version_name("a@b@3"), span_name("t/s")) == (("a@b", 3), ("t", "s"))
    for text in ("policy", "@3", "policy@", "policy@x", "policy@-1"):
        with pytest.raises(SettingsError, match=r"names no version\. Write POLICY@VERSION"):
            version_name(text)
    for text in ("trace", "/span", "trace/"):
        with pytest.raises(SettingsError, match=r"names no span\. Write TRACE/SPAN"):
            span_name(text)


def test_descendants_follow_branches_from_their_first_version() -> None:
    def version(branch: str, number: int, parent: int | None, of: str, status: str = "committed") -> Ancestor:
        return Ancestor(branch, number, status, parent, of, "", "", "", "", "")

    # A branch of a branch of version 1, all with its number; in an order that puts the last first.
    tree = [
        version("c", 1, 1, "b"), version("b", 1, 1, "main"), version("main", 0, None, ""), version("main", 1, 0, "main"),
        version("c", 5, 1, "c"), version("main", 2, 1, "main"), version("main", 3, 2, "main", "orphaned"), version("main", 4, 0, "main"),
    ]  # fmt: skip
    assert descendants(tree, "main", 1) == [2, 5]
    assert descendants(tree, "main", 0) == [1, 2, 4, 5]
    assert descendants(tree, "c", 5) == []
