"""The files that Grafana is provisioned with, and whether they are what the code makes.

In: the dashboards. Out: one JSON file each in `json/`, written as Grafana exports them. Invariant: the same code makes the same bytes.
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
    """A dashboard as the text of its file; its panels are numbered in their order."""
    made = DASHBOARDS[name]().build()
    for number, panel in enumerate(made.panels or [], 1):
        panel.id_val = number
    return json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def differing(directory: Path = DIRECTORY) -> list[str]:
    """Names of the files that are not what the code makes: changed, missing, or of no dashboard."""
    wanted = {f"{name}.json": render(name) for name in DASHBOARDS}
    there = {path.name: path.read_text() for path in directory.glob("*.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def write(directory: Path = DIRECTORY) -> None:
    """Write every dashboard's file."""
    directory.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (directory / f"{name}.json").write_text(render(name))
