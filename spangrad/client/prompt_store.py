"""Asks the queue's server for prompts, and gives it new ones; for agents, commands and searches alike.

In: where it is, its token, names, texts. Out: versions of prompts. Invariant: what was not answered is asked again for a bounded time, and
may be: the same text is the same version, and an edit is written once.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, urlencode

from spangrad.errors import PromptError
from spangrad.http.json_http import refusal

TEXT_MOST = 256 * 1024
"""Characters of a prompt."""
PATIENCE_SECONDS = 30.0
"""That the server may be away."""
_ANSWER_SECONDS = 30.0
_PAUSES = (0.1, 0.5, 1.0)
"""Before a request is sent again; the last one holds on."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A version of a prompt, with its text."""

    name: str
    version: int
    text: str
    checksum: str
    """SHA-256 of the text in UTF-8, in hex."""
    created_at: float
    """Seconds since 1970, by the server's clock: for people."""
    published: bool
    """Whether those who name no version get it."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a prompt, by a search."""

    search: str
    round: int
    parent: int
    """The version that was edited."""
    number: int
    """Which of the parent's edits in that round, from 0."""
    critique: str
    """What was wrong with the parent."""
    version: int | None
    """What came of it. None: the model gave no prompt."""


class PromptStore:
    """A client without state: a connection a request."""

    def __init__(self, url: str, token: str | None = None, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Ask at `url` (runner.queue_url) with `token` (runner.queue_token; None: nothing is asked) for so long."""
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._patience = patience_seconds

    def get(self, name: str, version: int | None = None) -> PromptText:
        """A version of a prompt; None: the one that is published.

        Raises:
            PromptError: there is none; the server refuses, or stays away.
        """
        return _text(self._ask("GET", f"/v1/prompts/{quote(name, safe='')}", query={} if version is None else {"version": version}))

    def put(self, name: str, text: str, *, publish: bool = True) -> PromptText:
        """Keep a text as a version, and publish it or not.

        Raises:
            PromptError: the name or the text has no meaning; the server stays away.
        """
        kept = self._put(name, {"text": text, "publish": publish})
        return self.get(name, kept["version"])

    def edit(self, name: str, text: str | None, edit: Edit) -> int | None:
        """Write what came of an edit, unless that was written before; the version that holds. None: the model gave no prompt.

        Raises:
            PromptError: the server refuses, or stays away.
        """
        step = {key: value for key, value in asdict(edit).items() if key != "version"}
        return self._put(name, {"text": text, "publish": False, "edit": step})["version"]

    def versions(self, name: str) -> list[PromptText]:
        """All versions of a prompt, oldest first.

        Raises:
            PromptError: the server refuses, or stays away.
        """
        return [_text(one) for one in self._ask("GET", f"/v1/prompts/{quote(name, safe='')}/versions")["prompts"]]

    def newest(self) -> list[PromptText]:
        """Of each prompt the version that is published, else its newest.

        Raises:
            PromptError: the server refuses, or stays away.
        """
        return [_text(one) for one in self._ask("GET", "/v1/prompts")["prompts"]]

    def edits(self, name: str, search: str | None = None) -> list[Edit]:
        """The edits of a prompt, in order; None: of all searches.

        Raises:
            PromptError: the server refuses, or stays away.
        """
        answer = self._ask("GET", f"/v1/prompts/{quote(name, safe='')}/edits", query={} if search is None else {"search": search})
        return [Edit(**one) for one in answer["edits"]]

    def _put(self, name: str, body: Mapping[str, object]) -> Any:
        return self._ask("PUT", f"/v1/prompts/{quote(name, safe='')}", body)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None, query: Mapping[str, object] | None = None) -> Any:
        url = f"{self.url}{path}{'?' + urlencode(query) if query else ''}"
        data = None if body is None else json.dumps(body).encode()
        end = time.monotonic() + self._patience
        tries = 0
        while True:
            try:
                request = urllib.request.Request(url, data, self._headers, method=method)
                with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                problem = PromptError(f"prompts at {self.url}: {refusal(error)}")
                if error.code != 503:
                    raise problem from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = PromptError(
                    f"nobody keeps prompts at {self.url} ({error}). Start `spangrad queue`, or set runner.queue_url to where one listens."
                )
            if time.monotonic() > end:
                raise problem
            time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1


def _text(answer: Mapping[str, Any]) -> PromptText:
    return PromptText(**answer)
