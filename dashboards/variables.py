"""What a reader of a dashboard may choose, and the conditions that the choices become.

In: names and queries. Out: template variables of the foundation SDK, and SQL fragments. Invariants: a value reaches SQL only through
`:singlequote`, which quotes and escapes it; the first answer of a query is the sensible default, because Grafana takes the first.
"""

from __future__ import annotations

import inspect

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

from dashboards.panels import DATA_SOURCE, SOURCE
from spangrad import semconv

ALL = "$__all"
"""What Grafana holds of a variable whose every value is chosen."""


def chosen(column: str, variable: str) -> str:
    """A condition on a column for a variable of which several values, or all, may be chosen: all of them is no condition."""
    return f"$__conditionalAll({column} IN (${{{variable}:singlequote}}), ${variable})"


def is_(column: str, variable: str) -> str:
    """A condition on a column for a variable with one value."""
    return f"{column} = ${{{variable}:singlequote}}"


def source() -> dashboard.DatasourceVariable:
    """Which of Grafana's ClickHouse data sources is the span store."""
    return dashboard.DatasourceVariable("datasource").label("store").type(DATA_SOURCE)


def one_of(name: str, label: str, description: str, sql: str) -> dashboard.QueryVariable:
    """One value out of a query's answers: the first, to begin with."""
    return _query(name, label, description, sql)


def some_of(name: str, label: str, description: str, sql: str) -> dashboard.QueryVariable:
    """Any of a query's answers: all, to begin with."""
    everything = VariableOption(selected=True, text=["All"], value=[ALL])
    return _query(name, label, description, sql).multi(True).include_all(True).current(everything)


def number(name: str, label: str, description: str, value: str) -> dashboard.TextBoxVariable:
    """A number that is typed in."""
    variable = dashboard.TextBoxVariable(name).label(label).description(description).default_value(value)
    return variable.current(VariableOption(selected=True, text=value, value=value))


def _query(name: str, label: str, description: str, sql: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).description(description).datasource(SOURCE).query(inspect.cleandoc(sql))
    timely = VariableRefresh.ON_TIME_RANGE_CHANGED if "$__time" in sql else VariableRefresh.ON_DASHBOARD_LOAD
    return variable.refresh(timely).sort(VariableSort.DISABLED)


def policy() -> dashboard.QueryVariable:
    """The policy of versions and batches; the one that learned last comes first."""
    sql = "SELECT Policy FROM otel.policy_versions GROUP BY Policy ORDER BY max(IngestedAt) DESC, Policy"
    return one_of("policy", "policy", "The policy that is trained.", sql)


def branch() -> dashboard.QueryVariable:
    """A branch of the policy; the one that learned last comes first."""
    sql = f"SELECT Branch FROM otel.policy_versions WHERE {is_('Policy', 'policy')} GROUP BY Branch ORDER BY max(IngestedAt) DESC, Branch"
    return one_of("branch", "branch", "The line of versions of that policy.", sql)


def dataset() -> dashboard.QueryVariable:
    """The build specification whose transitions are read: a rollout that was built for two datasets counts once."""
    sql = """
        SELECT BuildSpec, concat(argMax(Name, (IngestedAt, Name)), '@', toString(argMax(Revision, (IngestedAt, Name)))) AS Dataset
        FROM otel.datasets FINAL
        GROUP BY BuildSpec
        ORDER BY max(IngestedAt) DESC, BuildSpec"""
    return one_of("dataset", "dataset", "Whose transitions and drops are read; the newest revision comes first.", sql)


def run() -> dashboard.QueryVariable:
    """Training runs and production services."""
    sql = "SELECT RunId FROM otel.builds GROUP BY RunId ORDER BY max(IngestedAt) DESC, RunId LIMIT 1000"
    return some_of("run", "run", "Training runs or production services that the rollouts belong to.", sql)


def mode() -> dashboard.QueryVariable:
    """What rollouts are for."""
    sql = "SELECT DISTINCT Mode FROM otel.builds ORDER BY Mode"
    return some_of("mode", "mode", "What the rollouts are for: train, validate, probe, production.", sql)


def reward() -> dashboard.QueryVariable:
    """The reward that success is read from."""
    sql = f"SELECT Name FROM otel.rewards GROUP BY Name ORDER BY Name = '{semconv.REWARD_NAME}' DESC, Name"
    return one_of("reward", "reward", "The reward that says whether a rollout succeeded.", sql)


def success() -> dashboard.TextBoxVariable:
    """What of that reward counts as success."""
    return number("success", "success from", "A rollout succeeded when its sum of that reward is at least this.", "1")
