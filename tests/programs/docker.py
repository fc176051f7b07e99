"""A container engine for tests: a `docker` that records what it is told, and runs the command as a process of its own.

In: docker's arguments. Out: a line of `calls.jsonl` a call; a "container" that, like a real one, sees only the variables that were passed,
outlives the command line when that is killed, gets its SIGTERM, and ends by `rm --force`. Invariant: what a test leaves running is in
the directory's `containers`.

The image `missing` cannot be had (125). Any other one runs the command after it, in the directory where the engine was called.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def _containers(directory: Path) -> dict[str, dict[str, str]]:
    """Labels of the containers that are there, by name."""
    return {file.name: json.loads(file.read_text())["labels"] for file in (directory / "containers").iterdir()}


def _register(directory: Path, name: str, pid: int, labels: dict[str, str]) -> None:
    fresh = directory / f".{name}"
    fresh.write_text(json.dumps({"pid": pid, "labels": labels}))
    fresh.rename(directory / "containers" / name)


def _run(directory: Path, words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        flag = words.pop(0)
        if flag not in {"--rm", "--interactive"}:
            options.setdefault(flag, []).append(words.pop(0))
    image, *command = words
    if image == "missing":
        print("docker: no such image: missing", file=sys.stderr)
        return 125
    (name,) = options["--name"]
    environment = {key: os.environ[key] for key in options.get("--env", [])} | {"PATH": os.environ["PATH"]}
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except PermissionError:
        return 126
    except FileNotFoundError:
        return 127
    _register(directory, name, process.pid, dict(label.split("=", 1) for label in options["--label"]))
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))  # as --sig-proxy does
    code = process.wait()
    (directory / "containers" / name).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def _remove(directory: Path, names: list[str]) -> int:
    for name in names:
        file = directory / "containers" / name
        try:
            os.killpg(json.loads(file.read_text())["pid"], signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass
        file.unlink(missing_ok=True)
    return 0


def _list(directory: Path, words: list[str]) -> int:
    key, _, value = words[words.index("--filter") + 1].removeprefix("label=").partition("=")
    for name, labels in _containers(directory).items():
        if key in labels and value in ("", labels[key]):
            print(name, labels["spangrad.worker"])
    return 0


def main(directory: Path, words: list[str]) -> int:
    with (directory / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[0] == "run":
        return _run(directory, words[1:])
    if words[:3] == ["rm", "--force", "--volumes"]:
        return _remove(directory, words[3:])
    if words[:3] == ["ps", "--all", "--no-trunc"]:
        return _list(directory, words[3:])
    print(f"docker: unknown: {words}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
