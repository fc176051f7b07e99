"""Scratch directories of benchmarks: kept after an exception, only their logs after a failed check, removed after success."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scratch as scratches
from benchmarks.scratch import exit_code, scratch

BENCHMARKS = Path(scratches.__file__).parent


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratches, "_KEPT", [])
    return tmp_path


def run(counts: dict[str, float] | None) -> Path:
    """Run a benchmark with these counts at its end. None: it raises."""
    with scratch("name") as directory:
        (directory / "run/logs").mkdir(parents=True)
        (directory / "run/logs/train.log").write_text("why it failed")
        (directory / "run/store.db").write_bytes(bytes(100))
        (directory / "run/newest").symlink_to(directory / "run/logs")
        (directory / "empty").mkdir()
        if counts is None:
            raise SystemExit(f"see {directory}/run/logs/train.log")
    exit_code(counts)
    return directory


def test_scratch_after_exception_keeps_everything(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(None)
    log = Path(str(stopped.value).removeprefix("see "))
    scratches._print_kept()  # pyright: ignore[reportPrivateUsage]
    assert (log.read_text(), (log.parents[1] / "store.db").exists()) == ("why it failed", True)
    assert str(log.parents[2]) in capsys.readouterr().err


def test_scratch_after_failed_check_keeps_logs(capsys: pytest.CaptureFixture[str]) -> None:
    directory = run({"lost": 1})
    scratches._print_kept()  # pyright: ignore[reportPrivateUsage]
    assert [path for path in directory.rglob("*") if path.is_file()] == [directory / "run/logs/train.log"]
    assert str(directory) in capsys.readouterr().err
    assert exit_code({"lost": 1}) == 1


def test_scratch_of_sound_benchmark_leaves_nothing(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run({"lost": 0, "double": 0})
    scratches._print_kept()  # pyright: ignore[reportPrivateUsage]
    assert (list(temporary.iterdir()), capsys.readouterr().err) == ([], "")
    assert exit_code({"lost": 0}) == 0


def test_benchmarks_have_one_home_of_scratch_directories() -> None:
    users = [file.name for file in BENCHMARKS.glob("*.py") if "tempfile" in file.read_text()]
    assert users == ["scratch.py"]
