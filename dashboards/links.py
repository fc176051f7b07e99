"""Empty dashboards, and the links between them.

In: names. Out: empty dashboards, and URLs of data links. Invariant: a link carries the store, the selected time range and the clicked
value, so that the next dashboard shows the same data.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType

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


def begin(name: str, description: str) -> dashboard.Dashboard:
    """Return a dashboard without panels, with links to the other dashboards."""
    siblings = dashboard.DashboardLink("spangrad").type(DashboardLinkType.DASHBOARDS).tags(["spangrad"]).icon("dashboard")
    return (
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
