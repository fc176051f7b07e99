"""Template variables that a reader of a dashboard selects, and the SQL conditions for the selected values.

In: names and queries. Out: template variables of the foundation SDK, and SQL fragments. Invariants: a value reaches SQL only through
`:singlequote`, which quotes and escapes it; the first row of a query is a sensible default, because Grafana selects the first.
"""

from __future__ import annotations

import inspect

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

from dashboards.panels import DATA_SOURCE, SOURCE
from spangrad import semconv

ALL = "$__all"
"""Grafana's value of a variable of which all values are selected."""


def chosen(column: str, variable: str) -> str:
    """Return a condition on a column for a variable with several selected values; it is always true if all values are selected."""
    return f"$__conditionalAll({column} IN (${{{variable}:singlequote}}), ${variable})"


def is_(column: str, variable: str) -> str:
    """Return a condition on a column for a variable with one selected value."""
    return f"{column} = ${{{variable}:singlequote}}"


def source() -> dashboard.DatasourceVariable:
    """Return the variable that selects the span store among Grafana's ClickHouse data sources."""
    return dashboard.DatasourceVariable("datasource").label("store").type(DATA_SOURCE)


def one_of(name: str, label: str, description: str, sql: str) -> dashboard.QueryVariable:
    """Return a variable with one value of a query's result; initially the first."""
    variable = dashboard.QueryVariable(name).label(label).description(description).datasource(SOURCE).query(inspect.cleandoc(sql))
    refresh = VariableRefresh.ON_TIME_RANGE_CHANGED if "$__time" in sql else VariableRefresh.ON_DASHBOARD_LOAD
    return variable.refresh(refresh).sort(VariableSort.DISABLED)


def some_of(name: str, label: str, description: str, sql: str) -> dashboard.QueryVariable:
    """Return a variable with any values of a query's result; initially all."""
    everything = VariableOption(selected=True, text=["All"], value=[ALL])
    return one_of(name, label, description, sql).multi(True).include_all(True).current(everything)


def policy() -> dashboard.QueryVariable:
    """Return the variable for the policy; the policy with the newest version comes first."""
    sql = "SELECT Policy FROM spangrad.policy_versions GROUP BY Policy ORDER BY max(IngestedAt) DESC, Policy"
    return one_of("policy", "policy", "The policy that is trained.", sql)


def branch() -> dashboard.QueryVariable:
    """Return the variable for a branch of the policy; the branch with the newest version comes first."""
    versions = f"spangrad.policy_versions WHERE {is_('Policy', 'policy')}"
    sql = f"SELECT Branch FROM {versions} GROUP BY Branch ORDER BY max(IngestedAt) DESC, Branch"
    return one_of("branch", "branch", "The line of versions of that policy.", sql)


def dataset() -> dashboard.QueryVariable:
    """Return the variable for the dataset, whose value is its build specification: a rollout built for two datasets counts once."""
    sql = """
        SELECT BuildSpec, concat(argMax(Name, (IngestedAt, Name)), '@', toString(argMax(Revision, (IngestedAt, Name)))) AS Dataset
        FROM spangrad.datasets
        GROUP BY BuildSpec
        ORDER BY max(IngestedAt) DESC, BuildSpec"""
    return one_of("dataset", "dataset", "Whose transitions and drops are read; the newest revision comes first.", sql)


def run() -> dashboard.QueryVariable:
    """Return the variable for the runs: training runs and production services."""
    sql = "SELECT RunId FROM spangrad.builds GROUP BY RunId ORDER BY max(IngestedAt) DESC, RunId LIMIT 1000"
    return some_of("run", "run", "Training runs or production services that the rollouts belong to.", sql)


def mode() -> dashboard.QueryVariable:
    """Return the variable for the modes of rollouts."""
    sql = "SELECT DISTINCT Mode FROM spangrad.builds ORDER BY Mode"
    return some_of("mode", "mode", "What the rollouts are for: train, validate, probe, greedy, trial, production.", sql)


def reward() -> dashboard.QueryVariable:
    """Return the variable for the reward that decides success."""
    sql = f"SELECT Name FROM spangrad.rewards GROUP BY Name ORDER BY Name = '{semconv.REWARD_NAME}' DESC, Name"
    return one_of("reward", "reward", "The reward that says whether a rollout succeeded.", sql)


def success() -> dashboard.TextBoxVariable:
    """Return the variable for the smallest sum of that reward that counts as success: a number that the reader types."""
    variable = dashboard.TextBoxVariable("success").label("success from").default_value("1")
    variable.description("A rollout succeeded when its sum of that reward is at least this.")
    return variable.current(VariableOption(selected=True, text="1", value="1"))
