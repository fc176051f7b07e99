"""`spangrad engine`: vLLM in its own environment, with our plugin, ready for the gateway's orders.

In: settings.engine. Out: vLLM on engine.host:engine.port, warmed up, its log on our standard output. Invariant: vLLM and
its workers live exactly as long as this process; beyond this machine, orders about weights need the token.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from gateway.engine_arguments import keeps_worker_in_engine, names_api_servers, require_orders_reach_all
from gateway.engine_failure import failure
from gateway.engine_fit import fit_to_memory, vllm_python
from gateway.registration import Registration
from gateway.vllm_plugin.middleware import (
    CHECKSUM_VARIABLE,
    MODEL_VARIABLE,
    POLICY_VARIABLE,
    RANK_VARIABLE,
    TOKEN_VARIABLE,
    TRANSFER_VARIABLE,
    VERSION_VARIABLE,
    ZERO_ADAPTER_VARIABLE,
    base_name,
)
from gateway.vllm_plugin.request_fields import CHAT_PATH
from gateway.vllm_plugin.state import STATE_VARIABLE, write_state
from gateway.zero_adapter import write_zero_adapter, zero_adapter
from spangrad.errors import EngineError, SettingsError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService, in_url
from spangrad.processes import answers, dying_with_parent, require_free_port, require_safe_bind, stop_group
from spangrad.settings import EngineSettings, Settings
from spangrad.weights.checksums import tokenizer_hash

log = logging.getLogger(__name__)

TAIL_LINES = 1000
"""Lines at the end of vLLM's log in which the cause of its end is searched: its last traceback alone takes a hundred."""
STOP_SECONDS = 8
POLL_SECONDS = 0.1
WARM_UP_TOKENS = 3
_WARM_UP_SECONDS = 120.0
TRANSFER_BACKENDS = {"nccl": "nccl", "http": "spangrad_http"}
"""Value of engine.transfer -> vLLM's name of the weight-transfer backend; the second is registered by our plugin."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank, in ascending order."""
_PLUGIN = "gateway.vllm_plugin"
_DETECTS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_INHERITED_ERRORS = ("VLLM_CPU_KVCACHE_SPACE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Environment variables that are not passed on, since they would mislead vLLM; the first overrides --kv-cache-memory-bytes."""
_WORKER_IN_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variable without which vLLM's CPU build gives its worker a process of its own, even with --distributed-executor-backend uni."""


def serve(settings: Settings) -> None:
    """Run vLLM until SIGTERM or SIGINT.

    Raises:
        SettingsError: the model or the interpreter is missing, or settings contradict each other.
        EngineError: vLLM did not start, or it died.
        SpangradError: the port is in use.
    """
    settings, model = _checked(settings)
    engine = settings.engine
    base = f"http://{in_url(engine.host)}:{engine.port}"
    with _stop_signal() as stopping:
        began = time.monotonic()
        write_state(_state_file(engine), engine.version)
        vllm = _Vllm(engine, command(settings, model), environment(settings, model))
        try:
            vllm.wait_until(lambda: answers(f"{base}/health"), stopping)
            # In a thread, so that a signal and vLLM's end are noticed meanwhile.
            warm_up = ThreadPoolExecutor(1, "warm-up").submit(_warm_up, base, settings)
            vllm.wait_until(warm_up.done, stopping)
            if not stopping.is_set():
                warm_up.result()
                seconds = time.monotonic() - began
                log.info("engine ready: policy %r version %d at %s (%.1f s)", settings.gateway.policy, engine.version, base, seconds)
                with Registration(settings):
                    vllm.wait(stopping)
        finally:
            vllm.stop()


def command(settings: Settings, model: Path) -> list[str]:
    """Return the command that starts vLLM."""
    engine = settings.engine
    policy = settings.gateway.policy
    options = {
        # In an engine that takes adapters, the policy's name is the adapter's.
        "--served-model-name": base_name(policy) if engine.lora_rank else policy,
        "--host": engine.host,
        "--port": str(engine.port),
        "--dtype": engine.dtype,
        # Logits as the trainer computes them: of a bfloat16 head they are rounded to steps of up to an eighth of a nat.
        "--hf-overrides": json.dumps({"head_dtype": engine.head_dtype}),
        **({"--max-model-len": str(engine.max_model_len)} if engine.max_model_len else {}),
        # Of the distribution that was sampled, after temperature, top-p and penalties: what importance ratios need.
        "--logprobs-mode": "processed_logprobs",
        # Sampling parameters that a client leaves out are vLLM's own, not the model directory's.
        "--generation-config": "vllm",
        "--middleware": f"{_PLUGIN}.middleware.SpangradMiddleware",
        "--worker-extension-cls": f"{_PLUGIN}.worker.SpangradWorker",
    }
    if engine.kv_cache_bytes is not None:
        options["--kv-cache-memory-bytes"] = str(engine.kv_cache_bytes)
    if engine.lora_rank:
        rank = next(rank for rank in _LORA_RANKS if rank >= engine.lora_rank)
        options |= {"--max-lora-rank": str(rank), "--max-loras": "1", "--lora-modules": f"{policy}={zero_adapter(engine)}"}
        if not names_api_servers(engine.extra_args):
            # vLLM starts one for each data-parallel rank; the adapters that a server knows are its own.
            options["--api-server-count"] = "1"
    if engine.transfer:
        options["--weight-transfer-config"] = json.dumps({"backend": TRANSFER_BACKENDS[engine.transfer]})
    flags = [
        "--disable-uvicorn-access-log",  # a line for each call: spans have what it says, and the log would grow with them
        *(["--enforce-eager"] if engine.enforce_eager else []),
        *(["--enable-lora"] if engine.lora_rank else []),
    ]
    start = [str(vllm_python(engine).absolute()), "-m", f"{_PLUGIN}.launch", "serve", str(model)]
    return [*start, *(word for option in options.items() for word in option), *flags, *engine.extra_args]


def environment(settings: Settings, model: Path) -> dict[str, str]:
    """Return the environment of vLLM: this process's, without what misleads vLLM, and with what the plugin needs."""
    engine = settings.engine
    cache = engine.cache_dir.absolute()
    inherited = {name: value for name, value in os.environ.items() if name not in _INHERITED_ERRORS and not name.startswith("SPANGRAD_")}
    adapters = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        RANK_VARIABLE: str(engine.lora_rank),
        ZERO_ADAPTER_VARIABLE: str(zero_adapter(engine)),
    }
    return {
        **inherited,
        **(adapters if engine.lora_rank else {}),
        **(_WORKER_IN_ENGINE if keeps_worker_in_engine(engine.extra_args) else {}),
        **({TRANSFER_VARIABLE: engine.transfer} if engine.transfer else {}),
        **({TOKEN_VARIABLE: engine.token.get_secret_value()} if engine.token else {}),
        "PATH": f"{vllm_python(engine).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(_plugin_path(cache)),
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        POLICY_VARIABLE: settings.gateway.policy,
        VERSION_VARIABLE: str(engine.version),
        MODEL_VARIABLE: str(model),
        CHECKSUM_VARIABLE: engine.checksum,
        STATE_VARIABLE: str(_state_file(engine)),
    }


def _state_file(engine: EngineSettings) -> Path:
    """Return the file of the state that the engine's API servers share; one for each port, as several engines share a cache."""
    return engine.cache_dir.absolute() / f"engine-state-{engine.port}"


def _plugin_path(cache: Path) -> Path:
    """Return a directory with our two packages and nothing else, so that no module of ours hides one of vLLM's environment."""
    path = cache / "python"
    path.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parent.parent
    for package in ("gateway", "spangrad"):
        link = path / package
        if not link.is_symlink() or link.readlink() != root / package:
            link.unlink(missing_ok=True)
            link.symlink_to(root / package)
    return path


def _checked(settings: Settings) -> tuple[Settings, Path]:
    """Return the settings, fitted to the model and this machine, and the model's directory, or refuse what cannot work."""
    engine = settings.engine
    model = _model_of(engine)
    engine = fit_to_memory(engine, model)
    _check(engine, model)
    return settings.model_copy(update={"engine": engine}), model


def _model_of(engine: EngineSettings) -> Path:
    if engine.model is None:
        raise SettingsError("no model to serve. Set engine.model (SPANGRAD_ENGINE__MODEL) to a model directory.")
    model = engine.model.absolute()
    if not (model / "config.json").exists():
        lack = "holds no config.json" if model.is_dir() else "is no directory"
        raise SettingsError(f"engine.model = {str(engine.model)!r} {lack}. Set it to a Hugging Face model directory.")
    tokenizer_hash(model)
    return model


def _check(engine: EngineSettings, model: Path) -> None:
    """Check the settings, before vLLM spends half a minute on what cannot work."""
    require_orders_reach_all(engine)
    if engine.lora_rank and engine.transfer:
        raise SettingsError(
            f"engine.lora_rank = {engine.lora_rank} and engine.transfer = {engine.transfer!r}: "
            "an engine takes adapters or whole weights. Unset one."
        )
    python = vllm_python(engine)
    if not os.access(python, os.X_OK):
        raise SettingsError(
            f"engine.python = {str(python)!r} is no interpreter. Make vLLM's environment with `make setup`, "
            "or set engine.python to the Python of an environment that holds vLLM."
        )
    if engine.transfer == "nccl" and subprocess.run([python, "-c", _DETECTS_GPU], check=False).returncode:
        raise SettingsError(
            f"engine.transfer = 'nccl', and the PyTorch of engine.python = {str(python)!r} sees no GPU. Set engine.transfer = "
            "http, or start the engine where there is one."
        )
    require_safe_bind(engine.host, engine.token, "engine")
    require_free_port(engine.host, engine.port, "engine.port")
    if engine.lora_rank:
        write_zero_adapter(engine, model)


class _Vllm:
    """The vLLM process: its log is passed on and its last lines are kept."""

    def __init__(self, engine: EngineSettings, command: list[str], environment: dict[str, str]) -> None:
        self._timeout = engine.start_timeout_seconds
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            dying_with_parent(command, environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdout
        self._copier = threading.Thread(target=self._copy, args=(self._process.stdout,), daemon=True)
        self._copier.start()

    def _copy(self, lines: IO[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            self._tail.append(text)
            # A line that cannot be written, as on a full disk, is dropped: vLLM blocks once its output is no longer read.
            with suppress(OSError, ValueError):
                sys.stdout.write(text)
                sys.stdout.flush()

    def wait_until(self, ready: Callable[[], bool], stopping: threading.Event) -> None:
        """Wait while vLLM starts.

        Raises:
            EngineError: vLLM died, or does not answer in time.
        """
        deadline = time.monotonic() + self._timeout
        while not stopping.is_set() and not ready():
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM is not ready after engine.start_timeout_seconds = {self._timeout:g}. Its log stands above.")
            stopping.wait(POLL_SECONDS)

    def wait(self, stopping: threading.Event) -> None:
        """Wait for the order to stop.

        Raises:
            EngineError: vLLM died.
        """
        while not stopping.wait(POLL_SECONDS):
            self._check_alive()

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            self._copier.join(1)
            raise failure(self._process.returncode, list(self._tail))

    def stop(self) -> None:
        """End vLLM and its workers."""
        stop_group(self._process, STOP_SECONDS)
        self._copier.join(1)


def _warm_up(base: str, settings: Settings) -> None:
    """Send the first requests, which take seconds, before agents call the engine; then have /spangrad/info report it as warm.

    Raises:
        EngineError: vLLM refuses a plain chat request, so it would refuse the agents'.
    """
    messages = [{"role": "user", "content": "warm up"}]
    request = {"model": settings.gateway.policy, "messages": messages, "max_tokens": WARM_UP_TOKENS, "logprobs": True}
    count = settings.engine.warmup_requests
    vllm = RemoteService("vLLM", base, settings.engine.token, EngineError, "Its log stands above.")
    with ThreadPoolExecutor(max(count, 1)) as pool:
        sent = [pool.submit(ask, vllm, "POST", CHAT_PATH, request, seconds=_WARM_UP_SECONDS) for _ in range(count)]
    for answer in sent:
        answer.result()
    ask(vllm, "POST", "/spangrad/warm", {}, seconds=_WARM_UP_SECONDS)


@contextmanager
def _stop_signal() -> Generator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set while the block runs."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
