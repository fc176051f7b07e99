"""`spangrad prompt put` as a user types it, over a queue's server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commands.prompts import prompt
from spangrad.agent.prompt_store import PromptStore
from spangrad.errors import PromptError
from tests.support.runners import queue_server, queue_settings

TEXT = "Be kind.\r\n\r\nÀ bientôt [/INST]\n"


def test_prompt_put_from_file_or_stdin_keeps_text_unchanged(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    (tmp_path / "text").write_bytes(TEXT.encode())

    def put(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "spangrad", "prompt", "put", *words, "--set", f"queue.url={settings.queue.url}"]
        done = subprocess.run(command, input=TEXT.encode(), capture_output=True, cwd=tmp_path, check=False, timeout=60)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    with queue_server(settings, tmp_path / "queue.log"):
        assert put("greeting", "-", "--no-publish") == (0, "greeting@1\n", "")
        assert put("greeting", "text") == (0, "greeting@1 (published)\n", "")
        assert PromptStore(settings.queue.url or "").get("greeting").text == TEXT


@pytest.mark.parametrize("history", [False, True])
def test_prompt_show_unknown_prompt_raises_with_remedy(tmp_path: Path, history: bool) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    remedy = "`spangrad prompt list` shows what there is, `spangrad prompt put nobody FILE` makes it."
    with queue_server(settings, tmp_path / "queue.log"), pytest.raises(PromptError, match=f"no prompt nobody.*{remedy}"):
        prompt._show("nobody", history=history, set_=[f"queue.url={settings.queue.url}"])
