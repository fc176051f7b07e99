"""Dead letters: requests that were acknowledged and that no table takes, kept as files for an operator to inspect.

In: a body as it came. Out: a file that holds it, written to the operating system. Invariant: acknowledged spans are never discarded.

A file is an ExportTraceServiceRequest as OTLP/HTTP carries it, so that it can be sent again as it is.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def write_dead_letter(directory: Path, body: bytes) -> Path:
    """Write a body to a file; return its path. The same body twice is one file.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    directory.mkdir(exist_ok=True)
    file = directory / f"{sha256(body).hexdigest()[:32]}.otlp"
    part = file.with_suffix(".part")
    part.write_bytes(body)
    part.replace(file)
    return file
