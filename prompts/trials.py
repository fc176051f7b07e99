"""Reads trials from the span store: the result of each rollout of a search, and its model calls.

In: a client of the store, the search's run, ids of rollouts. Out: `Trial`s. Invariant: trials depend on spans alone, so that a process that
continues after a crash reads the same; a rollout that was cancelled is no trial, one that failed has no score, never the score 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prompts.exchanges import Exchange, read_exchange
from spangrad import semconv
from spangrad.store.clickhouse import store_errors
from spangrad.types import AttemptFailure, Mode

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_ROOTS = f"""
SELECT RolloutKey, Attempt, TraceId, SpanId, Attributes, StatusMessage
FROM spangrad_internal.rollout_spans FINAL
WHERE {{which}} AND RunId = {{run:String}} AND Mode = '{Mode.TRIAL.value}' AND RowKind = 'span' AND SpanName = '{semconv.ROOT_SPAN_NAME}'
    AND Attributes['{semconv.ROLLOUT_FINAL}'] = 'true' AND Attributes['{semconv.PROMPT_NAME}'] = {{prompt:String}}
ORDER BY RolloutKey, Attempt DESC
LIMIT 1 BY RolloutKey
"""
_REWARDS = f"""
SELECT RolloutKey, Attempt, SpanId, Attributes
FROM spangrad_internal.rollout_spans FINAL
WHERE RolloutKey IN {{ids:Array(String)}} AND RowKind != 'span' AND mapContains(Attributes, '{semconv.EVALUATION_SCORE}')
ORDER BY RolloutKey, Attempt, TraceId, SpanId, EventIndex
"""
_CALLS = f"""
SELECT SpanAttributes['{semconv.ROLLOUT_ID}'] AS Rollout, SpanAttributes['{semconv.ROLLOUT_ATTEMPT}'] AS Attempt,
    any(SpanAttributes['{semconv.REQUEST_JSON}']), any(SpanAttributes['{semconv.RESPONSE_JSON}'])
FROM otel.otel_traces
WHERE TraceId IN (SELECT TraceId FROM spangrad_internal.rollout_spans WHERE RolloutKey IN {{ids:Array(String)}})
    AND ScopeName = '{semconv.GATEWAY_SCOPE}' AND Rollout IN {{ids:Array(String)}}
GROUP BY TraceId, SpanId, Rollout, Attempt
ORDER BY Rollout, any(SpanAttributes['{semconv.PROCESS_ID}']), any(toUInt64OrZero(SpanAttributes['{semconv.SEQ}']))
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rollout that has ended, of one version of the prompt on one task."""

    rollout_id: str
    attempt: int
    """Number of its last attempt."""
    version: int
    task_id: str
    score: float | None
    """Sum of its final rewards. None: it has none."""
    failure: str
    """Failure of its last attempt; empty if it succeeded."""
    detail: str
    input: str = ""
    """Input of the task, as JSON; filled in by the search, which knows the tasks."""
    exchanges: tuple[Exchange, ...] = ()
    """Model calls of the last attempt; filled in by `with_exchanges`."""


class Trials:
    """Trials of one search."""

    def __init__(self, client: Client, run_id: str, prompt: str) -> None:
        """Read the rollouts of a run that tried versions of a prompt."""
        self._client = client
        self._run, self._prompt = run_id, prompt

    def read(self, ids: Sequence[str] | None = None) -> list[Trial]:
        """Return the trials with these ids that have ended, or all of the run that have.

        Raises:
            StoreError: the store does not answer.
        """
        which = "true" if ids is None else "RolloutKey IN {ids:Array(String)}"
        roots = self._rows(_ROOTS.replace("{which}", which), ids=list(ids or ()), run=self._run, prompt=self._prompt)
        trials = [_trial(key, attempt, attributes, message) for key, attempt, _, _, attributes, message in roots]
        spans = {(key, attempt): span for key, attempt, _, span, _, _ in roots}
        given: defaultdict[tuple[str, int], list[tuple[str, Mapping[str, str]]]] = defaultdict(list)
        for key, attempt, span, attributes in self._rows(_REWARDS, ids=[trial.rollout_id for trial in trials]) if trials else ():
            given[key, attempt].append((span, attributes))
        keyed = {(trial.rollout_id, trial.attempt): trial for trial in trials if trial.failure != AttemptFailure.CANCELLED}
        return [replace(trial, score=_return(given[key], spans[key], root_only=bool(trial.failure))) for key, trial in keyed.items()]

    def with_exchanges(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the same trials, with the model calls of their last attempts, in the order in which the gateway accepted the calls.

        Raises:
            StoreError: the store does not answer.
        """
        ids = sorted({trial.rollout_id for trial in trials})
        exchanges: defaultdict[tuple[str, int], list[Exchange]] = defaultdict(list)
        for rollout, attempt, request, response in self._rows(_CALLS, ids=ids) if ids else ():
            exchanges[rollout, int(attempt or 0)].append(read_exchange(request, response))
        return [replace(trial, exchanges=tuple(exchanges[trial.rollout_id, trial.attempt])) for trial in trials]

    def _rows(self, sql: str, **parameters: object) -> list[Any]:
        with store_errors(self._client):
            return list(self._client.query(sql, parameters=parameters).result_rows)


def _trial(rollout: str, attempt: int, attributes: Mapping[str, str], message: str) -> Trial:
    version = attributes[semconv.PROMPT_VERSION]
    return Trial(rollout, attempt, int(version), attributes[semconv.TASK_ID], None, attributes.get(semconv.ROLLOUT_FAILURE, ""), message)


def _return(given: Sequence[tuple[str, Mapping[str, str]]], root: str, *, root_only: bool) -> float | None:
    """Return the sum of the rewards that the runner has written; without such, of those in the agent's spans and logs.

    None: there is none, or one of them is no finite number, which is a missing reward. Of an attempt that failed, only the rewards of the
    runner count (`runner.failure_rewards`), which are on its root span.
    """
    of_root = [attributes for span, attributes in given if span == root]
    counted = of_root if of_root or root_only else [attributes for _, attributes in given]
    try:
        total = sum(float(attributes[semconv.EVALUATION_SCORE]) for attributes in counted)
    except ValueError:
        return None
    return total if counted and math.isfinite(total) else None
