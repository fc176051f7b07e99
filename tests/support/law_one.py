"""Law 1, checked: what was acknowledged is stored, and counts once for every reader.

In: a store, and what it must hold of a run. Out: a `Verdict`, which is good when nothing is missing, double or strange.
Invariant: readers are asked as dashboards and the builder ask: by the views, and by a build.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from load_spans import OWN_ID, Held

from spangrad import semconv
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from transition_builder.loop import build_once


@dataclass(frozen=True)
class Verdict:
    """What a store was found to hold."""

    spans: int
    """Acknowledged."""
    calls: int
    delivered: int
    """Rows of otel_traces: more than spans, when some were delivered again after they had been stored."""
    missing: dict[str, int] = field(default_factory=dict)
    double: dict[str, int] = field(default_factory=dict)
    strange: dict[str, int] = field(default_factory=dict)
    """Nobody acknowledged them, or their values are not their own."""

    @property
    def faults(self) -> dict[str, dict[str, int]]:
        """What is wrong; empty when nothing is."""
        found = {"missing": self.missing, "double": self.double, "strange": self.strange}
        return {name: counts for name, counts in found.items() if counts}


def judge(store: StoreSettings, run: str, held: Held, *, build: bool = True) -> Verdict:
    """Compare a run with what must be there of it, a build of its transitions included."""
    settings = Settings(store=store, builder=BuilderSettings(selection=Selection(agents=f".*|{run}")))
    if build:
        build_once(settings)
    client = connect(store)

    def rows(sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in client.query(sql).result_rows]

    def names(sql: str) -> list[str]:
        return [row[0] for row in rows(sql)]

    ours, raw = f"RunId = '{run}'", f"otel.otel_traces WHERE SpanAttributes['{semconv.RUN_ID}'] = '{run}'"
    calls = rows(f"SELECT CallId, PromptIds, ResponseIds, Logprobs FROM otel.v_calls WHERE {ours}")
    judged = "if(RowKind = 'evaluation_log', concat('log ', SpanId), SpanId)"
    found: dict[str, tuple[Iterable[str], list[str]]] = {
        "spans": (held.spans, names(f"SELECT SpanId FROM otel.v_spans WHERE {ours}")),
        "raw spans": (
            held.spans,
            names(f"SELECT DISTINCT SpanId FROM {raw}"),
        ),
        "rollouts": (held.rollouts, names(f"SELECT RolloutId FROM otel.v_rollouts WHERE {ours}")),
        "calls": (held.calls, [row[0] for row in calls]),
        "evaluations": (held.evaluations, names(f"SELECT {judged} FROM otel.rollout_spans FINAL WHERE {ours} AND RowKind != 'span'")),
        "records": (
            held.records,
            names(f"SELECT DISTINCT LogAttributes['{OWN_ID}'] FROM otel.otel_logs WHERE LogAttributes['{semconv.RUN_ID}'] = '{run}'"),
        ),
    }
    if build:
        found["transitions"] = (held.calls, names(f"SELECT CallId FROM otel.v_transitions WHERE {ours}"))
        found["drops"] = ([], names(f"SELECT concat(Reason, ' ', CallId) FROM otel.v_drops WHERE {ours}"))
    strayed = names(
        f"SELECT SpanId FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = '{run}' AND SpanAttributes['{OWN_ID}'] != SpanId"
    )
    wrong = [row[0] for row in calls if row[0] in held.calls and tuple(map(list, row[1:])) != held.calls[row[0]]]
    ((delivered,),) = rows(f"SELECT count() FROM {raw}")
    client.close()
    verdict = Verdict(len(held.spans), len(held.calls), delivered, strange=_counted({"values": len(strayed) + len(wrong)}))
    for what, (expected, got) in found.items():
        wanted, seen = set(expected), Counter(got)
        verdict.missing.update(_counted({what: len(wanted - seen.keys())}))
        verdict.double.update(_counted({what: sum(count > 1 for count in seen.values())}))
        verdict.strange.update(_counted({what: len(seen.keys() - wanted)}))
    return verdict


def lacking(store: StoreSettings, run: str, held: Held) -> int:
    """How many spans, calls and records are not there yet: an insert writes its spans first, and what its views make of them then."""
    there = 0
    with connect(store) as client:
        for table, attributes in (("otel_traces", "SpanAttributes"), ("otel_logs", "LogAttributes")):
            asked = f"SELECT uniqExact({attributes}['{OWN_ID}']) FROM otel.{table} WHERE {attributes}['{semconv.RUN_ID}'] = '{run}'"
            there += int(client.query(asked).result_rows[0][0])
        there += int(client.query(f"SELECT uniqExact(CallId) FROM otel.calls WHERE RunId = '{run}'").result_rows[0][0])
    return max(0, len(held.spans) + len(held.calls) + len(held.records) - there)


def _counted(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
