"""OpenEnv's server of the maze, in a process and a virtual environment of its own.

In: a directory for its log. Out: its URL. Invariant: our processes import nothing of OpenEnv, and its process nothing of ours.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.environment import peer_environment
from spangrad.processes import Child, answers, free_ports, wait_until

HERE = Path(__file__).parent
START_SECONDS = 120


@contextmanager
def serving(logs: Path) -> Generator[str]:
    """Serve the maze; return the URL.

    Args:
        logs: directory of the server's log.
    """
    python = peer_environment("openenv") / "python"
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "uvicorn", "openenv_app:app", "--port", str(port), "--app-dir", str(HERE), "--log-level", "warning"]
    child = Child("the maze", command, logs / "maze.log", {"PYTHONDONTWRITEBYTECODE": "1"}, inherit_settings=False)
    try:
        wait_until(lambda: answers(f"{url}/health"), START_SECONDS, "the maze", [child])
        yield url
    finally:
        child.stop()
