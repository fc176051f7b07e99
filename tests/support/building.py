"""What tests of the builder ask a real store: spans in by OTLP/HTTP, transitions, drops and revisions out by SQL.

In: a store. Out: rows. Invariant: a run has a build specification of its own, so that tests that share a store share nothing else.
"""

from __future__ import annotations

import urllib.request
from typing import Any

from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect


def post(store: StoreSettings, body: bytes) -> None:
    """Send an OTLP/JSON request."""
    request = urllib.request.Request(
        f"{store.otlp_endpoint}/v1/traces", data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=30).close()


def settings_of(store: StoreSettings, run: str, **builder: Any) -> Settings:
    """A build specification of its own for each run, so that tests that share a store share nothing else."""
    return Settings(store=store, builder=BuilderSettings(selection=Selection(agents=f".*|{run}"), **builder))


def rows(store: StoreSettings, sql: str) -> list[tuple[Any, ...]]:
    """An answer."""
    return [tuple(row) for row in connect(store).query(sql).result_rows]


def outcome(store: StoreSettings, run: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Transitions and drops of a run: rollout, attempt, span, then what became of the call."""
    transitions = rows(
        store,
        f"SELECT RolloutId, Attempt, SpanId, Turn, PromptIds, ResponseIds, Version, Rewards.Value FROM otel.v_transitions "
        f"WHERE RunId = '{run}' ORDER BY RolloutId, Turn, Choice",
    )
    drops = rows(
        store,
        f"SELECT RolloutId, Attempt, SpanId, Reason, Detail FROM otel.v_drops WHERE RunId = '{run}' ORDER BY RolloutId, Attempt, SpanId",
    )
    return transitions, drops


def revisions(store: StoreSettings, run: str) -> list[tuple[Any, ...]]:
    """Of each rollout: revision, calls, transitions and drops."""
    columns = "RolloutId, Revision, Calls, Transitions, Drops"
    return rows(store, f"SELECT {columns} FROM otel.builds FINAL WHERE RunId = '{run}' ORDER BY RolloutId, Revision")
