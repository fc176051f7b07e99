"""A burst of spans through our exporter and through OpenTelemetry's stock one, into the real span store.

In: the number of spans. Out: a table, and as the last line one JSON object. Each competitor runs in a process of its own; what
arrived is counted in the store, by span id, so that a fast loss can't look like speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect

COMPETITORS = ("ours", "peer")
TEXT = "x" * 3000
"""Attribute of each span, as long as a short conversation."""


def emit(competitor: str, endpoint: str, spans: int) -> None:
    """Emit the burst, shut down, and print what it cost this process."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    if competitor == "ours":
        from span_processors.export import LosslessSpanProcessor, traces_url

        processor = LosslessSpanProcessor(traces_url(endpoint))
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces"))
    provider = TracerProvider(resource=Resource({"service.name": competitor}))
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("benchmark")
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(spans):
        with tracer.start_as_current_span("call", attributes={"input.value": TEXT, "number": number}):
            pass
    emitted = time.perf_counter() - wall
    provider.shutdown()
    print(json.dumps({"emit_seconds": emitted, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}))


def measure(store: StoreSettings, competitor: str, spans: int) -> dict[str, float]:
    """Run one competitor and count what it brought."""
    command = [sys.executable, __file__, "--emit", competitor, "--endpoint", store.otlp_endpoint, "--spans", str(spans)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    cost = json.loads(printed.splitlines()[-1])
    client = connect(store)
    query = "SELECT count(), uniqExact(SpanId) FROM otel.otel_traces WHERE ServiceName = {service:String}"
    rows, arrived = client.query(query, parameters={"service": competitor}).result_rows[0]
    client.close()
    return {
        "arrived": arrived,
        "lost": spans - arrived,
        "duplicated": rows - arrived,
        "seconds": round(cost["seconds"], 3),
        "cpu_us_an_arrived_span": round(cost["cpu_seconds"] / max(arrived, 1) * 1e6, 1),
    }


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--emit", choices=COMPETITORS)
    parser.add_argument("--endpoint", default="")
    arguments = parser.parse_args()
    if arguments.emit:
        emit(arguments.emit, arguments.endpoint, arguments.spans)
        return 0
    with scratch("span_export") as directory:
        grpc, http, sql = free_ports(3)
        store = StoreSettings(
            path=directory / "store",
            otlp_grpc_port=grpc,
            otlp_http_port=http,
            clickhouse_port=sql,
            url=f"http://127.0.0.1:{sql}",
            otlp_endpoint=f"http://127.0.0.1:{http}",
        )
        ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
        child = Child("store", own_command("store", "--path", str(store.path), *ports), directory / "log")
        try:
            wait_until(lambda: answers(f"{store.url}/ping"), 60, "the store", [child])
            figures_by_competitor = {competitor: measure(store, competitor, arguments.spans) for competitor in COMPETITORS}
        finally:
            child.stop()
    ours, peer = (figures_by_competitor[competitor] for competitor in COMPETITORS)
    for competitor, figures in figures_by_competitor.items():
        print(f"{competitor:5} " + "  ".join(f"{name} {value:,}" for name, value in figures.items()))
    ratio = {
        "arrived": round(ours["arrived"] / max(peer["arrived"], 1), 2),
        "cpu_us_an_arrived_span": round(peer["cpu_us_an_arrived_span"] / ours["cpu_us_an_arrived_span"], 2),
    }
    checked = {"lost": ours["lost"], "duplicated": ours["duplicated"]}
    print(json.dumps({"benchmark": "span_export", "ours": ours, "peer": peer, "ratio": ratio, "checked": checked}))
    return exit_code(checked)


if __name__ == "__main__":
    sys.exit(main())
