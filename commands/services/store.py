"""`spangrad store`."""

from __future__ import annotations

from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def store(
    *,
    path: Path | None = None,
    otlp_http_port: int | None = None,
    otlp_grpc_port: int | None = None,
    clickhouse_port: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run the embedded span store: OTLP in, ClickHouse's HTTP interface out.

    Args:
        path: directory of the data.
        otlp_http_port: where spans arrive by OTLP/HTTP.
        otlp_grpc_port: where spans arrive by OTLP/gRPC.
        clickhouse_port: where SQL is answered.
    """
    flags = {
        "store.path": path,
        "store.otlp_http_port": otlp_http_port,
        "store.otlp_grpc_port": otlp_grpc_port,
        "store.clickhouse_port": clickhouse_port,
    }
    settings = resolve(config, set_, flags)
    log_to_stderr()
    from collector.server import serve

    serve(settings.store)
