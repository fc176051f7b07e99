"""The kinds of panels that the dashboards have, each with the query that it can draw.

In: a title, SQL, what it means. Out: panels of the foundation SDK. Invariant: every panel has a description and a unit, and asks in the
format that its kind draws: series by time as time series, everything else as a table, spans as a trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from grafana_foundation_sdk.builders import barchart, common, dashboard, stat, table, timeseries, trend
from grafana_foundation_sdk.cog import builder, variants
from grafana_foundation_sdk.models import common as looks
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
"""Columns of Grafana's grid."""

Panel: TypeAlias = builder.Builder[models.Panel]
"""Of any kind."""
Links: TypeAlias = Mapping[str, tuple[str, str]]
"""By column: a link's title and where it leads."""


class Format(IntEnum):
    """How the data source shapes an answer, by its own numbers."""

    TIME_SERIES = 0
    TABLE = 1
    TRACE = 3


_QUERY_TYPE = {Format.TIME_SERIES: "timeseries", Format.TABLE: "table", Format.TRACE: "traces"}


class Query(variants.Dataquery, builder.Builder[variants.Dataquery]):
    """A panel's question, as version 4 of the ClickHouse data source stores it."""

    def __init__(self, sql: str, format_: Format) -> None:
        self._sql = sql
        self._format = format_

    def build(self) -> variants.Dataquery:
        """Itself: there is nothing left to choose."""
        return self

    def to_json(self) -> dict[str, object]:
        """What stands in the dashboard's file."""
        return {
            "datasource": SOURCE,
            "editorType": "sql",
            "format": int(self._format),
            "pluginVersion": "4.0.0",
            "queryType": _QUERY_TYPE[self._format],
            "rawSql": inspect.cleandoc(self._sql),
            "refId": "A",
        }


def steps(base: str, **from_: float) -> dashboard.ThresholdsConfig:
    """Colours from a value on: `steps("green", red=0.01)`."""
    found = [Threshold(value=None, color=base), *(Threshold(value=value, color=color) for color, value in from_.items())]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)


_Curve = TypeVar("_Curve", trend.Panel, timeseries.Panel)


def _curve(panel: _Curve, alarm: float | None) -> _Curve:
    """What curves over versions and curves over time have in common."""
    panel.draw_style(looks.GraphDrawStyle.LINE).line_width(2).fill_opacity(8).show_points(looks.VisibilityMode.AUTO).point_size(5)
    panel.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    panel.legend(
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.TABLE)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "min", "max"])
    )
    if alarm is not None:
        panel.thresholds(steps("transparent", red=alarm))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(looks.GraphTresholdsStyleMode.LINE_AND_AREA))
    return panel


def over_versions(
    title: str,
    sql: str,
    unit: str,
    description: str,
    *,
    alarm: float | None = None,
    at_most: float | None = None,
    logarithmic: bool = False,
    stacked: bool = False,
) -> trend.Panel:
    """Curves over policy versions: the first column is `version`, the others are numbers."""
    panel = _curve(trend.Panel(), alarm).x_field("version").title(title).unit(unit).description(description).datasource(SOURCE)
    if at_most is not None:
        panel.min(0).max(at_most)
    if logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(looks.ScaleDistribution.LOG).log(10))
    if stacked:
        panel.draw_style(looks.GraphDrawStyle.BARS).fill_opacity(70).line_width(0)
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    return panel.span(12).height(8).with_target(Query(sql, Format.TABLE))


def over_time(
    title: str, sql: str, unit: str, description: str, *, at_most: float | None = None, stacked: bool = False, signed: bool = False
) -> timeseries.Panel:
    """Curves over time: a column `time`, at most one of names, and numbers; below 0 only if they are `signed`."""
    panel = _curve(timeseries.Panel(), None).title(title).unit(unit).description(description).datasource(SOURCE)
    if not signed:
        panel.min(0)
    if at_most is not None:
        panel.max(at_most)
    if stacked:
        panel.draw_style(looks.GraphDrawStyle.BARS).fill_opacity(70).line_width(0)
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    return panel.span(12).height(8).with_target(Query(sql, Format.TIME_SERIES))


def figure(
    title: str, sql: str, unit: str, description: str, *, thresholds: dashboard.ThresholdsConfig | None = None, decimals: int | None = None
) -> stat.Panel:
    """One number."""
    panel = stat.Panel().title(title).unit(unit).description(description).datasource(SOURCE)
    panel.thresholds(thresholds or steps("blue")).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    panel.color_mode(looks.BigValueColorMode.VALUE).graph_mode(looks.BigValueGraphMode.NONE).text_mode(looks.BigValueTextMode.VALUE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if decimals is not None:
        panel.decimals(decimals)
    return panel.height(4).with_target(Query(sql, Format.TABLE))


def beside(figures: Sequence[stat.Panel]) -> list[stat.Panel]:
    """Figures in one line, of equal width."""
    return [panel.span(WIDTH // len(figures)) for panel in figures]


def bars(title: str, sql: str, unit: str, description: str, *, name: str) -> barchart.Panel:
    """A bar for each row: the column `name` has the words, the others are numbers."""
    panel = barchart.Panel().title(title).unit(unit).description(description).datasource(SOURCE).x_field(name).min(0)
    panel.orientation(looks.VizOrientation.HORIZONTAL).show_value(looks.VisibilityMode.AUTO).bar_width(0.8).fill_opacity(70)
    panel.legend(common.VizLegendOptions().show_legend(False).display_mode(looks.LegendDisplayMode.HIDDEN))
    return panel.span(12).height(8).with_target(Query(sql, Format.TABLE))


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
    """A table. `units`, `links`, `alarms` (red from a value on) speak of its columns by name."""
    panel = table.Panel().title(title).description(description).datasource(SOURCE).unit("string")
    found: dict[str, list[tuple[str, Any]]] = {name: [("unit", unit)] for name, unit in units.items()}
    for name, (text, url) in (links or {}).items():
        found.setdefault(name, []).append(("links", [{"title": text, "url": url, "targetBlank": False}]))
    for name, value in (alarms or {}).items():
        found.setdefault(name, []).append(("thresholds", steps("text", red=value).build()))
        found[name].append(("custom.cellOptions", {"type": "color-text"}))
    for name, properties in found.items():
        panel.override_by_name(name, [DynamicConfigValue(id_val=key, value=value) for key, value in properties])
    return panel.span(WIDTH).height(height).with_target(Query(sql, Format.TABLE))


def trace(title: str, sql: str, description: str) -> dashboard.Panel:
    """The spans of one trace, as Grafana draws traces."""
    panel = dashboard.Panel().type("traces").title(title).description(description).datasource(SOURCE).unit("ms")
    return panel.span(WIDTH).height(16).with_target(Query(sql, Format.TRACE))
