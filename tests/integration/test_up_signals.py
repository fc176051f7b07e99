"""`spangrad up` when it is asked to end: by each signal, again while it ends, and with services that take their time."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import commands.services.up
from commands.services.down import down
from spangrad.errors import SpangradError
from spangrad.processes import wait_until
from spangrad.supervisor.run_directory import owner_of, status_of

UP = """
import fcntl, signal, sys, termios
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from commands.services import places, up
from spangrad.settings.sources import load_settings
from spangrad.supervisor.launcher import LocalProcess
from spangrad.supervisor.service import ServiceSpec

directory, mode = Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[3]))  # the tests may run under nohup
if mode == "terminal":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
DRAIN = '''
import pathlib, signal, sys, time
def drain(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    pathlib.Path(sys.argv[1], "asked").touch()
    while not pathlib.Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    pathlib.Path(sys.argv[1], "drained").touch()
    sys.exit()
signal.signal(signal.SIGTERM, drain)
pathlib.Path(sys.argv[1], "prepared").touch()
time.sleep(600)
'''
FAIL = '''
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "prepared").exists():
    time.sleep(0.01)
sys.exit(2)
'''
BLOCK = '''
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "prepared").exists():
    time.sleep(0.01)
status = pathlib.Path(sys.argv[1], "status.json.new")
while not status.is_dir():
    try:
        status.mkdir()
    except FileExistsError:
        pass
time.sleep(600)
'''

@contextmanager
def on_this_machine(settings, options, agent):
    services = [ServiceSpec("worker", (sys.executable, "-c", DRAIN, str(directory)), directory / "worker.log")]
    if mode == "blocking":
        services.append(ServiceSpec("page", (sys.executable, "-c", BLOCK, str(directory)), directory / "page.log", "http://127.0.0.1:9/"))
    if mode == "failing":
        services.append(ServiceSpec("page", (sys.executable, "-c", FAIL, str(directory)), directory / "page.log", "http://127.0.0.1:9/"))
    yield places.PlacedServices(settings, tuple(services), LocalProcess)

places.on_this_machine = on_this_machine
up._supervise(load_settings({"up.directory": str(directory)}, env={}), None, [], [], None)
"""


def command(directory: Path, mode: str = "", hangup: str = "SIG_DFL") -> list[str]:
    """Return the command line of `spangrad up` with a service that drains until there is a file `go`.

    The mode `failing` adds one that fails once the first is prepared; `blocking` one that lets no status be written from then on;
    `terminal` makes the standard input the terminal of the session.
    """
    return [sys.executable, "-c", UP, str(directory), mode, hangup]


@contextmanager
def up(directory: Path, mode: str = "", hangup: str = "SIG_DFL") -> Generator[subprocess.Popen[str]]:
    """Run `spangrad up` until the service is prepared, and to the end of the block at most."""
    words = command(directory, mode, hangup)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until((directory / "prepared").exists, 60, "the service")
            yield process
        finally:
            process.kill()
            (directory / "go").touch()


def state_of_worker(directory: Path) -> str | None:
    status = status_of(directory)
    return status["services"][0]["state"] if status and status["services"] else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_asked_to_end_shows_service_as_stopping_until_it_has_ended(tmp_path: Path, number: int) -> None:
    with up(tmp_path) as process:
        wait_until(lambda: state_of_worker(tmp_path) == "ready", 30, "the status")
        process.send_signal(number)
        wait_until((tmp_path / "asked").exists, 30, "the signal of the service")
        wait_until(lambda: state_of_worker(tmp_path) == "stopping", 30, "the status")
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    assert (tmp_path / "drained").exists()
    assert owner_of(tmp_path) is None


def test_down_ends_an_up_that_is_suspended(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with up(tmp_path) as process:
        wait_until(lambda: state_of_worker(tmp_path) == "ready", 30, "the status")
        process.send_signal(signal.SIGSTOP)
        down(set_=[f"up.directory={tmp_path}"])
        assert process.wait(60) == 0
    assert (tmp_path / "drained").exists()


def test_up_whose_terminal_is_closed_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    terminal, end = pty.openpty()
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(command(tmp_path, "terminal"), stdin=end, stdout=end, stderr=errors, start_new_session=True)
    os.close(end)
    try:
        wait_until((tmp_path / "prepared").exists, 60, "the service")
        wait_until(lambda: state_of_worker(tmp_path) == "ready", 30, "the status")
        os.close(terminal)
        assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "drained").exists()


def test_up_whose_status_cannot_be_written_ends_before_it_starts_services(tmp_path: Path) -> None:
    (tmp_path / "status.json.new").mkdir()
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}/status.json cannot be written (Is a directory). Free space, or name another directory." in done.stderr
    assert not (tmp_path / "worker.log").exists()
    assert owner_of(tmp_path) is None


def test_up_whose_status_cannot_be_written_any_more_before_it_is_ready_ends(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with up(tmp_path, "blocking") as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"{tmp_path}/status.json cannot be written" in output
    assert owner_of(tmp_path) is None


def test_up_detached_whose_status_cannot_be_written_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go").touch()
    monkeypatch.setattr("spangrad.processes.own_command", lambda *_: command(tmp_path, "blocking"))
    with pytest.raises(SystemExit) as ended:
        commands.services.up.up(detach=True, set_=[f"up.directory={tmp_path}"])
    assert ended.value.code == 1
    assert f"{tmp_path}/status.json cannot be written" in (tmp_path / "up.log").read_text()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(1)"])
def test_up_detached_whose_supervisor_ends_without_a_word_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("spangrad.processes.own_command", lambda *_: [sys.executable, "-c", f"import os, sys; {end}"])
    with pytest.raises(SpangradError, match=rf"ended with exit code -?\d, and {tmp_path}/up\.log does not tell why"):
        commands.services.up.up(detach=True, set_=[f"up.directory={tmp_path}"])


def test_up_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with up(tmp_path, hangup="SIG_IGN") as process:
        wait_until(lambda: state_of_worker(tmp_path) == "ready", 30, "the status")
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        assert state_of_worker(tmp_path) == "ready"


def test_up_interrupted_while_it_ends_after_a_failure_waits_for_services(tmp_path: Path) -> None:
    with up(tmp_path, "failing") as process:
        wait_until((tmp_path / "asked").exists, 30, "the signal of the service")
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=60)
        assert "page failed" in output
    assert (tmp_path / "drained").exists()
