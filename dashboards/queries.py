"""SQL subqueries that several panels share.

In: the tables of collector/schema, the variables of variables.py. Out: subqueries. Invariants: each counts a span, a call or a conclusion
once; of a table that grows with the traffic it reads only the selected time range or the selected keys.

With FINAL the database filters after it has merged deliveries, except by PREWHERE. All deliveries of a span agree in the columns that are
used in PREWHERE here, so filtering first gives the same result and reads less.
"""

from __future__ import annotations

from dashboards.variables import chosen, is_
from spangrad import semconv

OF_BRANCH = f"{is_('Policy', 'policy')} AND {is_('Branch', 'branch')}"
OF_VERSION = f"{OF_BRANCH} AND Version = toUInt64OrZero(${{version:singlequote}})"

STEPS = (
    f"(SELECT * FROM spangrad_internal.policy_versions FINAL WHERE {OF_BRANCH} AND Status = 'committed' AND BatchId != ''"
    f" AND $__timeFilter(IngestedAt))"
)
"""Subquery of the committed versions of the selected time range that were trained on a batch."""

USED = f"(SELECT * FROM spangrad_internal.batches FINAL WHERE {OF_BRANCH} AND $__timeFilter(IngestedAt))"
"""Subquery of the rollouts in batches of the selected time range."""


def metric(name: str) -> str:
    """Return SQL for a metric of a training step, NULL if the step has none of that name."""
    return f"if(mapContains(Metrics, '{name}'), Metrics['{name}'], NULL)"


def trained(used: str, columns: str) -> str:
    """Return a subquery of the transitions of the rollouts in `used`, in the revision that was trained, joined with their batch rows.

    Args:
        used: subquery of rows of spangrad_internal.batches.
        columns: columns to select, of `t`, the transitions, and of `b`, the batch's row of the rollout.
    """
    return f"""(
        SELECT {columns}
        FROM {used} AS b
        INNER JOIN (
            SELECT * FROM spangrad_internal.transitions FINAL
            WHERE (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM {used})
                AND (RunId, RolloutId, BuildSpec, Revision, Content) IN (
                    SELECT RunId, RolloutId, BuildSpec, Revision, argMin(Content, IngestedAt)
                    FROM spangrad_internal.builds
                    WHERE (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM {used})
                    GROUP BY RunId, RolloutId, BuildSpec, Revision)
        ) AS t ON t.RunId = b.RunId AND t.RolloutId = b.RolloutId AND t.Attempt = b.Attempt AND t.BuildSpec = b.BuildSpec
            AND t.Revision = b.Revision
    )"""


CHOSEN = f"{is_('BuildSpec', 'dataset')} AND {chosen('RunId', 'run')} AND {chosen('Mode', 'mode')}"
"""Condition for rows of the selected dataset, runs and modes."""


def newest(table: str, among: str, time: str | None = None) -> str:
    """Return a subquery of the rows of an internal table in each rollout's newest revision.

    Args:
        table: name of the table: transitions, drops or tool_calls.
        among: condition on BuildSpec, RunId, Mode and RolloutId.
        time: column of the table that must lie in the selected time range. None: rows of any time.
    """
    own = f"{among} AND $__timeFilter({time})" if time else among
    return f"""(
        SELECT * FROM spangrad_internal.{table} FINAL
        WHERE {own} AND (RunId, RolloutId, BuildSpec, Revision, Content) IN (
            SELECT RunId, RolloutId, BuildSpec, newest.1, newest.2
            FROM (
                SELECT RunId, RolloutId, BuildSpec, argMin((Revision, Content), (-toInt64(Revision), IngestedAt, Content)) AS newest
                FROM spangrad_internal.builds
                WHERE {among} AND (RunId, RolloutId) IN (SELECT RunId, RolloutId FROM spangrad_internal.{table} WHERE {own})
                GROUP BY RunId, RolloutId, BuildSpec))
    )"""


def roots(columns: str) -> str:
    """Return a subquery of the root spans of attempts that began in the selected time range."""
    return f"""(
        SELECT {columns}
        FROM spangrad_internal.rollout_spans FINAL
        PREWHERE SpanName = '{semconv.ROOT_SPAN_NAME}' AND RowKind = 'span' AND RolloutKeySource = 'rollout' AND $__timeFilter(Timestamp)
        WHERE mapContains(Attributes, '{semconv.ROLLOUT_FINAL}') AND {chosen("RunId", "run")} AND {chosen("Mode", "mode")}
    )"""


def calls(columns: str) -> str:
    """Return a subquery of policy calls that began in the selected time range, one row a choice."""
    return f"""(
        SELECT {columns}
        FROM spangrad_internal.calls FINAL
        PREWHERE $__timeFilter(Timestamp)
        WHERE {chosen("RunId", "run")} AND {chosen("Mode", "mode")} AND {chosen("Policy", "policy")}
    )"""


_KIND = semconv.OPENINFERENCE_KIND
IS_TOOL = (
    f"(Attributes['{_KIND}'] = 'TOOL' OR Attributes['{semconv.GEN_AI_OPERATION}'] = 'execute_tool'"
    " OR Attributes['traceloop.span.kind'] = 'tool')"
)
"""Condition for spans of tool runs, in the three conventions that most agents use; docs/reference/conventions.md lists the others."""
TOOL_NAME = (
    f"coalesce(nullIf(Attributes['{semconv.OPENINFERENCE_TOOL_NAME}'], ''), nullIf(Attributes['{semconv.GEN_AI_TOOL_NAME}'], ''), SpanName)"
)


def tools(columns: str) -> str:
    """Return a subquery of the spans of tool runs that began in the selected time range."""
    return f"""(
        SELECT {columns}
        FROM spangrad_internal.rollout_spans FINAL
        PREWHERE RowKind = 'span' AND ScopeName != '{semconv.GATEWAY_SCOPE}' AND $__timeFilter(Timestamp)
        WHERE {IS_TOOL} AND {chosen("RunId", "run")} AND {chosen("Mode", "mode")}
    )"""
