"""Client of the queue's server for prompts: reads versions and writes new ones, for agents, commands and searches alike.

In: the server's URL and token, names, texts. Out: versions of prompts. Invariant: a request without a response is retried for a bounded
time, which is safe: the same text is the same version, and an edit is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from spangrad.errors import PromptError
from spangrad.http.json_http import ask
from spangrad.http.service import queue_service

if TYPE_CHECKING:
    from pydantic import SecretStr

TEXT_MOST = 256 * 1024
"""Largest number of characters of a prompt."""
RETRY_SECONDS = 30.0
"""Time for which requests are retried while the server is unreachable, in seconds."""
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PromptText:
    """A version of a prompt, with its text."""

    name: str
    version: int
    text: str
    checksum: str
    """SHA-256 of the text in UTF-8, in hex."""
    created_at: float
    """Time of creation, in seconds since 1970 by the server's clock: for users."""
    published: bool
    """True if requests that name no version get this one."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a prompt, by a search."""

    search: str
    round: int
    parent: int
    """Version that was edited."""
    number: int
    """Number of the edit among the parent's edits in that round, from 0."""
    critique: str
    """Faults of the parent, as the critic model describes them."""
    version: int | None
    """Version that the edit produced. None: the model gave no prompt."""


class PromptStore:
    """Stateless client of the server of prompts: one connection for each request."""

    def __init__(self, url: str, token: SecretStr | str | None = None, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Use the server at `url` (queue.url) with `token` (queue.token; None: none), and retry for `retry_seconds`."""
        self._service = replace(queue_service(url, token, retry_seconds), error=PromptError)

    def get(self, name: str, version: int | None = None) -> PromptText:
        """Return a version of a prompt; None: the published one.

        Raises:
            PromptError: there is none; the server refuses, or stays unreachable.
        """
        return PromptText(**self._ask("GET", f"/v1/prompts/{quote(name, safe='')}", query={} if version is None else {"version": version}))

    def put(self, name: str, text: str, *, publish: bool = True) -> PromptText:
        """Store a text as a version, and publish it or not.

        Raises:
            PromptError: the name or the text is invalid; the server stays unreachable.
        """
        kept = self._put(name, {"text": text, "publish": publish})
        return self.get(name, kept["version"])

    def edit(self, name: str, text: str | None, edit: Edit) -> int | None:
        """Write the result of an edit, unless it was written before, and return its version. None: the model gave no prompt.

        Raises:
            PromptError: the server refuses, or stays unreachable.
        """
        step = {key: value for key, value in asdict(edit).items() if key != "version"}
        return self._put(name, {"text": text, "publish": False, "edit": step})["version"]

    def versions(self, name: str) -> list[PromptText]:
        """Return all versions of a prompt, oldest first.

        Raises:
            PromptError: the server refuses, or stays unreachable.
        """
        return [PromptText(**prompt) for prompt in self._ask("GET", f"/v1/prompts/{quote(name, safe='')}/versions")["prompts"]]

    def newest(self) -> list[PromptText]:
        """Return the published version of each prompt, else its newest.

        Raises:
            PromptError: the server refuses, or stays unreachable.
        """
        return [PromptText(**prompt) for prompt in self._ask("GET", "/v1/prompts")["prompts"]]

    def edits(self, name: str, search: str | None = None) -> list[Edit]:
        """Return the edits of a prompt, in order; None: of all searches.

        Raises:
            PromptError: the server refuses, or stays unreachable.
        """
        answer = self._ask("GET", f"/v1/prompts/{quote(name, safe='')}/edits", query={} if search is None else {"search": search})
        return [Edit(**edit) for edit in answer["edits"]]

    def _put(self, name: str, body: Mapping[str, object]) -> Any:
        return self._ask("PUT", f"/v1/prompts/{quote(name, safe='')}", body)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None, query: Mapping[str, object] | None = None) -> Any:
        return ask(self._service, method, f"{path}?{urlencode(query)}" if query else path, body, seconds=_ANSWER_SECONDS)
