"""The store's one process: OTLP receivers (gRPC and HTTP), the embedded database, and ClickHouse's HTTP interface to it.

In: StoreSettings. Out: a served directory of data, until SIGTERM or SIGINT.
Invariant: what was acknowledged is in the tables or in the journal, and in the tables before a query is answered; the
process starts no other and ends within two seconds of the signal.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from collector.arrivals import ArrivalBoard, topics_of_traces
from collector.auth import Guardian
from collector.confinement import confine
from collector.database import EmbeddedDatabase, make_directory
from collector.database_tuning import tune
from collector.memory import keep_memory
from collector.otlp.receiver_grpc import GRPCReceiver
from collector.otlp.receiver_http import HTTPReceiver
from collector.schema.cluster import Layout
from collector.schema.migrations import migrate
from collector.schema.retention import Expiry
from collector.sql.http import ClickHouseInterface
from collector.sql.readers import ReaderLimits
from collector.write.ingest import Budget, Ingest, Inserter
from collector.write.staging import Staging, commit_logs
from collector.write.write_buffer import WriteBuffer
from spangrad.errors import SettingsError
from spangrad.http import server as http_server
from spangrad.http.server import HttpServer
from spangrad.http.service import in_url
from spangrad.processes import require_free_port, require_safe_bind
from spangrad.settings import StoreSettings
from spangrad.store.arrivals import Topic

logger = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""Longest time that a stopping store waits for requests in progress."""


def serve(store: StoreSettings) -> None:
    """Serve the store until SIGTERM or SIGINT.

    Raises:
        SpangradError: a port is in use or named twice, or the address needs a token.
        StoreError: the directory cannot be used, another process owns it, or its schema does not match.
    """
    require_safe_bind(store.host, store.token, "store")
    if store.read_token is not None and store.read_token == store.token:
        raise SettingsError("store.read_token is the same as store.token, so its bearer could write. Set another one.")
    if store.cluster is not None:
        raise SettingsError(
            f"store.cluster = {store.cluster!r}, but the embedded store is one server. Unset it, or use the cluster itself."
        )
    ports = {f"store.{name}": getattr(store, name) for name in ("otlp_grpc_port", "otlp_http_port", "clickhouse_port")}
    for name, port in ports.items():
        if duplicates := [other for other, other_port in ports.items() if other_port == port and other != name]:
            raise SettingsError(f"{name} and {duplicates[0]} are both {port}. Give each a port of its own.")
        require_free_port(store.host, port, name)
    keep_memory()
    # Imported modules stay: the garbage collector need not visit them.
    gc.freeze()
    make_directory(store.path)
    confine(store.path.resolve())
    database = EmbeddedDatabase(store.path)
    # The database keeps files of its own (schemas of formats) in the working directory.
    os.chdir(database.path)
    try:
        handle = database.handle()
        migrate(lambda sql: handle.query(sql).body.decode(), Layout())
        tune(handle.query)
        handle.close()
        http_server.serve(lambda: _running(store, database), lambda _: _log_ready(store))
    finally:
        database.close()


def _log_ready(store: StoreSettings) -> None:
    host = in_url(store.host)
    logger.info(
        "store ready: OTLP http://%s:%d and grpc %s:%d, ClickHouse http://%s:%d, data in %s",
        *(host, store.otlp_http_port, host, store.otlp_grpc_port, host, store.clickhouse_port, store.path),
    )


@asynccontextmanager
async def _running(store: StoreSettings, database: EmbeddedDatabase) -> AsyncGenerator[None]:
    token, read_token = (secret.get_secret_value() if secret else None for secret in (store.token, store.read_token))
    guardian = Guardian(token, read_token)
    traces, logs = (database.handle(schema_files=True), database.handle(schema_files=True)), database.handle()
    spans = WriteBuffer(traces, database.path / "journals", store.settle_seconds)
    arrivals = ArrivalBoard()
    ingest = Ingest(
        Inserter("insert-traces", arrivals.noting(spans.commit, topics_of_traces), store.linger_ms / 1000),
        Inserter("insert-logs", arrivals.noting(partial(commit_logs, Staging(logs)), lambda _: [Topic.SPANS]), store.linger_ms / 1000),
        store.queue_bytes,
    )
    expiry = Expiry(database.handle, store.ttl_days) if store.ttl_days else None
    limits = ReaderLimits(store.reader_max_rows, store.reader_max_seconds)
    interface = ClickHouseInterface(database, spans, arrivals, guardian, limits, Budget(store.queue_bytes))
    grpc_server = GRPCReceiver(ingest, guardian).server(f"{in_url(store.host)}:{store.otlp_grpc_port}")
    # Bodies are unpacked by our own code, with limits, off the event loop. A client that disconnects cancels its request: OTLP's are
    # committed all the same, statements that only read are cancelled.
    servers = [
        HttpServer(application, store.host, port, cancels=cancels, unpacks=False, drain_seconds=STOP_SECONDS)
        for application, port, cancels in (
            (HTTPReceiver(ingest, guardian).application(), store.otlp_http_port, False),
            (interface.application(), store.clickhouse_port, True),
        )
    ]
    for server in servers:
        await server.start()
    await grpc_server.start()
    yield
    # First refuse new requests, then answer those in progress: the inserters commit meanwhile.
    ingest.flush_now()
    arrivals.close()
    if expiry:
        expiry.stop()
    cancelling = asyncio.create_task(_cancel_statements(database))
    await asyncio.gather(grpc_server.stop(STOP_SECONDS), *(server.stop() for server in servers))
    cancelling.cancel()
    await asyncio.to_thread(ingest.close)
    await asyncio.to_thread(interface.close)
    await asyncio.to_thread(spans.close)
    if expiry:
        await asyncio.to_thread(expiry.join)
    for handle in (*traces, logs):
        handle.close()
    logger.info("store stopped")


async def _cancel_statements(database: EmbeddedDatabase) -> None:
    """Cancel all statements after half the time, in which they may end by themselves."""
    await asyncio.sleep(STOP_SECONDS / 2)
    await asyncio.to_thread(database.kill_queries)
