"""The kinds of panels in the dashboards, each with a query in the format that it draws.

In: a title, SQL, a description. Out: panels of the foundation SDK. Invariant: every panel has a description and a unit, and queries in the
format that its kind draws: series over time as time series, spans as a trace, everything else as a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from grafana_foundation_sdk.builders import barchart, common, dashboard, stat, table, timeseries, trend
from grafana_foundation_sdk.cog import builder, variants
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
)

DATA_SOURCE = "grafana-clickhouse-datasource"
SOURCE = DataSourceRef(type_val=DATA_SOURCE, uid="${datasource}")
WIDTH = 24
"""Width of Grafana's grid, in grid columns."""

Panel: TypeAlias = builder.Builder[models.Panel]
"""Builder of a panel of any kind."""
Links: TypeAlias = Mapping[str, tuple[str, str]]
"""Column name -> title and URL of its link."""
_FORMATS = {"timeseries": 0, "table": 1, "traces": 3}
"""Type of a query -> the number that the data source has for the format of its result."""


class Query(variants.Dataquery, builder.Builder[variants.Dataquery]):
    """Query of a panel, in the form that version 4 of the ClickHouse data source stores."""

    def __init__(self, sql: str, type_: str = "table") -> None:
        self._sql = sql
        self._type = type_

    def build(self) -> variants.Dataquery:
        """Return the query itself, as the SDK's builder interface requires."""
        return self

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the query in the dashboard's file."""
        return {
            "datasource": SOURCE,
            "editorType": "sql",
            "format": _FORMATS[self._type],
            "pluginVersion": "4.0.0",
            "queryType": self._type,
            "rawSql": inspect.cleandoc(self._sql),
            "refId": "A",
        }


def steps(base: str, **from_: float) -> dashboard.ThresholdsConfig:
    """Return thresholds: a base colour, and further colours from a value upwards, as in `steps("green", red=0.01)`."""
    thresholds = [Threshold(value=None, color=base), *(Threshold(value=value, color=color) for color, value in from_.items())]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(thresholds)


_Curve = TypeVar("_Curve", trend.Panel, timeseries.Panel)


def _curves(
    panel: _Curve, title: str, query: Query, unit: str, description: str, *, right: tuple[str, str] | None, stacked: bool
) -> _Curve:
    """Give a panel the properties that curves over versions and curves over time share, in place; return it."""
    panel.title(title).unit(unit).description(description).datasource(SOURCE).span(12).height(8).with_target(query)
    panel.draw_style(common_models.GraphDrawStyle.LINE).line_width(2).fill_opacity(8).show_points(
        common_models.VisibilityMode.AUTO
    ).point_size(5)
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING))
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "min", "max"])
    )
    if stacked:
        panel.draw_style(common_models.GraphDrawStyle.BARS).fill_opacity(70).line_width(0)
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if right is not None:
        name, its_unit = right
        most = 1 if its_unit == "percentunit" else None
        properties = [("unit", its_unit), ("custom.axisPlacement", "right"), ("custom.fillOpacity", 0), ("min", 0), ("max", most)]
        panel.override_by_name(name, [DynamicConfigValue(id_val=key, value=value) for key, value in properties])
    return panel


def over_versions(
    title: str,
    sql: str,
    unit: str,
    description: str,
    *,
    right: tuple[str, str] | None = None,
    at_most: float | None = None,
    logarithmic: bool = False,
    stacked: bool = False,
) -> trend.Panel:
    """Return a panel of curves over policy versions: the query's first column is `version`, the others are numbers.

    `right` is the name and the unit of a curve that has an axis of its own; with `at_most`, the axis goes from 0 to it.
    """
    panel = _curves(trend.Panel(), title, Query(sql), unit, description, right=right, stacked=stacked)
    panel.x_field("version")
    if at_most is not None:
        panel.min(0).max(at_most)
    if logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
    return panel


def over_time(
    title: str,
    sql: str,
    unit: str,
    description: str,
    *,
    right: tuple[str, str] | None = None,
    at_most: float | None = None,
    stacked: bool = False,
    signed: bool = False,
) -> timeseries.Panel:
    """Return a panel of curves over time: the query's columns are `time`, at most one of names, and numbers, below 0 only if `signed`."""
    panel = _curves(timeseries.Panel(), title, Query(sql, "timeseries"), unit, description, right=right, stacked=stacked)
    if not signed:
        panel.min(0)
    if at_most is not None:
        panel.max(at_most)
    return panel


def figure(
    title: str, sql: str, unit: str, description: str, *, thresholds: dashboard.ThresholdsConfig | None = None, decimals: int | None = None
) -> stat.Panel:
    """Return a panel that shows one number."""
    panel = stat.Panel().title(title).unit(unit).description(description).datasource(SOURCE)
    panel.thresholds(thresholds or steps("blue")).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    panel.color_mode(common_models.BigValueColorMode.VALUE).graph_mode(common_models.BigValueGraphMode.NONE).text_mode(
        common_models.BigValueTextMode.VALUE
    )
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if decimals is not None:
        panel.decimals(decimals)
    return panel.height(4).with_target(Query(sql))


def in_one_row(*figures: stat.Panel) -> list[Panel]:
    """Return panels of single numbers with equal widths, which fill one row of the grid."""
    return [panel.span(WIDTH // len(figures)) for panel in figures]


def bars(title: str, sql: str, unit: str, description: str, *, name: str) -> barchart.Panel:
    """Return a bar chart with a bar for each row: the column `name` holds the labels, the others are numbers."""
    panel = barchart.Panel().title(title).unit(unit).description(description).datasource(SOURCE).x_field(name).min(0)
    panel.orientation(common_models.VizOrientation.HORIZONTAL).show_value(common_models.VisibilityMode.AUTO).bar_width(0.8).fill_opacity(70)
    panel.legend(common.VizLegendOptions().show_legend(False).display_mode(common_models.LegendDisplayMode.HIDDEN))
    return panel.span(12).height(8).with_target(Query(sql))


def rows(
    title: str,
    sql: str,
    description: str,
    *,
    units: Mapping[str, str],
    links: Links | None = None,
    alarms: Mapping[str, float] | None = None,
    height: int = 9,
) -> table.Panel:
    """Return a table; `units`, `links` and `alarms` (values from which a cell is red) are by column name."""
    panel = table.Panel().title(title).description(description).datasource(SOURCE).unit("string")
    overrides: dict[str, list[tuple[str, Any]]] = {name: [("unit", unit)] for name, unit in units.items()}
    for name, (text, url) in (links or {}).items():
        overrides.setdefault(name, []).append(("links", [{"title": text, "url": url, "targetBlank": False}]))
    for name, value in (alarms or {}).items():
        overrides.setdefault(name, []).append(("thresholds", steps("text", red=value).build()))
        overrides[name].append(("custom.cellOptions", {"type": "color-text"}))
    for name, properties in overrides.items():
        panel.override_by_name(name, [DynamicConfigValue(id_val=key, value=value) for key, value in properties])
    return panel.span(WIDTH).height(height).with_target(Query(sql))


def trace(title: str, sql: str, description: str) -> dashboard.Panel:
    """Return a panel that draws the spans of one trace."""
    panel = dashboard.Panel().type("traces").title(title).description(description).datasource(SOURCE).unit("ms")
    return panel.span(WIDTH).height(16).with_target(Query(sql, "traces"))
