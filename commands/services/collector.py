"""`spangrad collector`: the OpenTelemetry Collector in front of the span store."""

from __future__ import annotations

from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def collector(
    *,
    otlp_http_port: int | None = None,
    otlp_grpc_port: int | None = None,
    queue_path: Path | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run the OpenTelemetry Collector in front of the span store: it receives OTLP, queues it on disk and writes to ClickHouse.

    Args:
        otlp_http_port: TCP port that receives spans by OTLP/HTTP.
        otlp_grpc_port: TCP port that receives spans by OTLP/gRPC.
        queue_path: directory of the queue on disk: spans that were accepted and are not stored yet.
    """
    flags = {
        "collector.otlp_http_port": otlp_http_port,
        "collector.otlp_grpc_port": otlp_grpc_port,
        "collector.queue_path": queue_path,
    }
    settings = resolve(config, set_, flags)
    log_to_stderr()
    from collector.otelcol import run

    run(settings)
