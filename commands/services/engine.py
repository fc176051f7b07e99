"""`spangrad engine`: the inference engine."""

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
    """Run the inference engine, vLLM, in its own Python environment, ready to load new weights.

    Args:
        model: directory of the policy's model.
        port: TCP port on which vLLM listens.
        python: Python interpreter of vLLM's environment.
    """
    settings = resolve(config, set_, {"engine.model": model, "engine.port": port, "engine.python": python})
    log_to_stderr()
    from gateway.engine import serve

    serve(settings)
