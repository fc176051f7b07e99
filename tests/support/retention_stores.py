"""Random small span stores for the law of retention: rows to insert, in deliveries, and which rollouts are trained.

In: a seed. Out: rows of every table that is filled by hand; the schema's views make the others of them. Invariant: the same seed gives the
same rows, no two seeds name the same trace, rollout, session or conversation, and transitions lie in traces that name their rollout.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

OLD_DAY, NEW_DAY = "2080-01-01 00:00:00", "2095-01-01 00:00:00"
DELIVERIES = 3
"""Inserts that the rows are spread over, so that a trace has several parts."""
Row = dict[str, object]


class RandomStore:
    """Rows of one store."""

    def __init__(self, seed: int) -> None:
        """Make the rows of a seed."""
        self.seed = seed
        self.deliveries: list[dict[str, list[Row]]] = [{} for _ in range(DELIVERIES)]
        """Rows by table, of each delivery."""
        self._inserts = self.deliveries
        self._random = random.Random(seed)
        choose = self._random.choice
        self._rollouts, self._sessions = self._names("rollout", 4), self._names("session", 2)
        self._conversations = self._names("conversation", 2)
        owned: dict[str, set[str]] = {}
        for trace in self._names("trace", 6):
            # A row of trace_rollouts knows of one delivery alone.
            self._inserts = self._random.sample(self.deliveries, choose([1, DELIVERIES]))
            named = self._random.sample(self._rollouts, choose([0, 0, 1, 1, 2, 3, 4, 4]))
            days = choose([[OLD_DAY], [OLD_DAY], [NEW_DAY], [OLD_DAY, NEW_DAY]])
            for owner in self._trace(trace, named, days):
                owned.setdefault(owner, set()).add(trace)
        self._inserts = self.deliveries
        for _ in range(4):
            self._log(choose(["", *self._names("trace", 8)]))
        for name in [*self._rollouts, *self._sessions, *self._conversations, *self._names("trace", 6)]:
            self._conclusions(name, sorted(owned.get(name, ())))

    def _names(self, kind: str, count: int) -> list[str]:
        return [f"{kind}-{self.seed}-{number}" for number in range(count)]

    def _likely(self, probability: float) -> bool:
        return self._random.random() < probability

    def _add(self, table: str, row: Row) -> None:
        """Deliver a row, now and then twice."""
        for _ in range(2 if self._likely(0.2) else 1):
            self._random.choice(self._inserts).setdefault(table, []).append(row)

    def _trace(self, trace: str, named: list[str], days: list[str]) -> Iterator[str]:
        """Add a trace whose spans name some rollouts, and sessions or none; yield the rollouts that its calls may be built for."""
        sessions = [("session.id", name) for name in self._sessions] + [("gen_ai.conversation.id", name) for name in self._conversations]
        known = self._random.sample(sessions, self._random.choice([0, 0, 1, 2]))
        names = [("spangrad.rollout.id", name) for name in named]
        for number in range(len(names) + self._random.randrange(1, 4)):
            # The first spans name every rollout of the trace, the others some name or none.
            name = names[number : number + 1] or self._random.sample([*known, *names], self._random.choice([0, min(1, len(known + names))]))
            attributes = dict([*name, *(self._random.sample(known, 1) if known and self._likely(0.3) else [])])
            if "spangrad.rollout.id" in attributes and self._likely(0.4):
                attributes["spangrad.rollout.final"] = "true"
            day = self._random.choice(days)
            span: Row = {
                "Timestamp": day,
                "TraceId": trace,
                "SpanId": f"{trace}-{number}",
                "SpanName": "rollout" if "spangrad.rollout.final" in attributes else "work",
                "ScopeName": self._random.choice(["spangrad.gateway", "test"]),
                "SpanAttributes": attributes,
            }
            if self._likely(0.2):
                span |= {"Events.Timestamp": [day], "Events.Name": ["gen_ai.evaluation.result"], "Events.Attributes": [{}]}
            self._add("otel_traces", span)
            yield next(
                (attributes[key] for key in ("spangrad.rollout.id", "session.id", "gen_ai.conversation.id") if key in attributes), trace
            )
            if self._likely(0.2):
                self._add(
                    "dropped_attributes",
                    {"Timestamp": day, "TraceId": trace, "SpanId": f"{trace}-{number}", "Attributes": 1, "IngestedAt": self._day()},
                )
        if self._likely(0.5):
            self._log(trace)
        if self._likely(0.15):
            # All of it began long ago, and the last of it arrived lately.
            late: Row = {"RolloutKey": trace, "RolloutKeySource": "trace", "RowKind": "span", "Timestamp": OLD_DAY, "TraceId": trace}
            self._add("rollout_spans", late | {"SpanId": f"{trace}-late", "IngestedAt": NEW_DAY})
            self._add("trace_rollouts", {"TraceId": trace, "FirstSeen": OLD_DAY, "LastSeen": OLD_DAY, "IngestedAt": NEW_DAY})

    def _day(self) -> str:
        return self._random.choice([OLD_DAY, OLD_DAY, NEW_DAY])

    def _log(self, trace: str) -> None:
        names = [("spangrad.rollout.id", self._rollouts), ("session.id", self._sessions), ("gen_ai.conversation.id", self._conversations)]
        key, values = self._random.choice([*names, ("any", ["none"])])
        event = "gen_ai.evaluation.result" if self._likely(0.7) else ""
        log: Row = {"Timestamp": self._day(), "TraceId": trace, "EventName": event, "LogAttributes": {key: self._random.choice(values)}}
        self._add("otel_logs", log)

    def _conclusions(self, name: str, traces: list[str]) -> None:
        """Add rows derived from a rollout, and the batch that trained it, if one did."""
        build: Row = {"RunId": "run", "RolloutId": name, "BuildSpec": "b", "Revision": 1, "Content": 7}
        for table in ("rewards", "drops", "tool_calls", "builds"):
            if self._likely(0.5):
                self._add(table, build | {"IngestedAt": self._day()} | ({"Name": "r"} if table == "rewards" else {}))
        for trace in traces if self._likely(0.7) else []:
            call: Row = {"TraceId": trace, "CallId": trace, "Policy": "p", "Timestamp": OLD_DAY}
            self._add("transitions", build | call | {"IngestedAt": self._day()})
        if self._likely(0.3):
            self._add("claims", {"BuildSpec": "b", "RunId": "run", "RolloutId": name, "IngestedAt": self._day()})
        if self._likely(0.25):
            batch: Row = {"Policy": "p", "Branch": "main", "BatchId": f"batch-{self.seed}", "Version": 1, "RunId": "run", "GroupId": "g"}
            self._add("batches", batch | {"RolloutId": name, "BuildSpec": "b", "Revision": 1})
