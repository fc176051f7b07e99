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
SmallData = tuple[Sequence[Row], Sequence[Row], dict[str, Any]]
"""Rows to train on, rows held out, and values of the recipe's own options."""


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
    inputs: Callable[[Iterable[Row], argparse.Namespace, Path], list[dict[str, Any]]]
    """(rows, arguments, directory of the run) -> inputs of the agent, with what its evaluator needs. Writes what the agent needs."""
    small: Callable[[Path], SmallData]
    """Returns small data in the data set's schema; may write files into a directory."""
    services: Callable[[Sequence[Row], argparse.Namespace, Path], tuple[Sequence[ServiceSpec], Mapping[str, str]]] | None = None
    """(all rows, arguments, directory of the run) -> services beside spangrad's, and variables that the agent finds in its environment."""
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Adds the recipe's own options."""
    parser: str = ""
    """Tool parser of vLLM for the tiny model. Empty: the agent calls no tools."""

    def prepare(self, arguments: argparse.Namespace, directory: Path) -> Prepared:
        """Read the data sets, and return what a run in this directory needs."""
        rows, inputs = list[Row](), list[list[dict[str, Any]]]()
        for source in (arguments.train, arguments.held_out):
            part = rows_of(source, arguments.rows)
            inputs.append(self.inputs(part, arguments, directory))
            rows += part
        services, env = self.services(rows, arguments, directory) if self.services else ((), {})
        return Prepared(*inputs, services=services, env=env)

    def write_small(self, directory: Path) -> dict[str, Any]:
        """Write small data into a directory; return the values of the arguments that name it."""
        train, held_out, values = self.small(directory)
        for name, rows in (("train", train), ("held_out", held_out)):
            values[name] = str(directory / f"{name}.jsonl")
            write_rows(Path(values[name]), rows)
        return values

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
