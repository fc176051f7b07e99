"""OCI images for tests, written as layouts: layers from files and links in memory, or of this machine's own programs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

Content = bytes | str | Path | None
"""A file's bytes, a link's target, a file of this machine, or None for a directory."""
PROGRAMS = ("bash", "sh", "cat", "ls", "true", "prlimit", "setpriv", "python3.11")
"""Programs of an image in which sandboxes work."""
_LIBRARY = Path("/usr/lib/python3.11")


def layer(entries: Mapping[str, Content]) -> bytes:
    """Return a layer, packed by gzip."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            data = content.read_bytes() if isinstance(content, Path) else content if isinstance(content, bytes) else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(written.getvalue(), 1)


def write_image(directory: Path, layers: Sequence[bytes], variables: Sequence[str] = ()) -> str:
    """Write a layout of one image, and return the digest of its manifest."""

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        path = directory / "blobs" / "sha256" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = blob(json.dumps({"architecture": machine, "os": "linux", "config": {"Env": list(variables)}}).encode())
    gzipped = "application/vnd.oci.image.layer.v1.tar+gzip"
    manifest = blob(
        json.dumps({"schemaVersion": 2, "config": config, "layers": [{"mediaType": gzipped, **blob(data)} for data in layers]}).encode()
    )
    ours = {"mediaType": "application/vnd.oci.image.manifest.v1+json", **manifest, "platform": {"os": "linux", "architecture": machine}}
    other = {**ours, "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "other"}}
    index = blob(json.dumps({"manifests": [other, ours]}).encode())
    entry = {"mediaType": "application/vnd.oci.image.index.v1+json", **index}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(manifest["digest"])


def system_files() -> dict[str, Content]:
    """Return what an image needs for a shell and Python, from this machine: empty where it has no Python of its own."""
    programs = [Path("/usr/bin") / name for name in PROGRAMS]
    if not all(program.exists() for program in programs) or not _LIBRARY.is_dir():
        return {}
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    libraries = {Path(path) for path in re.findall(r"(/\S+\.so[.\d]*)", listed)}
    modules = [path for path in _LIBRARY.rglob("*.py") if len(path.relative_to(_LIBRARY).parts) == 1]
    packages = ("encodings", "collections", "json", "importlib", "re", "urllib")
    modules += [path for name in packages for path in (_LIBRARY / name).glob("*.py")]
    entries: dict[str, Content] = {"usr": None, "usr/bin": None, "bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
    entries |= {f"usr/bin/{program.name}": program.resolve() for program in programs}
    entries |= {f"usr/{str(path).removeprefix('/').removeprefix('usr/')}": path.resolve() for path in libraries}
    entries |= {str(path).removeprefix("/"): path for path in (*modules, *(_LIBRARY / "lib-dynload").glob("*.so"))}
    return {**entries, "usr/bin/python3": "python3.11"}
