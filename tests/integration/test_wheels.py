"""The two wheels of the checkout: files of each, and that the agent's needs nothing but what it declares."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
AGENT = tomllib.loads((ROOT / "packaging" / "agent" / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = {"spangrad", "spangrad.agent.host", "spangrad.episode.agent", "span_processors.reward"} | {
    reference.partition(":")[0] for group in AGENT["entry-points"].values() for reference in group.values()
}
"""Modules that an agent's user, its host or OpenTelemetry imports."""
CLIENT = ("spangrad", "spangrad.client.client")
"""The import whose target the server's wheel brings, and the module that has it: `spangrad.Client`."""

IMPORTS = """
import importlib, json, sys
from importlib.machinery import PathFinder

given = json.load(sys.stdin)
site, allowed = tuple(given["site"]), set(given["allowed"])

class Refusing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path)
        if spec is not None and (spec.origin or "").startswith(site) and spec.origin not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}: {spec.origin} is no declared dependency", name=name)
        return None

sys.path[:] = [given["unpacked"], *(path for path in sys.path if path != given["checkout"])]
sys.meta_path.insert(0, Refusing)
for module in given["modules"]:
    importlib.import_module(module)
    assert sys.modules[module].__file__.startswith(given["unpacked"]), sys.modules[module].__file__
exec(given["program"])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by project."""
    directory = tmp_path_factory.mktemp("wheels")
    projects = {"agent": ROOT / "packaging" / "agent", "server": ROOT}
    builds = {name: WheelBuilder(str(root)).build(directory=str(directory), versions=["standard"]) for name, root in projects.items()}
    return {name: Path(next(iter(paths))) for name, paths in builds.items()}


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def module_path(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(node: ast.AST) -> Iterator[str]:
    """Names that a module imports when it runs, at its top or in a function; not those that only a type checker follows."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def import_closure(entry_points: set[str]) -> set[str]:
    """Paths of our modules that these modules import, directly or not."""
    waiting, seen = set(entry_points), set[str]()
    while waiting:
        module = waiting.pop()
        path = module_path(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        used = {name for name in imports(ast.parse(path.read_text())) if (module, name) != CLIENT}
        waiting |= used | ({module.rpartition(".")[0]} - {""})
    return {str(path.relative_to(ROOT)) for path in map(module_path, seen) if path}


def installed_files(requirements: list[str]) -> set[str]:
    """Files of the distributions that requirements name, and of those that these require."""
    waiting, seen, paths = [Requirement(text) for text in requirements], set[tuple[str, frozenset[str]]](), set[str]()
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # only on other systems
        paths |= {str(installed.locate_file(file)) for file in installed.files or []}
        needed = [Requirement(text) for text in installed.requires or []]
        waiting += [
            other
            for other in needed
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in (*requirement.extras, ""))
        ]
    return paths


def run_with_declared_dependencies(wheel: Path, directory: Path, program: str = "") -> subprocess.CompletedProcess[str]:
    """Import all modules of a wheel, then run a program, where nothing but its declared dependencies can be imported."""
    zipfile.ZipFile(wheel).extractall(directory)
    given = {
        "unpacked": str(directory),
        "checkout": str(ROOT),
        "site": [path for path in sys.path if path.endswith("-packages")],
        "allowed": sorted(installed_files(AGENT["dependencies"])),
        "modules": sorted(map(module_name, files(wheel))),
        "program": program,
    }
    return subprocess.run(
        [sys.executable, "-I", "-c", IMPORTS],
        cwd=directory,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_agent_wheel_files_are_the_import_closure_of_its_entry_points(wheels: dict[str, Path]) -> None:
    closure = import_closure(ENTRY_POINTS)
    assert sorted(files(wheels["agent"])) == sorted(closure)
    in_agent_folders = {
        str(path.relative_to(ROOT))
        for folder in ("spangrad/agent", "spangrad/episode", "span_processors")
        for path in (ROOT / folder).glob("*.py")
    }
    assert in_agent_folders <= closure, "all of these runs in an agent's process"


def test_wheels_share_no_file_and_miss_none(wheels: dict[str, Path]) -> None:
    agent, server = files(wheels["agent"]), files(wheels["server"])
    assert not agent & server
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "spangrad").rglob("*.py")} <= agent | server


def test_server_wheel_has_the_files_of_the_page(wheels: dict[str, Path]) -> None:
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "page").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {"page/static/page.css", "page/templates/base.html"} <= page <= files(wheels["server"])


def test_agent_wheel_imports_with_its_declared_dependencies_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    program = "try:\n    from spangrad import Client\nexcept ImportError as error:\n    print(error)"
    run = run_with_declared_dependencies(wheels["agent"], tmp_path, program)
    assert run.returncode == 0, run.stderr
    says = "spangrad.Client runs workers, which need the server's wheel (No module named 'spangrad.client'): "
    assert run.stdout == f"{says}pip install 'spangrad-server[runner]'.\n"


def test_run_with_declared_dependencies_refuses_undeclared_modules(wheels: dict[str, Path], tmp_path: Path) -> None:
    run = run_with_declared_dependencies(wheels["agent"], tmp_path, "import pydantic")
    assert "No module named 'pydantic'" in run.stderr
