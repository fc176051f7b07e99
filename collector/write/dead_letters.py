"""Requests that were acknowledged and that no table takes: kept as files, for somebody to look at.

In: a body as it came. Out: a file that holds it, in the operating system's hands. Invariant: what was acknowledged is never thrown away.

A file is an ExportTraceServiceRequest as OTLP/HTTP carries it, so that it can be sent again as it is.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def put_aside(directory: Path, body: bytes) -> Path:
    """Keep a body; where it lies. The same body twice is one file.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    directory.mkdir(exist_ok=True)
    file = directory / f"{sha256(body).hexdigest()[:32]}.otlp"
    part = file.with_suffix(".part")
    part.write_bytes(body)
    part.replace(file)
    return file
