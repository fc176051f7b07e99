"""SQL that several panels have in common.

In: the tables of collector/schema, the variables of variables.py. Out: subqueries. Invariants: each counts a span, a call or a conclusion
once; of a table that grows with the traffic it reads the chosen time or the chosen keys.

With FINAL the engine filters after it has merged deliveries, unless it is told PREWHERE: all deliveries of a span agree in the columns that
stand there, so filtering first gives the same answer from less.
"""

from __future__ import annotations

from dashboards.variables import chosen, is_
from spangrad import semconv

OF_BRANCH = f"{is_('Policy', 'policy')} AND {is_('Branch', 'branch')}"
OF_VERSION = f"{OF_BRANCH} AND Version = toUInt64OrZero(${{version:singlequote}})"

STEPS = (
    f"(SELECT * FROM otel.policy_versions FINAL WHERE {OF_BRANCH} AND Status = 'committed' AND BatchId != '' AND $__timeFilter(IngestedAt))"
)
"""Versions that a batch of the chosen time made."""

USED = f"(SELECT * FROM otel.batches FINAL WHERE {OF_BRANCH} AND $__timeFilter(IngestedAt))"
"""Rollouts that batches of the chosen time used."""


def metric(name: str) -> str:
    """A metric of a step, or NULL where the step has none of that name."""
    return f"if(mapContains(Metrics, '{name}'), Metrics['{name}'], NULL)"


def trained(used: str, columns: str) -> str:
    """Transitions of the rollouts in `used`, in the revision that was trained, with the version and the group that they were trained in.

    Args:
        used: rows of otel.batches.
        columns: of `t`, the transitions, and `b`, the batch's row of the rollout.
    """
    return f"""(
        SELECT {columns}
        FROM {used} AS b
        INNER JOIN (
            SELECT * FROM otel.transitions FINAL
            WHERE (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM {used})
                AND (RunId, RolloutId, BuildSpec, Revision, Content) IN (
                    SELECT RunId, RolloutId, BuildSpec, Revision, argMin(Content, IngestedAt)
                    FROM otel.builds
                    WHERE (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM {used})
                    GROUP BY RunId, RolloutId, BuildSpec, Revision)
        ) AS t ON t.RunId = b.RunId AND t.RolloutId = b.RolloutId AND t.Attempt = b.Attempt AND t.BuildSpec = b.BuildSpec
            AND t.Revision = b.Revision
    )"""


CHOSEN = f"{is_('BuildSpec', 'dataset')} AND {chosen('RunId', 'run')} AND {chosen('Mode', 'mode')}"
"""Rollouts of the chosen dataset, runs and modes."""


def newest(table: str, among: str, time: str | None = None) -> str:
    """Rows of otel.transitions or otel.drops that count: those of each rollout's newest revision.

    Args:
        table: transitions or drops.
        among: a condition on BuildSpec, RunId, Mode and RolloutId.
        time: the table's column that the chosen time speaks of; a rollout without a row in it is not read. None: whenever it was.
    """
    own = f"{among} AND $__timeFilter({time})" if time else among
    return f"""(
        SELECT * FROM otel.{table} FINAL
        WHERE {own} AND (RunId, RolloutId, BuildSpec, Revision, Content) IN (
            SELECT RunId, RolloutId, BuildSpec, newest.1, newest.2
            FROM (
                SELECT RunId, RolloutId, BuildSpec, argMin((Revision, Content), (-toInt64(Revision), IngestedAt, Content)) AS newest
                FROM otel.builds
                WHERE {among} AND (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM otel.{table} WHERE {own})
                GROUP BY RunId, RolloutId, BuildSpec))
    )"""


def roots(columns: str) -> str:
    """Root spans of the attempts that began in the chosen time."""
    return f"""(
        SELECT {columns}
        FROM otel.rollout_spans FINAL
        PREWHERE SpanName = '{semconv.ROOT_SPAN_NAME}' AND RowKind = 'span' AND RolloutKeySource = 'rollout' AND $__timeFilter(Timestamp)
        WHERE mapContains(Attributes, '{semconv.ROLLOUT_FINAL}') AND {chosen("RunId", "run")} AND {chosen("Mode", "mode")}
    )"""


def calls(columns: str) -> str:
    """Policy calls, a choice each, that began in the chosen time."""
    return f"""(
        SELECT {columns}
        FROM otel.calls FINAL
        PREWHERE $__timeFilter(Timestamp)
        WHERE {chosen("RunId", "run")} AND {chosen("Mode", "mode")} AND {chosen("Policy", "policy")}
    )"""


_KIND = semconv.OPENINFERENCE_KIND
IS_TOOL = (
    f"(Attributes['{_KIND}'] = 'TOOL' OR Attributes['{semconv.GEN_AI_OPERATION}'] = 'execute_tool'"
    " OR Attributes['traceloop.span.kind'] = 'tool')"
)
"""Of a span: it is a tool's run. The names of the three conventions that most agents speak; docs/conventions.md has the rest."""
TOOL_NAME = (
    f"coalesce(nullIf(Attributes['{semconv.OPENINFERENCE_TOOL_NAME}'], ''), nullIf(Attributes['{semconv.GEN_AI_TOOL_NAME}'], ''), SpanName)"
)


def tools(columns: str) -> str:
    """Spans of tools that began in the chosen time."""
    return f"""(
        SELECT {columns}
        FROM otel.rollout_spans FINAL
        PREWHERE RowKind = 'span' AND ScopeName != '{semconv.GATEWAY_SCOPE}' AND $__timeFilter(Timestamp)
        WHERE {IS_TOOL} AND {chosen("RunId", "run")} AND {chosen("Mode", "mode")}
    )"""
