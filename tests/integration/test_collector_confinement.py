"""The store's process opens no file but its own, whatever a statement is made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.servers import running_store, store_settings

CONFINE = """
import os, sys
from pathlib import Path
from collector.confinement import confine
mine, other = map(Path, sys.argv[1:])
print(confine(mine))
(mine / "a").mkdir()
(mine / "b").mkdir()
(mine / "a" / "x").write_text("mine")
print((mine / "a" / "x").rename(mine / "b" / "x").read_text())
try:
    print(other.read_text())
except PermissionError:
    print("refused")
try:
    (other.parent / "new").touch()
except PermissionError:
    print("refused")
print(Path("/proc/self/environ").read_bytes().split(b"SPANGRAD_STORE__TOKEN=")[1].split(b"\\0")[0])
print(os.environ["SPANGRAD_STORE__TOKEN"])
reading, writing = os.pipe()
with open(f"/dev/fd/{writing}", "w") as file:
    file.write("piped")
print(os.read(reading, 5).decode())
"""


def confined(tmp_path: Path) -> list[str]:
    """Return the lines that a process prints after it has confined itself to a directory beside which a file lies."""
    directory, other = tmp_path / "mine", tmp_path / "other"
    directory.mkdir()
    other.write_text("somebody else's")
    command = [sys.executable, "-c", CONFINE, str(directory), str(other)]
    done = subprocess.run(command, env={"SPANGRAD_STORE__TOKEN": "secret"}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(name="has_landlock", scope="module")
def _has_landlock(tmp_path_factory: pytest.TempPathFactory) -> None:
    if confined(tmp_path_factory.mktemp("asked"))[0] != "True":
        pytest.skip("this kernel has no Landlock, or it is switched off")


@pytest.mark.usefixtures("has_landlock")
def test_confined_process_reaches_only_its_directory_and_pipes(tmp_path: Path) -> None:
    assert confined(tmp_path) == ["True", "mine", "refused", "refused", "b''", "secret", "piped"]


@pytest.mark.usefixtures("has_landlock")
def test_confined_store_statement_with_concatenated_file_name_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    store = store_settings(tmp_path / "store")
    with running_store(store, tmp_path / "store.log"):
        client = connect(StoreSettings(url=store.url))
        structure = f"concat('b UInt8, a String DEFAULT arrayMap(fi', 'le, [''{secret}''])[1]')"
        asked = f"SELECT a FROM format(JSONEachRow, {structure}, '{{\"b\": 1}}')"
        with pytest.raises(Exception, match=r"Permission denied|errno: 13") as raised:
            client.query(asked)
        assert "sesame" not in str(raised.value)
        own = "concat('b UInt8, a String DEFAULT arrayMap(fi', 'le, [''owner''])[1]')"
        assert client.query(asked.replace(structure, own)).result_rows, "a file of its own is read: it is the place that is forbidden"
        client.close()
