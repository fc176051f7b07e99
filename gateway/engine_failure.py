"""Root cause of an engine that did not start, from vLLM's log, and the setting to change.

In: the lines of a log. Out: a sentence or two. Invariant: pure; a log without a known cause yields its exceptions, the first one first,
since vLLM's last lines only point back at them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from spangrad.errors import EngineError, SettingsError

_EXCEPTION = re.compile(r"(?:^|[\s\])])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.+)$")
_POINTS_BACK = (
    "Engine core initialization failed",
    "See root cause above",
    "EngineCore failed to start",
    "WorkerProc initialization failed",
)
_MEMORY_REMEDY = "Set engine.kv_cache_bytes to what is free beside the weights, take a smaller model, or stop what uses the memory."
_REMEDIES = (
    (r"derived max_model_len|max_model_len \(\d+\) is greater", "Lower engine.max_model_len to the model's own context length."),
    (
        r"KV cache is needed|cache blocks|KV cache.*larger than the available|maximum number of tokens that can be stored",
        "Raise engine.kv_cache_bytes, or lower engine.max_model_len.",
    ),
    (
        r"[Ff]ree memory on device|gpu_memory_utilization|out of memory|[Cc]annot allocate memory|DefaultCPUAllocator|OutOfMemory",
        _MEMORY_REMEDY,
    ),
    (r"bfloat16|float16|dtype", "Set engine.dtype to a type that this machine computes in, such as float32."),
    (r"trust_remote_code", 'Add "--trust-remote-code" to engine.extra_args, if you trust the model\'s code.'),
    (r"No module named 'vllm'", "Set engine.python to the Python of an environment that holds vLLM (`make setup` makes one)."),
    (r"[Aa]ddress already in use", "Set engine.port to a free port."),
    (r"chat template|chat_template", "Take an instruct model, or save a chat_template.jinja in the model's directory."),
    (r"not supported for now|Model architectures", "Take a model of an architecture that vLLM serves."),
)


def failure(exit_code: int, lines: Sequence[str]) -> EngineError:
    """Return the error of a vLLM that ended, from its exit code and its log; wrong settings have an exit code of their own."""
    cause = root_cause(lines)
    memory = f" (SIGKILL, as the kernel sends it where memory runs out. {_MEMORY_REMEDY})" if exit_code == -signal.SIGKILL else ""
    error = EngineError(f"vLLM ended with exit code {exit_code}{memory}: {cause}")
    error.exit_code = SettingsError.exit_code if _remedy(cause) else error.exit_code
    return error


def root_cause(lines: Sequence[str]) -> str:
    """Return the cause of vLLM's end, with the setting to change where it is known; the log's last lines where no exception is in it."""
    raised = dict.fromkeys(match[0].strip() for line in lines if (match := _EXCEPTION.search(line.rstrip())))
    causes = [text for text in raised if not any(words in text for words in _POINTS_BACK)]
    if not causes:
        return _with_remedy("".join(f"{line.rstrip()}\n" for line in lines[-10:]).rstrip())
    known = [text for text in causes if _remedy(text)]
    return _with_remedy((known or causes)[0])


def _with_remedy(text: str) -> str:
    remedy = _remedy(text)
    return f"{text}\n{remedy}" if remedy else text


def _remedy(text: str) -> str:
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")
