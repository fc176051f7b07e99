"""Function `spangrad.prompt("name")`, which returns the prompt for the current attempt.

In: a name, the attempt's baggage or environment, the URL of the prompts' server. Out: the text, with its version. Invariant: in one attempt
a name means one version: the one that the attempt is pinned to, else the one that it got first.

An agent's process imports this: the standard library, and OpenTelemetry once a prompt is asked for.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from spangrad.errors import PromptError
from spangrad.semconv import PROMPT_NAME, PROMPT_VERSION, ROLLOUT_ATTEMPT, ROLLOUT_ID

if TYPE_CHECKING:
    from spangrad.agent.prompt_store import PromptText

URL, TOKEN, NAME, VERSION, VARIABLE = (f"SPANGRAD_PROMPT_{part}" for part in ("URL", "TOKEN", "NAME", "VERSION", "VARIABLE"))
TEXT = "SPANGRAD_PROMPT"
DEFAULT_URL = "http://127.0.0.1:8190"
_VARIABLE_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")
"""Largest environment variable that Linux passes to a program, in bytes, with its name, the sign between them and a byte for the end."""
_TEXTS_KEPT = 256
_ATTEMPTS_KEPT = 10_000

_lock = threading.Lock()
_texts: OrderedDict[tuple[str, str, int], Prompt] = OrderedDict()
"""Prompts by server, name and version; their texts never change."""
_first: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()
"""Version that an attempt got first, by server, rollout, attempt and name."""


class Prompt(str):
    """Text of a prompt, a string with its name and version."""

    __slots__ = ("name", "version")
    name: str
    version: int

    @classmethod
    def of(cls, response: PromptText) -> Self:
        """Return the prompt of a server's response."""
        text = cls(response.text)
        text.name, text.version = response.name, response.version
        return text


def prompt(name: str, version: int | None = None) -> Prompt:
    """Return the text of a prompt; the current span records its version.

    Args:
        name: name of the prompt.
        version: version to return. None: the one that the attempt is pinned to, else the one that is published at the attempt's first call.

    Raises:
        PromptError: there is no such prompt, or no server of prompts answers at SPANGRAD_PROMPT_URL.
    """
    from opentelemetry import trace

    from spangrad.agent.prompt_store import PromptStore  # its imports take a tenth of a second, which most agents need not pay

    url = os.environ.get(URL) or DEFAULT_URL
    carried = attempt_facts(os.environ)
    chosen = version if version is not None else _pinned(name, carried)
    attempt = (url, carried.get(ROLLOUT_ID, ""), carried.get(ROLLOUT_ATTEMPT, ""), name)
    with _lock:
        if chosen is None and attempt[1]:
            chosen = _first.get(attempt)
        text = _texts.get((url, name, chosen)) if chosen is not None else None
    if text is None:
        text = Prompt.of(PromptStore(url, os.environ.get(TOKEN)).get(name, chosen))
    with _lock:
        if chosen is None and attempt[1]:
            # Threads of one attempt may have fetched at once: the first version that was stored counts.
            held = _first.setdefault(attempt, text.version)
            text = _texts.get((url, name, held), text)
        _texts[url, name, text.version] = text
        _texts.move_to_end((url, name, text.version))
        while len(_texts) > _TEXTS_KEPT:
            _texts.popitem(last=False)
        while len(_first) > _ATTEMPTS_KEPT:
            _first.popitem(last=False)
    trace.get_current_span().set_attributes({PROMPT_NAME: text.name, PROMPT_VERSION: text.version})
    return text


def program_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a program's environment variables for its pinned prompt: name, version, text; empty without a pin.

    Raises:
        PromptError: as `prompt`; or the text is longer than a variable can be.
    """
    carried = attempt_facts(environ)
    name = carried.get(PROMPT_NAME)
    if name is None:
        return {}
    text, variable = prompt(name), environ.get(VARIABLE) or TEXT
    most = _VARIABLE_BYTES - len(f"{variable}=\0".encode())
    if (size := len(text.encode())) > most:
        raise PromptError(
            f"version {text.version} of the prompt {name} has {size} bytes, and the program's variable {variable} holds {most}. "
            "Shorten the prompt."
        )
    return {NAME: name, VERSION: str(text.version), variable: str(text)}


def attempt_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of the current attempt: its baggage, else the process's environment variables."""
    from opentelemetry import baggage

    from spangrad.agent.propagation import baggage_of

    carried = {key: str(value) for key, value in baggage.get_all().items()}
    if ROLLOUT_ID not in carried and environ.get("BAGGAGE"):
        carried = baggage_of(environ["BAGGAGE"])
    if PROMPT_NAME not in carried and environ.get(NAME):
        carried |= {PROMPT_NAME: environ[NAME], PROMPT_VERSION: environ.get(VERSION, "")}
    return carried


def _pinned(name: str, carried: Mapping[str, str]) -> int | None:
    version = carried.get(PROMPT_VERSION, "") if carried.get(PROMPT_NAME) == name else ""
    return int(version) if version.isdecimal() else None
