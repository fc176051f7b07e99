"""`spangrad store`: the embedded span store."""

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
    """Run the embedded span store: it receives OTLP, and answers SQL over ClickHouse's HTTP interface.

    Args:
        path: directory of the store's data.
        otlp_http_port: TCP port that receives spans by OTLP/HTTP.
        otlp_grpc_port: TCP port that receives spans by OTLP/gRPC.
        clickhouse_port: TCP port of ClickHouse's HTTP interface, for SQL.
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
