"""`spangrad gateway`: the recording gateway."""

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
    """Run the gateway, which passes model calls to the inference engine and records them as spans.

    Args:
        port: TCP port on which agents call the gateway.
        engine_url: URL on which vLLM listens.
        policy: name of the policy that the engine serves; agents request it as the `model`.
    """
    settings = resolve(config, set_, {"gateway.port": port, "gateway.engine_url": engine_url, "gateway.policy": policy})
    log_to_stderr()
    from gateway.server import serve

    serve(settings)
