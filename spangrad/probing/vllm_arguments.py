"""Arguments of vLLM on which planning, placement and the gateway's orders depend.

In: engine.extra_args. Out: values by option. Invariant: arguments are read as vLLM reads them: with `=` or without, `_` for `-`, short,
abbreviated; of an option that is given twice the last holds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

_OPTIONS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--gpu-memory-utilization",),
    ("--config",),
    ("--headless",),
    ("--distributed-executor-backend",),
    ("--api-server-count", "-asc"),
    ("--data-parallel-rank", "-dpn"),
    ("--data-parallel-start-rank", "-dpr"),
    ("--data-parallel-hybrid-lb", "-dph"),
    ("--data-parallel-external-lb", "-dpe"),
    ("--data-parallel-multi-port-external-lb", "-dpm"),
)
"""Long name of each option that is read, and its short one."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


_PARSER = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
for _names in _OPTIONS:
    _PARSER.add_argument(*_names, nargs="?", const="", dest=_names[0])


def vllm_arguments(words: Sequence[str]) -> dict[str, str]:
    """Return the values of options by their long names, such as `--headless`; an empty value: none follows."""
    dashed = [re.sub("^--[^=]+", lambda option: option[0].replace("_", "-"), word) for word in words]
    try:
        return vars(_PARSER.parse_known_args(dashed)[0])
    except ValueError:
        return {}  # an ambiguous abbreviation, with which vLLM does not start
