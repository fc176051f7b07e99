"""OCI images as directories, unpacked once for each digest, without a daemon and without root.

In: an OCI layout, as a directory or a tar archive. Out: an `UnpackedImage`. Invariant: every blob has the digest by which the layout names
it; nothing is written outside of the image's directory, whatever names and links its layers hold; a directory that is named by a digest is
whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tarfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from spangrad.errors import JSON_ERRORS, SandboxError

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Search path of an image that sets none."""
_MOST_LINKS = 40
_CHUNK_BYTES = 2**20
_OWN = ("proc", "dev", "tmp")
"""Directories that each sandbox has of its own."""


@dataclass(frozen=True, slots=True)
class UnpackedImage:
    """An image on this machine's disk."""

    digest: str
    """Digest of its manifest: `sha256:` and hex."""
    root: Path
    variables: Mapping[str, str]
    """Environment variables that it sets."""
    interpreter: Path | None
    """Its `python3`, as programs in it see the path. None: it has none."""


class _Layout:
    """Blobs of an OCI layout."""

    def __init__(self, source: Path, archive: tarfile.TarFile | None) -> None:
        self._source = source
        self._archive = archive
        self._members = {str(PurePosixPath(member.name)): member for member in archive or ()}

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the layout."""
        try:
            if self._archive is None:
                return (self._source / name).open("rb")
            opened = self._archive.extractfile(self._members[name])
        except (OSError, KeyError):
            opened = None
        if opened is None:
            raise SandboxError(
                f"{self._source} holds no {name}: it is no OCI image layout. Write one, for example with "
                "`skopeo copy docker://NAME oci:DIRECTORY` or `podman save --format oci-archive -o FILE NAME`."
            )
        return opened

    @contextmanager
    def blob(self, digest: str) -> Generator[IO[bytes]]:
        """Open a blob that has the digest by which it is named."""
        kind, _, value = digest.partition(":")
        if kind != "sha256":
            raise SandboxError(f"{self._source} names {digest}, and only digests of sha256 are checked. Write it again.")
        with self.open(f"blobs/{kind}/{value}") as opened:
            hashed = hashlib.sha256()
            while data := opened.read(_CHUNK_BYTES):
                hashed.update(data)
            if (digest_read := hashed.hexdigest()) != value:
                raise SandboxError(f"{self._source} is damaged: blob {digest} has the digest sha256:{digest_read}. Write it again.")
            opened.seek(0)
            yield opened

    def read(self, digest: str) -> dict[str, Any]:
        with self.blob(digest) as opened:
            return json.load(opened)


@contextmanager
def _layout(source: Path) -> Generator[_Layout]:
    if source.is_dir():
        yield _Layout(source, None)
        return
    with ExitStack() as stack:
        try:
            layout = _Layout(source, stack.enter_context(tarfile.open(source)))
        except (OSError, tarfile.TarError) as error:
            raise SandboxError(
                f"the image {source} is neither a directory nor a whole tar archive ({error}). Name an OCI layout, or write it again."
            ) from None
        yield layout


def unpack(source: Path, cache: Path) -> UnpackedImage:
    """Return an image that is unpacked below `cache`, by its digest: at most once, however many processes ask.

    Raises:
        SandboxError: it is no OCI image for this machine, or damaged.
    """
    with _layout(source) as layout:
        digest = _manifest_digest(layout, source)
        manifest = layout.read(digest)
        config = layout.read(manifest["config"]["digest"]).get("config") or {}
        target = cache / digest.replace(":", "-")
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                partial = cache / f".{target.name}"
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                partial.mkdir()
                for layer in manifest["layers"]:
                    _apply(layout, layer, partial, source)
                partial.rename(target)
    variables = {"PATH": _PATH} | dict(str(entry).split("=", 1) for entry in config.get("Env") or [] if "=" in str(entry))
    return UnpackedImage(digest, target.resolve(), variables, _interpreter(target, variables))


def _interpreter(root: Path, variables: Mapping[str, str]) -> Path | None:
    for directory in variables["PATH"].split(":"):
        path = Path(directory) / "python3"
        if path.is_absolute() and os.path.lexists(_inside(root, _parts(directory), create=False) / "python3"):
            return path
    return None


def _manifest_digest(layout: _Layout, source: Path) -> str:
    """Return the digest of the manifest for this machine, through indexes of several platforms."""
    with layout.open("index.json") as opened:
        try:
            index: dict[str, Any] = json.load(opened)
        except JSON_ERRORS as error:
            raise SandboxError(f"{source} is damaged: index.json is no JSON ({error}). Write it again.") from None
    machine = _MACHINES.get(platform.machine(), platform.machine())
    while True:
        fitting = [entry for entry in index.get("manifests", []) if _fits(entry.get("platform"), machine)]
        if len(fitting) != 1:
            raise SandboxError(f"{source} holds {len(fitting)} images for {machine}, not one. Write a layout with one image.")
        (entry,) = fitting
        if not str(entry.get("mediaType", "")).endswith(("index.v1+json", "manifest.list.v2+json")):
            return entry["digest"]
        index = layout.read(entry["digest"])


def _fits(target: Mapping[str, Any] | None, machine: str) -> bool:
    return target is None or (target.get("os", "linux"), target.get("architecture", machine)) == ("linux", machine)


def _apply(layout: _Layout, layer: Mapping[str, Any], root: Path, source: Path) -> None:
    """Unpack a layer over those below it: first what it removes, then what it adds."""
    with layout.blob(layer["digest"]) as blob:
        try:
            for adding in (False, True):
                blob.seek(0)
                with tarfile.open(fileobj=blob, mode="r|*", bufsize=_CHUNK_BYTES) as archive:
                    for member in archive:
                        _put(archive, member, root) if adding else _remove_hidden(member, root)
        except tarfile.TarError as error:
            kind = layer.get("mediaType", "?")
            raise SandboxError(f"layer {layer['digest']} of {source} ({kind}) cannot be read: {error}. Write it with gzip.") from None


def _parts(name: str) -> list[str]:
    return [part for part in PurePosixPath(name).parts if part not in {"/", ".", ".."}]


def _remove_hidden(member: tarfile.TarInfo, root: Path) -> None:
    *above, name = _parts(member.name) or [""]
    if name == _OPAQUE:
        for path in _inside(root, above).iterdir():
            _remove(path)
    elif name.startswith(_WHITEOUT) and (hidden := _parts(name.removeprefix(_WHITEOUT))):
        _remove(_inside(root, above) / hidden[0])


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    """Write a member of a layer; devices and pipes, which need root, are left out."""
    *above, name = _parts(member.name) or [""]
    if not name or name.startswith(_WHITEOUT):
        return
    path = _inside(root, above) / name
    if not (member.isdir() and path.is_dir() and not path.is_symlink()):
        _remove(path)
    if member.isdir():
        path.mkdir(exist_ok=True)
        path.chmod(member.mode & 0o777 | 0o700)
    elif member.issym():
        path.symlink_to(member.linkname)
    elif member.islnk():
        *target_above, target = _parts(member.linkname)
        os.link(_inside(root, target_above) / target, path, follow_symlinks=False)
    elif (content := archive.extractfile(member)) is not None:
        with content, path.open("xb") as file:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        path.chmod(member.mode & 0o777 | 0o400)
        os.utime(path, (member.mtime, member.mtime))  # Python's compiled files name the time of their source


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _inside(root: Path, parts: Sequence[str], *, create: bool = True) -> Path:
    """Return a directory of an image, created if it is not there; links are followed as inside the image, and never leave it.

    Without `create`, the path of a directory that is not there is one where nothing is.

    Raises:
        SandboxError: links lead in a circle.
    """
    current, left, links = root, list(parts), 0
    while left:
        part = left.pop(0)
        if part == "..":
            current = current if current == root else current.parent
            continue
        path = current / part
        if path.is_symlink():
            if (links := links + 1) > _MOST_LINKS:
                raise SandboxError(f"links of the image lead in a circle at {path}. Write it again.")
            target = PurePosixPath(path.readlink())
            current = root if target.is_absolute() else current
            left = [part for part in target.parts if part != "/"] + left
            continue
        if not path.is_dir():
            if not create:
                return path
            path.unlink(missing_ok=True)
            path.mkdir(mode=0o755)
        current = path
    return current


def binds(root: Path, shown: Sequence[Path], inner: str = "/") -> Iterator[str]:
    """Yield bubblewrap's words that show an image's file system, with places for `shown` among it.

    Directories above something that is shown are made anew, and show what they hold in the image one by one: nothing can be mounted at a
    place that a read-only directory does not have.
    """
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        path = Path(inner, entry.name)
        if path in shown or (inner == "/" and entry.name in _OWN):
            continue
        if entry.is_symlink():
            yield from ("--symlink", str(Path(entry.path).readlink()), str(path))
        elif entry.is_dir() and any(path in inner.parents for inner in shown):
            yield from ("--perms", "0755", "--dir", str(path))
            yield from binds(Path(entry.path), shown, str(path))
        else:
            yield from ("--ro-bind", entry.path, str(path))
