"""Files and directories of exports, which replace no others, and tools that share a column of Parquet."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spangrad.errors import BuilderError
from transition_builder.export.files import CARD_MARK, made_whole
from transition_builder.export.writers.columns import fitting_tools


def test_fitting_tools_keeps_unchanged_columns_only() -> None:
    first, other = json.dumps([{"name": "a", "p": {"x": "string"}}]), json.dumps([{"name": "b", "p": {"y": "string"}}])
    clashing = json.dumps([{"name": "c", "p": "text"}])
    assert fitting_tools({first: 1, other: 2, clashing: 1, "": 5})[0] == {"", other}
    assert fitting_tools({"": 5}) == ({""}, None)


def test_fitting_tools_converts_each_list_once_where_types_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    array, converted = pa.array, list[int]()

    def counted(values: list[Any], *arguments: Any) -> Any:
        converted.append(len(values))
        return array(values, *arguments)

    monkeypatch.setattr(pa, "array", counted)
    lists = {json.dumps([{"name": f"tool-{number}", "p": {"x": number % 3 or None}}]): 1 for number in range(400)}
    assert fitting_tools(lists)[0] == {"", *lists}
    assert sum(converted) < 2 * len(lists)


def test_fitting_tools_list_that_changes_an_earlier_one_does_not_fit() -> None:
    precise, double, huge, empty = (json.dumps([{"x": value}]) for value in (2**53 + 1, 1.5, 2**70, None))
    fitting, column_type = fitting_tools({empty: 9, precise: 8, huge: 7, double: 6})
    assert (fitting, column_type) == ({"", empty, precise}, pa.list_(pa.struct([("x", pa.int64())])))
    assert fitting_tools({double: 2, precise: 1})[0] == {"", double}


@pytest.mark.parametrize("parameters", [{"type": "object", "properties": {}}, {"required": [], "x": None, "y": {"z": [{}]}}])
def test_fitting_tools_type_can_be_written_as_parquet(tmp_path: Path, parameters: dict[str, Any]) -> None:
    """A tool without parameters is a struct without fields, which Parquet does not hold."""
    plain, bare = (json.dumps([{"name": name, "p": p}]) for name, p in (("a", {"type": "object", "required": []}), ("b", parameters)))
    fitting, column_type = fitting_tools({bare: 2, plain: 1})
    assert fitting == {"", plain}
    table = pa.table({"tools": pa.array([json.loads(plain), []], column_type)})
    pq.write_table(table, tmp_path / "tools.parquet")
    assert pq.read_table(tmp_path / "tools.parquet").column("tools").to_pylist() == [json.loads(plain), []]


def write_to(out: Path, *, directory: bool, text: str = "new") -> None:
    """Write an export to a place with --force."""
    with made_whole(out, force=True, directory=directory) as path:
        if directory:
            (path / "data").mkdir()
            (path / "data" / f"{text}.parquet").touch()
            path /= "README.md"
        path.write_text(f"{CARD_MARK}: {text}")


def test_made_whole_with_force_replaces_files_and_exports(tmp_path: Path) -> None:
    file, export, link = tmp_path / "file", tmp_path / "export", tmp_path / "link"
    export.mkdir()
    link.symlink_to(export)
    for text in ("first", "second"):
        write_to(file, directory=False, text=text)
        write_to(link, directory=True, text=text)
    assert file.read_text() == (link / "README.md").read_text() == f"{CARD_MARK}: second"
    assert (link.is_symlink(), [shard.name for shard in (export / "data").iterdir()]) == (True, ["second.parquet"])
    assert {path.name for path in tmp_path.iterdir()} == {"file", "export", "link"}


def test_made_whole_with_force_keeps_mode_of_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o755)
    with made_whole(tmp_path / "out", force=True, directory=True):
        pass
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_made_whole_with_force_replaces_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, own, more, file = (tmp_path / name for name in ("runs", "own", "more", "file"))
    for directory in (runs, own, more):
        directory.mkdir()
    (runs / "ledger.sqlite").touch()
    write_to(own / "export", directory=True)
    (own / "export" / "README.md").write_text("my own data")
    write_to(more / "export", directory=True)
    (more / "export" / "data" / "notes.txt").touch()
    file.touch()
    monkeypatch.chdir(runs)
    before = sorted(tmp_path.rglob("*"))
    for out in (runs, Path(), Path("..")):
        with pytest.raises(BuilderError, match=r"is no file, as this format writes\. Name another place"):
            write_to(out, directory=False)
    for out in (runs, Path(), own / "export", more / "export"):
        with pytest.raises(BuilderError, match=r"holds files that no export wrote\. Name another place"):
            write_to(out, directory=True)
    with pytest.raises(BuilderError, match=r"file is no directory, as this format writes\."):
        write_to(file, directory=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_made_whole_with_remains_of_killed_export_raises_and_removes_them(tmp_path: Path) -> None:
    """A container gives each of its exports the same process id."""
    remains = tmp_path / f".out.{os.getpid()}.part" / "data" / "train-00007.parquet"
    remains.parent.mkdir(parents=True)
    remains.touch()
    with pytest.raises(BuilderError, match="out cannot be written"), made_whole(tmp_path / "out", force=False, directory=True):
        pass
    assert list(tmp_path.iterdir()) == []
    with made_whole(tmp_path / "out", force=False, directory=True) as path:
        assert list(path.iterdir()) == []


def test_made_whole_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def half(directory: bool, error: type[BaseException]) -> None:
        with made_whole(tmp_path / "a" / "out", force=False, directory=directory) as path:
            (path / "x" if directory else path).write_text("half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        half(False, KeyboardInterrupt)
    with pytest.raises(RuntimeError):
        half(True, RuntimeError)
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "file").touch()
    with (
        pytest.raises(BuilderError, match=r"out cannot be written \(.*\)\. Name another place with --out\."),
        made_whole(tmp_path / "file" / "out", force=False, directory=False),
    ):
        pass
