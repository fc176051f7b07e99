"""docs/guides/queue.md: its commands run as they stand, and answer what the page says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runners import queue_settings, serving

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "queue.md"


async def test_queue_docs_commands_answer_as_page_shows(tmp_path: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not here: install it")
    blocks = re.findall(r"^```console\n(curl .*?)^```", PAGE.read_text(), re.M | re.S)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    ran = 0
    async with serving(settings):
        for block in blocks:
            for console in re.split(r"^(?=curl )", block, flags=re.M)[1:]:
                command, answer = re.match(r"(?s)(.*?'|[^\n]*)\n(.*)", console).groups()  # type: ignore[union-attr]
                done = await asyncio.to_thread(
                    subprocess.run,
                    ["bash", "-c", command],
                    env={"QUEUE": settings.queue.url or ""},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert (done.returncode, done.stderr) == (0, ""), command
                if answer.startswith("{"):
                    assert json.loads(done.stdout) == json.loads(answer), command
                else:
                    assert done.stdout == answer, command
                ran += 1
    assert ran == PAGE.read_text().count("curl -fsS")
