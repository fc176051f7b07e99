"""Two models of which a script is the mind: one does what its prompt says word for word, one criticises prompts and corrects them.

In: OpenAI's chat requests, for model `policy` or `critic`. Out: answers. Invariant: the same request has the same answer.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SAID = re.compile(r"came on (\w+ \d+, \d+)\.")
_ISO = "Write dates as YYYY-MM-DD."
_ALONE = "Answer with the date and nothing else."
_CAUSES = {"The date is not in ISO form.": _ISO, "There are words around the date.": _ALONE}
_RUN = re.compile(r"<run score=([\d.]+)>\n(.*?)</run>", re.DOTALL)
_REPLY = re.compile(r"^reply: (.*)$", re.MULTILINE)
_PROMPT = re.compile(r"<prompt>\n(.*?)\n</prompt>", re.DOTALL)


def reply(messages: list[dict[str, str]]) -> str:
    """Return the policy's reply: a date, in the form that its prompt asks for."""
    system, question = messages[0]["content"], messages[-1]["content"]
    match = _SAID.search(question)
    if match is None:
        return "I see no date."
    day = datetime.strptime(match[1], "%B %d, %Y").date()
    text = day.isoformat() if _ISO in system else f"{day.day}/{day.month}/{day.year}"
    return text if _ALONE in system else f"It came on {text}."


def criticise(messages: list[dict[str, str]]) -> str:
    """Return the critic's reply: the first fault of the runs; to a critique, the prompt with its correction."""
    asked = messages[-1]["content"]
    match = _PROMPT.search(asked)
    prompt = match[1] if match else ""
    if "<critique>" in asked:
        mended = [line for cause, line in _CAUSES.items() if cause in asked]
        return f"Here it is:\n<prompt>\n{' '.join([prompt, *mended])}\n</prompt>"
    replies = [text for score, run in _RUN.findall(asked) if float(score) < 1 for text in _REPLY.findall(run)]
    if any(" " in text for text in replies):
        return "There are words around the date."
    return "The date is not in ISO form." if replies else "Nothing is wrong."


@contextmanager
def serving() -> Generator[str]:
    """Both models, at one address, while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # http.server's name
            asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = criticise(asked["messages"]) if asked["model"] == "critic" else reply(asked["messages"])
            choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            whole = {"id": "c", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice], "usage": usage}
            body = json.dumps(whole).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
