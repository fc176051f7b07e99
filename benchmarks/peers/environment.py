"""A peer's virtual environment: made once from complete pins, beside ours.

In: the name of a peer, and its pins in NAME.txt beside this file. Out: its directory of programs. Invariant: an environment is used only
when its stamp, written last, equals its pins.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from spangrad.errors import SpangradError

DIRECTORY = Path(__file__).parents[2] / ".venv-peers"


def peer_environment(name: str) -> Path:
    """Make the environment if it is not there.

    Returns:
        Its `bin` directory.

    Raises:
        SpangradError: pip could not install the pins.
    """
    pins = Path(__file__).with_name(f"{name}.txt")
    environment = DIRECTORY / name
    stamp = environment / ".made-from"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return environment / "bin"
    shutil.rmtree(environment, ignore_errors=True)
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / ".gitignore").write_text("*\n")
    print(f"making {environment.relative_to(DIRECTORY.parent)} from {pins.name}", file=sys.stderr, flush=True)
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", "--no-deps", "--requirement", str(pins)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SpangradError(f"the environment of {name} could not be made from {pins}:\n{done.stderr[-2000:]}")
    stamp.write_text(pins.read_text())
    return environment / "bin"


def peer_packages(name: str) -> Path:
    """Make the environment if it is not there, and return the directory of its packages.

    Raises:
        SpangradError: pip could not install the pins.
    """
    (packages,) = peer_environment(name).parent.glob("lib/python*/site-packages")
    return packages
