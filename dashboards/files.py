"""The dashboards' files that Grafana is provisioned with.

In: the dashboards. Out: one JSON file for each in `json/`, formatted as Grafana exports it. Invariant: the same code makes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import lineage, rollouts, training

DIRECTORY = Path(__file__).parent / "json"
DASHBOARDS: Mapping[str, Callable[[], Dashboard]] = {"training": training.build, "rollouts": rollouts.build, "lineage": lineage.build}


def render(name: str) -> str:
    """Return the text of a dashboard's file; the ids of its panels are their positions, from 1."""
    dashboard = DASHBOARDS[name]().build()
    for number, panel in enumerate(dashboard.panels or [], 1):
        panel.id_val = number
    return json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write() -> None:
    """Write every dashboard's file."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (DIRECTORY / f"{name}.json").write_text(render(name))
