"""`make setup` notices every way in which an environment is not whole."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
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
    pinned = environment.Environment("x", tmp_path / ".venv", (pins,), (), ("json", "sqlite3"))
    assert pinned.fault() == "is not there"
    venv.create(pinned.directory, with_pip=False)
    assert pinned.fault() == "was left half-made"
    pinned.stamp.write_text(pinned.fingerprint)
    assert pinned.fault() is None
    pins.write_text("a==2\n")
    assert pinned.fault() == "was made from other pins"
    pins.write_text("a==1\n")
    wanting = environment.Environment("x", pinned.directory, (pins,), (), ("json", "no_such_module", "nor_this"))
    assert wanting.fault() == "is broken: no_such_module nor_this is missing"
    pinned.python.unlink()
    assert str(pinned.fault()).startswith("is broken: its interpreter does not run")


def test_environment_held_waits_for_other_holder(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    pinned = environment.Environment("x", tmp_path / ".venv", (), (), ())
    order, waits = list[str](), threading.Event()

    def print_line(line: str, *, flush: bool) -> None:
        print(line, flush=flush)
        waits.set()

    def hold_too() -> None:
        with environment.held(pinned):
            order.append("second")

    # What is printed while `capfd` is read is lost.
    monkeypatch.setattr(environment, "print", print_line, raising=False)
    second = threading.Thread(target=hold_too)
    with environment.held(pinned):
        second.start()
        assert waits.wait(60)
        assert capfd.readouterr().out == "setup: .venv is in the hands of another command: waiting\n"
        order.append("first")
    second.join(10)
    assert order == ["first", "second"]


def test_environments_are_pinned_completely(environment: ModuleType) -> None:
    known = environment.environments("")
    assert sorted(known) == ["docs", "node", "server", "vllm"]
    locked = json.loads(known.pop("node").sources[0].read_text())["packages"]
    assert [name for name, package in locked.items() if name and not {"version", "integrity"} <= package.keys()] == []
    assert [name for name, package in locked.items() if "resolved" in package] == [], "packages come from the registry that npm is set to"
    for pinned in known.values():
        lines = [line for line in pinned.sources[0].read_text().splitlines() if line and not line.startswith("#")]
        assert [line for line in lines if "==" not in line] == []
        assert ("torch==2.13.0" in lines) == (pinned.name != "docs")
    assert "--hash=sha256:" in known["vllm"].sources[1].read_text()


def test_environment_torch_index_is_used_only_when_named(environment: ModuleType) -> None:
    address = "https://example.invalid/simple"
    for name in ("server", "vllm"):
        pinned = environment.environments(address)[name]
        assert pinned.installs[0] == ("torch==2.13.0", "--index-url", address)
    for pinned in environment.environments("").values():
        assert all("--index-url" not in install for install in pinned.installs)


def test_environment_error_while_making_fails_the_command(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "make", refused)
    monkeypatch.setattr(sys, "argv", ["environment.py"])
    with pytest.raises(PermissionError):
        environment.main()
