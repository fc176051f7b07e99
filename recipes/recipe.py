"""A recipe, its settings in layers, and its data.

In: files of settings (those of all recipes, the recipe's, then the method's, then those that fit a model's size), and rows of a public
data set. Out: settings, and files of tasks. Invariant: a later layer replaces values of an earlier one; arguments of the engine add up.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spangrad.client.task_files import read_tasks
from spangrad.supervisor.service import ServiceSpec

CHECKOUT = Path(__file__).resolve().parents[1]
FILES = CHECKOUT / "recipes"
Method = Literal["full", "lora"]
METHODS: tuple[Method, ...] = ("full", "lora")
SIZES = ("0.5b", "7b", "32b")
"""Sizes of models that there are settings for."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A run's tasks, and what it needs beside spangrad's services."""

    train: Sequence[Row]
    """Inputs of the agent, with what its evaluator needs."""
    held_out: Sequence[Row]
    services: Sequence[ServiceSpec] = ()
    env: Mapping[str, str] | None = None
    """Variables that the agent finds in its environment."""


@dataclass(frozen=True)
class Recipe:
    """An agent, its data and its settings, which lie in the folder of its name."""

    name: str
    train: str
    """Data set: `hf:OWNER/NAME[:[CONFIG:]SPLIT]`, or a file or directory that `spangrad run --tasks` reads."""
    held_out: str
    prepare: Callable[[argparse.Namespace, Path], Prepared]
    """(arguments, directory of the run) -> its tasks. Reads the data by `rows_of(arguments.train)`, and writes what the agent needs."""
    write_small: Callable[[Path], dict[str, Any]]
    """Writes small data in the data set's schema into a directory; returns the values of the arguments that name it."""
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Adds the recipe's own options."""
    parser: str = ""
    """Tool parser of vLLM for the tiny model. Empty: the agent calls no tools."""

    @property
    def agent(self) -> tuple[str, ...]:
        """Arguments of `spangrad run` that name the agent."""
        module = f"recipes.{self.name}"
        return ("--agent", f"{module}.agent:agent", "--evaluator", f"{module}.data:evaluate", "--directory", str(CHECKOUT))


def rows_of(source: str, at_most: int | None = None) -> list[Row]:
    """Return rows of a data set.

    Raises:
        AgentError: the data set cannot be loaded, or the library that loads it is missing.
    """
    return [task.input for task in read_tasks(source)[:at_most] if isinstance(task.input, Mapping)]


def write_tasks(path: Path, name: str, inputs: Iterable[Row]) -> None:
    """Write tasks, a line of JSON each."""
    write_rows(path, ({"task_id": f"{name}-{number}", "input": dict(row)} for number, row in enumerate(inputs)))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, a line of JSON each."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def layers(recipe: str, size: str, method: Method) -> list[Path]:
    """Return the settings files of a recipe, each stronger than the one before."""
    return [FILES / file for file in ("base.toml", f"{recipe}/spangrad.toml", f"{method}.toml", f"models/{size}-{method}.toml")]


def merged(files: Sequence[Path], *more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of several files and tables, by section."""
    tables: dict[str, Any] = {}
    for layer in (*(tomllib.loads(file.read_text()) for file in files), *more):
        _put(tables, layer)
    return tables


def _put(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _put(below[key], value)
        elif key == "extra_args":
            below[key] = [*below.get(key, []), *value]
        else:
            below[key] = dict(value) if isinstance(value, Mapping) else value
