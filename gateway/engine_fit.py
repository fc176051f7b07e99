"""Fit of an engine to its model and to this machine, before vLLM starts.

In: settings.engine and a model directory. Out: the same settings with the interpreter, context length and KV cache that vLLM gets.
Invariant: what is not set comes from the model's own files; what is set beyond the model's limits is lowered, and logged.
"""

from __future__ import annotations

import logging
from pathlib import Path

from spangrad.errors import SettingsError
from spangrad.probing.machine import available_memory, find_vllm_python, has_gpu
from spangrad.probing.model import DTYPE_BYTES, configured
from spangrad.probing.proposals import cache_bytes, context_of
from spangrad.settings import EngineSettings

log = logging.getLogger(__name__)


def fit_to_memory(engine: EngineSettings, model: Path) -> EngineSettings:
    """Return the settings with which vLLM serves the model of a directory on this machine.

    Raises:
        SettingsError: there is no interpreter of vLLM's environment, or the model's config.json is not a JSON object.
    """
    facts = configured(model)
    context = context_of(facts.context_tokens, engine.max_model_len)
    if engine.max_model_len is not None and context < engine.max_model_len:
        log.warning("engine.max_model_len = %d is lowered to %d: the model in %s takes no more", engine.max_model_len, context, model)
    cache = engine.kv_cache_bytes
    if cache is None and facts.kv_values_a_token and not has_gpu():
        width = DTYPE_BYTES.get(facts.dtype if engine.dtype == "auto" else engine.dtype, 4)
        cache = cache_bytes(facts.kv_values_a_token * width, context, available_memory())
        log.info("engine.kv_cache_bytes = %d fits this machine's free memory", cache)
    return engine.model_copy(update={"python": vllm_python(engine), "max_model_len": context, "kv_cache_bytes": cache})


def vllm_python(engine: EngineSettings) -> Path:
    """Return the Python interpreter of vLLM's environment.

    Raises:
        SettingsError: engine.python is not set, and there is no such environment.
    """
    python = engine.python or find_vllm_python(Path.cwd())
    if python is None:
        raise SettingsError(
            "engine.python is not set, and there is no .venv-vllm here, above, or in spangrad's checkout. Make it with `make setup`"
            " in the checkout, or set engine.python to the Python of an environment that holds vLLM."
        )
    return python
