"""Images: unpacked once by digest, layers over one another, damage refused, nothing written outside."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from runner.sandboxes.images import binds, unpack
from spangrad.errors import SandboxError
from tests.support.images import layer, write_image


def texts(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_unpack_upper_layer_replaces_and_removes_files(tmp_path: Path) -> None:
    lower = {"etc/a": b"1", "etc/b": b"1", "opt/c": b"1", "opt/d": b"1", "was": b"file", "var/run": "/run", "usr/bin/python3": b""}
    upper = {"etc/.wh.a": b"", "etc/b": b"2", "opt/.wh..wh..opq": b"", "opt/e": b"2", "was/now": b"2", "var/run/pid": b"2", ".wh.gone": b""}
    digest = write_image(tmp_path / "image", [layer(lower), layer(upper)], ["PATH=/usr/bin:relative", "X=1=2", "nonsense"])
    image = unpack(tmp_path / "image", tmp_path / "cache")
    assert image.digest == digest
    assert texts(image.root) == {
        "etc/b": "2", "opt/e": "2", "run/pid": "2", "usr/bin/python3": "", "var/run": "-> /run", "was/now": "2",
    }  # fmt: skip
    assert image.variables == {"PATH": "/usr/bin:relative", "X": "1=2"}
    assert image.interpreter == Path("/usr/bin/python3")


def test_unpack_same_digest_of_directory_and_archive_is_unpacked_once(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [layer({"a": b"1"})])
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    first = unpack(tmp_path / "image", tmp_path / "cache")
    (first.root / "mark").touch()
    again = unpack(tmp_path / "image.tar", tmp_path / "cache")
    assert again == first
    assert (again.root / "mark").exists()
    assert again.interpreter is None


def test_unpack_hostile_names_and_links_stay_inside(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    entries = {
        "../../up": b"1", "/rooted": b"1", "out": str(outside), "out/through": b"1", "dots": "../../../..", "dots/above": b"1",
    }  # fmt: skip
    write_image(tmp_path / "image", [layer(entries), layer({"out/.wh..wh..opq": b"", "out/second": b"2"})])
    root = unpack(tmp_path / "image", tmp_path / "cache").root
    assert not list(outside.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "image", "cache"}
    assert {*texts(root)} == {"up", "rooted", "out", "dots", "above", f"{str(outside)[1:]}/second"}


@pytest.mark.parametrize("name", [".wh...", "a/.wh...", ".wh..", "a/.wh..", ".wh.", "a/.wh."])
def test_unpack_whiteouts_of_no_file_remove_nothing(tmp_path: Path, name: str) -> None:
    (other := tmp_path / "cache" / "other").mkdir(parents=True)
    write_image(tmp_path / "image", [layer({"a/kept": b"1"}), layer({name: b""})])
    assert texts(unpack(tmp_path / "image", tmp_path / "cache").root) == {"a/kept": "1"}
    assert other.is_dir()


def test_unpack_circle_of_links_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [layer({"a": "b", "b": "a", "a/c": b"1"})])
    with pytest.raises(SandboxError, match="lead in a circle"):
        unpack(tmp_path / "image", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("sha256") and path.is_dir()]


@pytest.mark.parametrize(
    ("entries", "path", "interpreter"),
    [
        ({"opt/python-3.12/bin/python3": b"", "opt/python": "/opt/python-3.12"}, "/opt/python/bin", "/opt/python/bin/python3"),
        ({"bin": "/usr/bin", "usr/bin/true": b""}, "/bin:/sbin", None),
    ],
)
def test_unpack_interpreter_behind_absolute_link_is_that_of_the_image(
    tmp_path: Path, entries: dict[str, bytes | str], path: str, interpreter: str | None
) -> None:
    write_image(tmp_path / "image", [layer(entries)], [f"PATH={path}"])
    image = unpack(tmp_path / "image", tmp_path / "cache")
    assert image.interpreter == (interpreter and Path(interpreter))
    assert not (image.root / "sbin").exists()


def test_unpack_archive_or_index_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [layer({"a": b"1" * 5000})])
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    for size in (700, 3000, (tmp_path / "image.tar").stat().st_size - 12_000):
        os.truncate(shutil.copy(tmp_path / "image.tar", tmp_path / "cut.tar"), size)
        with pytest.raises(SandboxError, match=r"(?s)cut\.tar is neither a directory nor a whole tar archive .*write it again\."):
            unpack(tmp_path / "cut.tar", tmp_path / "cache")
    os.truncate(tmp_path / "image/index.json", 20)
    with pytest.raises(SandboxError, match=r"image is damaged: index\.json is no JSON .*\. Write it again"):
        unpack(tmp_path / "image", tmp_path / "cache")


def test_unpack_damaged_or_foreign_images_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [layer({"a": b"1"})])
    blob = max((tmp_path / "image/blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    blob.write_bytes(blob.read_bytes() + b"x")
    with pytest.raises(SandboxError, match=r"is damaged: blob sha256:.* has the digest sha256:.*\. Write it again"):
        unpack(tmp_path / "image", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxError, match=r"holds no index.json: it is no OCI image layout\. Write one, for example"):
        unpack(tmp_path / "empty", tmp_path / "cache")
    (tmp_path / "file").write_text("no archive")
    with pytest.raises(SandboxError, match="is neither a directory nor a whole tar archive"):
        unpack(tmp_path / "file", tmp_path / "cache")
    write_image(tmp_path / "zstd", [b"\x28\xb5\x2f\xfd compressed otherwise"])
    with pytest.raises(SandboxError, match=r"cannot be read: .*\. Write it with gzip"):
        unpack(tmp_path / "zstd", tmp_path / "cache")


def test_binds_make_places_among_directories_of_an_image(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [layer({"home/user/own": b"1", "bin": "usr/bin", "usr/bin/x": b"1", "tmp/t": b"1", "proc": None})])
    root = unpack(tmp_path / "image", tmp_path / "cache").root
    assert [*binds(root, [Path("/home/user/task"), Path("/work/task")])] == [
        "--symlink", "usr/bin", "/bin", "--perms", "0755", "--dir", "/home", "--perms", "0755", "--dir", "/home/user",
        "--ro-bind", str(root / "home/user/own"), "/home/user/own", "--ro-bind", str(root / "usr"), "/usr",
    ]  # fmt: skip
