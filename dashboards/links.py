"""Layout of dashboards, and the links between them.

In: variables and panels by row. Out: dashboards, and URLs of data links. Invariant: a link carries the store, the selected time
range and the clicked value, so that the next dashboard shows the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog import builder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType, VariableModel

from dashboards.panels import Panel
from dashboards.variables import source

_SAME = "var-datasource=${datasource}&${__url_time_range}"


def uid(name: str) -> str:
    """Return Grafana's unique id of the dashboard of that name."""
    return f"spangrad-{name}"


def _lineage(**chosen: str) -> str:
    return f"/d/{uid('lineage')}?{_SAME}" + "".join(f"&var-{name}=${{{value}}}" for name, value in chosen.items())


_BRANCH = {"policy": "policy:percentencode", "branch": "branch:percentencode"}
_ROLLOUT = "__data.fields.rollout:percentencode"
LINEAGE_OF_VERSION = _lineage(**_BRANCH, version="__data.fields.version")
LINEAGE_OF_PARENT = _lineage(**_BRANCH, version="__data.fields.parent")
LINEAGE_OF_ITS_BRANCH = _lineage(
    policy="__data.fields.policy:percentencode", branch="__data.fields.branch:percentencode", version="__data.fields.version"
)
LINEAGE_OF_ROLLOUT = _lineage(rollout=_ROLLOUT)
LINEAGE_OF_ROLLOUT_HERE = _lineage(**_BRANCH, version="version", rollout=_ROLLOUT)


def layout(
    name: str, description: str, variables: Sequence[builder.Builder[VariableModel]], rows: Mapping[str, Sequence[Panel]]
) -> dashboard.Dashboard:
    """Return a dashboard with links to the others, a variable for the span store before its own, and panels by the title of their row.

    Panels below an empty title have no row.
    """
    siblings = dashboard.DashboardLink("spangrad").type(DashboardLinkType.DASHBOARDS).tags(["spangrad"]).icon("dashboard")
    page = (
        dashboard.Dashboard(f"spangrad: {name}")
        .uid(uid(name))
        .description(f"spangrad: {description}.")
        .tags(["spangrad"])
        .timezone("browser")
        .time("now-7d", "now")
        .refresh("1m")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(siblings.include_vars(True).keep_time(True).as_dropdown(False))
    )
    for variable in (source(), *variables):
        page.with_variable(variable)
    for title, panels in rows.items():
        if title:
            page.with_row(dashboard.Row(title))
        for panel in panels:
            page.with_panel(panel)
    return page
