"""`spangrad gateway`."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def gateway(
    *,
    port: int | None = None,
    engine_url: str | None = None,
    policy: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run the recording gateway in front of the engine.

    Args:
        port: where agents are answered.
        engine_url: where vLLM listens.
        policy: name of the policy that the engine serves.
    """
    settings = resolve(config, set_, {"gateway.port": port, "gateway.engine_url": engine_url, "gateway.policy": policy})
    log_to_stderr()
    from gateway.server import serve

    serve(settings)
