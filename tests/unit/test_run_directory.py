"""A run's directory: its owner, which `spangrad down` ends, and the status that it publishes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from commands.services.down import down
from commands.services.status_screen import StatusScreen
from spangrad.errors import SpangradError
from spangrad.leases import this_process
from spangrad.supervisor.run_directory import LOCK, STATUS, RunDirectory, owner_of, status_of


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Process and number of each signal, none of which is sent."""
    sent: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    return sent


def down_of(directory: Path, owner: str) -> None:
    """Call `spangrad down` while another process owns the directory."""
    with RunDirectory(directory):
        (directory / LOCK).write_text(owner)
        down(set_=[f"up.directory={directory}"])


def test_down_of_run_on_another_host_names_it(tmp_path: Path, signals: list[tuple[int, int]]) -> None:
    host, pid, started, table = this_process().split(" ")
    for owner in (f"gpu-7 {pid} {started} {table}", f"{host} {pid} {started} another-container"):
        with pytest.raises(SpangradError, match=rf"is process {pid} on {owner.split(' ')[0]}, on another machine.* Call this there"):
            down_of(tmp_path, owner)
    assert signals == []


def test_down_leaves_a_process_with_the_number_of_an_earlier_owner(tmp_path: Path, signals: list[tuple[int, int]]) -> None:
    host, pid, _, table = this_process().split(" ")
    with pytest.raises(SpangradError, match=f"no `spangrad up` runs in {tmp_path}"):
        down_of(tmp_path, f"{host} {pid} 1 {table}")
    assert signals == []


def test_down_of_run_of_another_user_names_it(tmp_path: Path, signals: list[tuple[int, int]]) -> None:
    with pytest.raises(SpangradError, match=rf"process {os.getpid()} on .* belongs to another user\. Call this as that user"):
        down_of(tmp_path, this_process())
    assert [pid for pid, _ in signals] == [os.getpid()]


def test_owner_of_directory_is_a_holder_until_it_leaves(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        assert owner_of(tmp_path) == this_process()
    assert owner_of(tmp_path) is None


def test_owner_of_directory_of_another_user_raises_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SpangradError, match=rf"{tmp_path} cannot be read \(Permission denied\): .* as that user, or set up\.directory"):
        owner_of(tmp_path)


def test_run_directory_whose_owner_is_looked_up_meanwhile_is_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spangrad.supervisor.run_directory._LOCK_SECONDS", 30.0)
    (tmp_path / LOCK).write_text(this_process())
    reader = (tmp_path / LOCK).open()
    fcntl.flock(reader, fcntl.LOCK_SH)
    release = threading.Timer(0.15, reader.close)
    release.start()
    with RunDirectory(tmp_path):
        assert owner_of(tmp_path) == this_process()
    release.join()


def test_status_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDirectory(tmp_path) as run:
        for _ in range(2):
            run.publish({"ready": False})
            (tmp_path / "status.json.new").symlink_to("/dev/full")
            run.publish({"ready": True})
            run.publish({"ready": True})
            assert json.loads((tmp_path / "status.json").read_text()) == {"ready": False}
            (tmp_path / "status.json.new").unlink()
    assert [record.message for record in caplog.records] == [
        f"the status in {tmp_path}/status.json cannot be written (No space left on device), and stays as it was"
    ] * 2


@pytest.mark.parametrize("place", ["host", "boot"])
def test_run_directory_services_of_another_boot_or_host_are_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("spangrad.supervisor.run_directory.PREDECESSOR_SECONDS", 0.2)
    host, pid, started, table = this_process().split(" ")
    holder = f"gpu-7 {pid} {started} {table}" if place == "host" else f"{host} {pid} {started} 7e1b/{table.partition('/')[2]}"
    (tmp_path / STATUS).write_text(json.dumps({"services": [{"name": "store", "holder": holder, "grace_seconds": 0}]}))
    with RunDirectory(tmp_path):
        assert status_of(tmp_path) == {"services": []}


def test_run_directory_whose_status_a_power_failure_emptied_is_entered(tmp_path: Path) -> None:
    (tmp_path / STATUS).touch()
    with RunDirectory(tmp_path):
        assert status_of(tmp_path) == {"services": []}


def test_run_directory_on_full_disk_names_its_file(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    with (
        pytest.raises(SpangradError, match=rf"{tmp_path}/{LOCK} cannot be written \(.*Free space, or name another"),
        RunDirectory(tmp_path),
    ):
        pass


class FullDisk(io.StringIO):
    """Standard output on a disk that has no space left."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_status_event_on_full_disk_is_lost_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    StatusScreen(tmp_path).event("starting store")


def test_status_screen_without_terminal_names_reason_of_each_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    status = [
        {"name": "store", "state": "ready", "obstacle": "", "log": "store.log"},
        {"name": "engine", "state": "starting", "obstacle": "", "log": "engine.log"},
        {"name": "gateway", "state": "starting", "obstacle": "no engine answers", "log": "gateway.log"},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commands.services.status_screen.time.monotonic", lambda: clock[-1])
        screen = StatusScreen(tmp_path)
        for seconds, shown in ((109.0, status), (111.0, status), (115.0, status), (121.5, status), (140.0, status[:1])):
            clock.append(seconds)
            screen.show(shown, None)
    assert capsys.readouterr().out.splitlines() == [
        "   11.0 s  waiting for engine: it does not answer yet; its log: engine.log",
        "   11.0 s  waiting for gateway: no engine answers",
        "   21.5 s  waiting for engine, gateway",
    ]
