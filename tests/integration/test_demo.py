"""`spangrad demo` as a user runs it: its report, its questions, and nothing left behind whenever it is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from spangrad.processes import Child, answers, free_ports, own_command, require_free_port, wait_until
from tests.support.pages import Visitor, browsers

pytestmark = pytest.mark.vllm


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "spangrad", "demo", "--directory", str(directory), *arguments]


@pytest.fixture(autouse=True)
def vllm_cache_of_demos(tmp_path: Path, vllm_cache: Path) -> None:
    """Have a demo in a directory of tmp_path find what another vLLM has left, as a user's second demo does."""
    (tmp_path / ".vllm-cache").symlink_to(vllm_cache)


def left_behind(directory: Path) -> list[str]:
    """Command lines of processes that know the run's directory."""
    lines: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(directory) in line:
                lines.append(line)
    return lines


def require_nothing_left(directory: Path) -> None:
    wait_until(lambda: left_behind(directory) == [], 60, f"the end of every process of {directory}")
    settings = tomllib.loads((directory / "spangrad.toml").read_text())
    for section, key in (
        ("store", "otlp_http_port"),
        ("store", "otlp_grpc_port"),
        ("store", "clickhouse_port"),
        ("gateway", "port"),
        ("engine", "port"),
    ):
        require_free_port("127.0.0.1", settings[section][key], f"{section}.{key}")


def check_accounts(report: dict[str, Any]) -> None:
    """Assert the relations between the counts of a demo's report that hold for every run, long or short."""
    assert report["spans"] > report["calls"] >= report["transitions"] > 0
    assert report["calls"] == report["transitions"] + report["dropped_calls"]
    assert report["policy_versions"] == report["steps"] + 1
    assert 0 < report["max_logprob_gap"] < 1e-3
    assert all(seconds > 0 for seconds in report["seconds"].values())
    assert 0 < report["idle"]["trainer"] < 1


@pytest.mark.parametrize("gateway", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_demo_short_run_accounts_for_every_call(tmp_path: Path, gateway: str) -> None:
    run = tmp_path / "demo"
    short = command(run, "--max-steps", "2", "--group-size", "4", "--gateway", gateway)
    demo = subprocess.run(short, capture_output=True, text=True, timeout=540, check=False, cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    report = json.loads((run / "report.json").read_text())
    check_accounts(report)
    assert (report["steps"], report["rollouts"], [step["version"] for step in report["curve"]]) == (2, 48, [0, 1])
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    require_nothing_left(run)
    engine_log = (run / "logs" / "engine.log").read_text()
    assert "(EngineCore pid=" in engine_log
    assert "(Worker pid=" not in engine_log, "the worker is a process of its own, which imports vLLM once more"
    assert "POST /v1/" not in engine_log, "it grows with the calls"
    lineage = "SELECT DISTINCT Version, SpanId FROM spangrad.lineage WHERE Version = (SELECT max(Version) FROM spangrad.policy_versions)"
    asked = [sys.executable, "-m", "spangrad", "sql", "--config", str(run / "spangrad.toml"), lineage]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    rows = [line.split() for line in answer.stdout.splitlines()[1:]]
    assert {version for version, _ in rows} == {"2"}
    by_step = [step["calls"] for step in report["curve"]]
    assert by_step == [None, None] if gateway == "off" else len(rows) == by_step[1]
    if gateway == "on":
        require_five_clicks_from_failure_to_version(run, tmp_path)


def require_five_clicks_from_failure_to_version(run: Path, directory: Path) -> None:
    """Open the page as README says after a demo; go from its overview to a rollout without reward, and to the version that it trained."""
    (port,) = free_ports(1)
    page_command = own_command("page", "--config", str(run / "spangrad.toml"), "--port", str(port))
    child = Child("spangrad page", page_command, directory / "page.log")
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), 60, "the page", [child])
        for browser in browsers():
            visitor = Visitor(browser, f"http://127.0.0.1:{port}", viewport={"width": 1200, "height": 800})
            page = visitor.open("/")
            page.get_by_role("link", name="Rollouts").first.click()
            page.get_by_role("button", name="Return").click()
            page.get_by_role("button", name="Return ↓").click()
            page.get_by_role("button", name="Return ↑").wait_for()  # the lowest come first
            page.locator("#list tbody tr:has(a[href^='/version?'])").first.locator("a").first.click()
            expect(page.locator("#facts")).to_contain_text(re.compile("reward = (0|-1)"))
            expect(page.locator("#why")).to_contain_text("It is trained: batch")
            page.locator("#facts a[href^='/version?']").click()
            expect(page.locator("h1")).to_contain_text("@")
            expect(page.locator("#groups summary")).not_to_have_count(0)
            visitor.close()
    finally:
        child.stop()


@pytest.mark.parametrize(
    "moment",
    [
        "starting engine",
        pytest.param("starting model", marks=pytest.mark.slow),
        pytest.param("step   0", marks=pytest.mark.slow),
        pytest.param("step   1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_demo_stopped_at_any_moment_leaves_nothing_behind(tmp_path: Path, moment: str, stop: signal.Signals) -> None:
    run, log = tmp_path / "demo", tmp_path / "log"
    with log.open("wb") as out:
        demo = subprocess.Popen(
            command(run, "--group-size", "4"),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        wait_until(lambda: moment in log.read_text() or demo.poll() is not None, 180, moment)
        assert demo.poll() is None, log.read_text()
        time.sleep(0.5)
        demo.send_signal(stop)
        code = demo.wait(60)
    finally:
        demo.kill()
    assert code == (-stop if stop is signal.SIGKILL else 130), log.read_text()
    assert "Traceback" not in log.read_text()
    require_nothing_left(run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "gateway"), [(0, "on"), (7, "on"), (11, "on"), (0, "off")])
def test_demo_reaches_success_bound(tmp_path: Path, seed: int, gateway: str) -> None:
    run = tmp_path / "demo"
    subprocess.run(command(run, "--seed", str(seed), "--gateway", gateway), timeout=1100, check=True, cwd=tmp_path)
    report = json.loads((run / "report.json").read_text())
    check_accounts(report)
    assert report["success_first"] <= 0.4
    assert report["success_last"] >= 0.9


BF16 = ("--set=trainer.dtype=bf16", "--set=engine.dtype=bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 7, 11])
@pytest.mark.parametrize("settings", [BF16, (*BF16, "--set=trainer.sampling.max_staleness=1")], ids=["bf16", "bf16-one-version-behind"])
def test_demo_in_bf16_with_default_alarms_learns(tmp_path: Path, seed: int, settings: tuple[str, ...]) -> None:
    run = tmp_path / "demo"
    subprocess.run(command(run, "--seed", str(seed), *settings), timeout=1100, check=True, cwd=tmp_path)
    report = json.loads((run / "report.json").read_text())
    assert report["calls"] == report["transitions"] + report["dropped_calls"]
    assert report["success_first"] <= 0.4
    assert report["success_last"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_with_remax_reaches_success_and_trains_no_greedy_rollout(tmp_path: Path) -> None:
    """Greedy rollouts through every part: an unmodified agent, whose calls the gateway makes greedy, and no batch that holds one."""
    run = tmp_path / "demo"
    remax = [f"--set=trainer.credit.{value}" for value in ("estimator=remax", "scheme=identical", "baseline=rollout")]
    subprocess.run(command(run, "--max-steps", "25", *remax), timeout=1100, check=True, cwd=tmp_path)
    report = json.loads((run / "report.json").read_text())
    check_accounts(report)
    assert report["success_first"] <= 0.4
    assert report["success_last"] >= 0.6
    trained = "countIf(RolloutId IN (SELECT RolloutId FROM spangrad.batches))"
    modes = f"SELECT Mode, max(Temperature), {trained} FROM spangrad.transitions GROUP BY Mode"
    asked = [sys.executable, "-m", "spangrad", "sql", "--config", str(run / "spangrad.toml"), modes]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    by_mode = {mode: facts for mode, *facts in (line.split() for line in answer.stdout.splitlines()[1:])}
    assert by_mode["greedy"] == ["0.0", "0"], "greedy, and in no batch"
    assert by_mode["train"][0] == "1.0"
