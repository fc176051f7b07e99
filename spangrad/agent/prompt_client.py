"""`spangrad.prompt("name")`: the prompt that the attempt at hand is to use.

In: a name, the attempt's baggage or environment, the address of the prompts. Out: the text, which knows its version. Invariant: in one
attempt a name leads to one version: the one that the attempt is pinned to, else the one that it was given first.

An agent's process imports this: the standard library, and OpenTelemetry only if it is there.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from spangrad.semconv import PROMPT_NAME, PROMPT_VERSION, ROLLOUT_ATTEMPT, ROLLOUT_ID

if TYPE_CHECKING:
    from spangrad.client.prompt_store import PromptText

URL, TOKEN, NAME, VERSION, VARIABLE = (f"SPANGRAD_PROMPT_{part}" for part in ("URL", "TOKEN", "NAME", "VERSION", "VARIABLE"))
TEXT = "SPANGRAD_PROMPT"
DEFAULT_URL = "http://127.0.0.1:8190"
_TEXTS_KEPT = 256
_ATTEMPTS_KEPT = 10_000

_lock = threading.Lock()
_texts: OrderedDict[tuple[str, str, int], Prompt] = OrderedDict()
"""By server, name and version: what they say never changes."""
_first: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()
"""The version that an attempt was given first, by server, rollout, attempt and name."""


class Prompt(str):
    """The text of a prompt, which is a text like any other."""

    __slots__ = ("name", "version")
    name: str
    version: int

    @classmethod
    def of(cls, found: PromptText) -> Self:
        """As the server gave it."""
        made = cls(found.text)
        made.name, made.version = found.name, found.version
        return made


def prompt(name: str, version: int | None = None) -> Prompt:
    """The text of a prompt; the span that is open says which version it was.

    Args:
        name: of the prompt.
        version: this one. None: the one that the attempt is pinned to, else the one that is published when the attempt asks first.

    Raises:
        PromptError: there is no such prompt, or nobody keeps prompts at SPANGRAD_PROMPT_URL.
    """
    from spangrad.client.prompt_store import PromptStore  # its imports take a tenth of a second, which most agents need not pay

    url = os.environ.get(URL) or DEFAULT_URL
    carried = attempt_facts(os.environ)
    chosen = version if version is not None else _pinned(name, carried)
    attempt = (url, carried.get(ROLLOUT_ID, ""), carried.get(ROLLOUT_ATTEMPT, ""), name)
    with _lock:
        if chosen is None and attempt[1]:
            chosen = _first.get(attempt)
        found = _texts.get((url, name, chosen)) if chosen is not None else None
    if found is None:
        found = Prompt.of(PromptStore(url, os.environ.get(TOKEN)).get(name, chosen))
    with _lock:
        if chosen is None and attempt[1]:
            # Threads of one attempt may have asked at once: the first answer that was kept holds.
            held = _first.setdefault(attempt, found.version)
            found = _texts.get((url, name, held), found)
        _keep(_texts, (url, name, found.version), found, _TEXTS_KEPT)
        while len(_first) > _ATTEMPTS_KEPT:
            _first.popitem(last=False)
    _mark(found)
    return found


def program_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a program finds in its environment of the prompt that its attempt is pinned to: name, version, text; nothing without a pin.

    Raises:
        PromptError: as `prompt`.
    """
    carried = attempt_facts(environ)
    name = carried.get(PROMPT_NAME)
    if name is None:
        return {}
    found = prompt(name)
    return {NAME: name, VERSION: str(found.version), environ.get(VARIABLE) or TEXT: str(found)}


def attempt_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """What the attempt at hand is: its baggage, else what the process was started with."""
    try:
        from opentelemetry import baggage
    except ImportError:
        carried: dict[str, str] = {}
    else:
        carried = {key: str(value) for key, value in baggage.get_all().items()}
    if ROLLOUT_ID not in carried and environ.get("BAGGAGE"):
        carried = _environment_baggage(environ["BAGGAGE"])
    if PROMPT_NAME not in carried and environ.get(NAME):
        carried |= {PROMPT_NAME: environ[NAME], PROMPT_VERSION: environ.get(VERSION, "")}
    return carried


def _environment_baggage(text: str) -> dict[str, str]:
    from urllib.parse import unquote

    pairs = (member.split(";")[0].partition("=") for member in text.split(","))
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def _pinned(name: str, carried: Mapping[str, str]) -> int | None:
    version = carried.get(PROMPT_VERSION, "") if carried.get(PROMPT_NAME) == name else ""
    return int(version) if version.isdecimal() else None


def _keep(kept: OrderedDict[tuple[str, str, int], Prompt], key: tuple[str, str, int], value: Prompt, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _mark(found: Prompt) -> None:
    """Write on the span that is open which version was fetched."""
    try:
        from opentelemetry import trace
    except ImportError:
        return
    trace.get_current_span().set_attributes({PROMPT_NAME: found.name, PROMPT_VERSION: found.version})
