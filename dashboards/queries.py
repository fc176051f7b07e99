"""SQL subqueries that several panels share.

In: the public tables of collector/schema, the variables of variables.py. Out: subqueries. Invariant: of a table that grows with the
traffic each reads only the selected time range or the selected keys.
"""

from __future__ import annotations

from dashboards.variables import chosen, is_

OF_BRANCH = f"{is_('Policy', 'policy')} AND {is_('Branch', 'branch')}"
OF_VERSION = f"{OF_BRANCH} AND Version = toUInt64OrZero(${{version:singlequote}})"

STEPS = f"(SELECT * FROM spangrad.steps WHERE {OF_BRANCH} AND $__timeFilter(IngestedAt))"
"""Subquery of the committed versions of the selected time range that were trained on a batch."""

TRAINED = f"spangrad.trained_calls WHERE {OF_BRANCH} AND $__timeFilter(IngestedAt)"
"""Calls in batches of the selected time range."""


def metric(name: str) -> str:
    """Return SQL for a metric of a training step, NULL if the step has none of that name."""
    return f"if(mapContains(Metrics, '{name}'), Metrics['{name}'], NULL)"


CHOSEN = f"{is_('BuildSpec', 'dataset')} AND {chosen('RunId', 'run')} AND {chosen('Mode', 'mode')}"
"""Condition for rows of the selected dataset, runs and modes."""


def during(table: str) -> str:
    """Return a public table with a condition: rows of the selected runs and modes that began in the selected time range."""
    return f"spangrad.{table} WHERE $__timeFilter(Timestamp) AND {chosen('RunId', 'run')} AND {chosen('Mode', 'mode')}"


ATTEMPTS = during("attempts")
CALLS = f"{during('calls')} AND {chosen('Policy', 'policy')}"
TOOL_CALLS = f"{during('tool_calls')} AND {is_('BuildSpec', 'dataset')}"


def by_version(columns: str, source: str) -> str:
    """Return a query for aggregates of a source's rows by `version`."""
    return f"SELECT Version AS version, {columns}\nFROM {source}\nGROUP BY version\nORDER BY version"


def by_time(columns: str, source: str, *, name: str = "", time: str = "Timestamp") -> str:
    """Return a query for aggregates of a source's rows over time, and by the column `name` if there is one."""
    keys = f"time, {name}" if name else "time"
    return f"SELECT $__timeInterval({time}) AS time, {columns}\nFROM {source}\nGROUP BY {keys}\nORDER BY {keys}"
