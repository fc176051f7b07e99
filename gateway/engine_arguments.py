"""Arguments of vLLM that make several processes of one engine: API servers and data-parallel ranks.

In: engine.extra_args, and the configuration file that they may name. Out: the first argument that asks for more than one, or for a way to
connect several. Invariant: arguments are read as vLLM reads them: with `=` or without, `_` for `-`, abbreviated, or from YAML.

The policy's version, pauses and the checksum are those of one API server and one model. A second API server would answer with labels that
no order has reached; a second rank with weights whose checksum was not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from spangrad.errors import EngineError

_SHORT = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
}
_COUNTS = ("--api-server-count", "--data-parallel-size", "--data-parallel-size-local")
"""Options of which the value 1 changes nothing."""
_LEAST_ABBREVIATION = "--api-s"
_YAML_LINE = re.compile(r"""^["']?([A-Za-z][\w-]*)["']?\s*:\s*["']?([^"'#\s]*)""", re.MULTILINE)


def require_one_server(extra_args: Sequence[str]) -> None:
    """Refuse arguments that give an engine several API servers or data-parallel ranks.

    Raises:
        EngineError: one does; the message names it, and the place where it is set.
    """
    for option, value, place in _options(extra_args):
        if option.startswith("--data-parallel") or _is_abbreviation(option):
            if option in _COUNTS and value == "1":
                continue
            shown = f"{option} {value}".rstrip()
            raise EngineError(
                f"{place} has {shown}: an engine with several API servers or data-parallel ranks cannot be given new weights. Take it out, "
                "start one `spangrad engine` for each replica, and give the gateway all of them (gateway.backends)."
            )


def _is_abbreviation(option: str) -> bool:
    """Return whether vLLM reads an option as an abbreviation of --api-server-count."""
    return option.startswith(_LEAST_ABBREVIATION) and "--api-server-count".startswith(option)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield options in their long form, their values (empty: none follows), and the place where each is set."""
    for at, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        option = _SHORT.get(name, name).replace("_", "-")
        following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
        yield option, value if equals else following, "engine.extra_args"
        if option == "--config":
            yield from _in_file(Path(value if equals else following))


def _in_file(path: Path) -> Iterator[tuple[str, str, str]]:
    if path.is_file():  # vLLM says what is wrong with one that is not
        for name, value in _YAML_LINE.findall(path.read_text(errors="replace")):
            yield "--" + name.replace("_", "-"), value, f"{path}, which engine.extra_args names,"
