"""The store's one process: OTLP in by gRPC and HTTP, ClickHouse's HTTP interface out, one embedded engine between.

In: StoreSettings. Out: a served directory of data, until SIGTERM or SIGINT.
Invariant: what was acknowledged is committed; the process starts no other and ends within two seconds of being asked.
"""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop
from aiohttp import web

from collector.auth import Guardian
from collector.clickhouse_http import ClickHouseInterface
from collector.engine import Engine
from collector.ingest import Budget, Ingest
from collector.migrations import migrate
from collector.receiver_grpc import GRPCReceiver
from collector.receiver_http import HTTPReceiver
from collector.rows import LOGS_INSERT, TRACES_INSERT
from collector.staging import Staging
from spangrad.processes import require_free_port, require_safe_bind
from spangrad.settings import StoreSettings

logger = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""How long a stopping store waits for requests that are still on their way."""


def serve(store: StoreSettings) -> None:
    """Serve the store until SIGTERM or SIGINT.

    Raises:
        SpangradError: a port is in use, or the address needs a token.
        StoreError: another process owns the directory, or its schema does not match.
    """
    require_safe_bind(store.host, store.token, "store")
    for port, name in (
        (store.otlp_grpc_port, "otlp_grpc_port"),
        (store.otlp_http_port, "otlp_http_port"),
        (store.clickhouse_port, "clickhouse_port"),
    ):
        require_free_port(store.host, port, f"store.{name}")
    engine = Engine(store.path)
    try:
        handle = engine.handle()
        migrate(lambda sql: handle.query(sql).body.decode())
        handle.close()
        uvloop.run(_serve(store, engine))
    finally:
        engine.close()


async def _serve(store: StoreSettings, engine: Engine) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    guardian = Guardian(store.token.get_secret_value() if store.token else None)
    traces, logs = engine.handle(), engine.handle()
    staged_traces, staged_logs = Staging(traces), Staging(logs)
    ingest = Ingest(
        insert_traces=lambda rows: staged_traces.insert(TRACES_INSERT, "RowBinary", rows, keep_staging=True),
        insert_logs=lambda rows: staged_logs.insert(LOGS_INSERT, "RowBinary", rows, keep_staging=True),
        linger_ms=store.linger_ms,
        queue_bytes=store.queue_bytes,
    )
    interface = ClickHouseInterface(engine, guardian, Budget(store.queue_bytes))
    host = f"[{store.host}]" if ":" in store.host else store.host
    grpc_server = GRPCReceiver(ingest, guardian).server(f"{host}:{store.otlp_grpc_port}")
    runners = [
        await _listen(HTTPReceiver(ingest, guardian).application(), store.host, store.otlp_http_port),
        await _listen(interface.application(), store.host, store.clickhouse_port),
    ]
    await grpc_server.start()
    logger.info(
        "store ready: OTLP http://%s:%d and grpc %s:%d, ClickHouse http://%s:%d, data in %s",
        *(host, store.otlp_http_port, host, store.otlp_grpc_port, host, store.clickhouse_port, store.path),
    )
    await stop.wait()
    # First no new requests, then an answer for each that is in: the inserters commit meanwhile.
    ingest.hurry()
    cancelling = asyncio.create_task(_cancel_statements(engine))
    await asyncio.gather(grpc_server.stop(STOP_SECONDS), *(runner.cleanup() for runner in runners))
    cancelling.cancel()
    await asyncio.to_thread(ingest.close)
    await asyncio.to_thread(interface.close)
    traces.close()
    logs.close()
    logger.info("store stopped")


async def _cancel_statements(engine: Engine) -> None:
    """Give statements half the time to end by themselves."""
    await asyncio.sleep(STOP_SECONDS / 2)
    await asyncio.to_thread(engine.kill_queries)


async def _listen(application: web.Application, host: str, port: int) -> web.AppRunner:
    # Bodies are unpacked by our own code, with limits, off the event loop.
    runner = web.AppRunner(application, access_log=None, auto_decompress=False, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
