"""`make setup` notices every way in which an environment is not whole."""

from __future__ import annotations

import importlib.util
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    path = Path(__file__).parents[2] / "packaging" / "environment.py"
    spec = importlib.util.spec_from_file_location("packaging_environment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_environment_fault_names_each_defect(environment: ModuleType, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1\n")
    made = environment.Environment("x", tmp_path / ".venv", (pins,), (), ("json", "sqlite3"))
    assert made.fault() == "is not there"
    venv.create(made.directory, with_pip=False)
    assert made.fault() == "was left half-made"
    made.stamp.write_text(made.fingerprint)
    assert made.fault() is None
    pins.write_text("a==2\n")
    assert made.fault() == "was made from other pins"
    pins.write_text("a==1\n")
    wanting = environment.Environment("x", made.directory, (pins,), (), ("json", "no_such_module", "nor_this"))
    assert wanting.fault() == "is broken: no_such_module nor_this is missing"
    made.python.unlink()
    assert str(made.fault()).startswith("is broken: its interpreter does not run")


def test_environments_are_pinned_completely(environment: ModuleType) -> None:
    known = environment.environments("")
    assert sorted(known) == ["docs", "server", "vllm"]
    for one in known.values():
        lines = [line for line in one.sources[0].read_text().splitlines() if line and not line.startswith("#")]
        assert [line for line in lines if "==" not in line] == []
        assert ("torch==2.13.0" in lines) == (one.name != "docs")
    assert "--hash=sha256:" in known["vllm"].sources[1].read_text()


def test_environment_torch_index_is_used_only_when_named(environment: ModuleType) -> None:
    address = "https://example.invalid/simple"
    for name in ("server", "vllm"):
        one = environment.environments(address)[name]
        assert one.installs[0] == ("torch==2.13.0", "--index-url", address)
    for one in environment.environments("").values():
        assert all("--index-url" not in install for install in one.installs)
