"""Arguments of vLLM that divide one engine so that the gateway's orders do not reach all of it, and those that change how it is started.

In: engine.extra_args, and the configuration file that they may name. Out: the first argument that does. Invariant: arguments are read as
vLLM reads them, also those from YAML.

An order reaches one API server, whose client gives it to all engine cores that it knows, and the servers share their state. Tensor,
pipeline and data parallelism and several API servers are therefore one engine. Not so where each server knows some of the ranks only
(external and hybrid load balancing), or where none answers; and an adapter is known to the one server that loaded it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from spangrad.errors import SettingsError
from spangrad.probing.vllm_arguments import vllm_arguments
from spangrad.settings import EngineSettings

_API_SERVERS = "--api-server-count"
_EXECUTOR = "--distributed-executor-backend"
_SOME_RANKS = (
    "--data-parallel-rank",
    "--data-parallel-start-rank",
    "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
    "--data-parallel-multi-port-external-lb",
)
"""Options with which an API server knows some of the data-parallel ranks only."""
_YAML_LINE = re.compile(r"""^["']?([A-Za-z][\w-]*)["']?\s*:\s*["']?([^"'#\s]*)""", re.MULTILINE)


def require_orders_reach_all(engine: EngineSettings) -> None:
    """Refuse arguments with which an order would not reach all of an engine.

    Raises:
        SettingsError: one does; the message names it, the place where it is set, and the reason.
    """
    for option, value, place in _options(engine.extra_args):
        reason = _refusal(option, value, engine)
        if reason:
            raise SettingsError(f"{place} has {f'{option} {value}'.rstrip()}: {reason}")


def names_api_servers(extra_args: Sequence[str]) -> bool:
    """Return whether the arguments set the number of API servers."""
    return any(option == _API_SERVERS for option, _, _ in _options(extra_args))


def keeps_worker_in_engine(extra_args: Sequence[str]) -> bool:
    """Return whether the arguments have the engine's process do the work of its worker; those of the file hold where no other is given."""
    return next((value for option, value, _ in _options(extra_args) if option == _EXECUTOR), "") == "uni"


def _refusal(option: str, value: str, engine: EngineSettings) -> str:
    if option in _SOME_RANKS and value != "false":
        return (
            "its API servers would know some of the data-parallel ranks only, and new weights would not reach the others. Take it out: "
            "with --data-parallel-size alone every API server knows all ranks; or start one `spangrad engine` for each rank, and give the "
            "gateway all of them (gateway.backends)."
        )
    if (option == "--headless" and value != "false") or (option == _API_SERVERS and value == "0"):
        return "an engine without an API server takes no orders. Take it out, or start that part of a larger engine with `vllm serve`."
    if option == _API_SERVERS and engine.lora_rank and value != "1":
        return (
            f"engine.lora_rank = {engine.lora_rank}, and vLLM loads adapters at run time with one API server only. Set {_API_SERVERS} 1; "
            "--data-parallel-size may stay."
        )
    return ""


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield options in their long form, their values (empty: none follows), and the place where each is set."""
    arguments = vllm_arguments(words)
    yield from ((option, value, "engine.extra_args") for option, value in arguments.items())
    file = Path(arguments.get("--config", ""))
    if file.is_file():  # vLLM says what is wrong with a file that is not there
        lines = _YAML_LINE.findall(file.read_text(errors="replace"))
        in_file = vllm_arguments([f"--{name}={value}" for name, value in lines])
        yield from ((option, value, f"{file}, which engine.extra_args names,") for option, value in in_file.items())
