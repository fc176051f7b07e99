"""`spangrad engine`."""

from __future__ import annotations

from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def engine(
    *,
    model: Path | None = None,
    port: int | None = None,
    python: Path | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run vLLM in its own environment, ready to take new weights.

    Args:
        model: directory of the policy's model.
        port: where vLLM listens.
        python: the interpreter of vLLM's environment.
    """
    settings = resolve(config, set_, {"engine.model": model, "engine.port": port, "engine.python": python})
    log_to_stderr()
    from gateway.engine import serve

    serve(settings)
