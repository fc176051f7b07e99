"""`spangrad collector`: the real OpenTelemetry Collector between unmodified agents and the store.

Spans whose acceptance a sender was told reach the store, whichever process was away in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from spangrad.http.tokens import agent_token
from spangrad.processes import Child, own_command, require_free_port, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect
from tests.support.fake_engine import FakeEngine
from tests.support.servers import PORTS, collector_values, otelcol, post, running_collector, running_store, start_collector, store_settings

ROOT = Path(__file__).parents[2]
DISTRIBUTION = ROOT / "collector" / "distribution"
AGENTS = ROOT / "tests" / "agents"


def spans(count: int, name: str = "work", scope: str = "", **attributes: str | bytes) -> tuple[bytes, set[str]]:
    """A request, and the ids of its spans; two underscores in an attribute's name stand for a dot."""
    values = [
        KeyValue(
            key=key.replace("__", "."), value=AnyValue(bytes_value=value) if isinstance(value, bytes) else AnyValue(string_value=value)
        )
        for key, value in attributes.items()
    ]
    built = [
        Span(trace_id=uuid.uuid4().bytes, span_id=os.urandom(8), name=name, start_time_unix_nano=1_700_000_000 * 10**9, attributes=values)
        for _ in range(count)
    ]
    scopes = ScopeSpans(scope=InstrumentationScope(name=scope), spans=built)
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scopes])])
    return request.SerializeToString(), {span.span_id.hex() for span in built}


def rows_of(store: StoreSettings, query: str, **parameters: object) -> list[tuple[object, ...]]:
    client = connect(store)
    try:
        return [tuple(row) for row in client.query(query, parameters=parameters).result_rows]
    finally:
        client.close()


def stored(store: StoreSettings, ids: set[str]) -> set[str]:
    """Return those of the span ids that the store has, and assert that it counts each once."""
    rows = rows_of(
        store, "SELECT SpanId FROM spangrad.rollout_spans WHERE RowKind = 'span' AND SpanId IN {ids:Array(String)}", ids=sorted(ids)
    )
    assert len(rows) == len(set(rows))
    return {str(row[0]) for row in rows}


def wait_stored(store: StoreSettings, ids: set[str]) -> None:
    wait_until(lambda: stored(store, ids) == ids, 60, f"{len(ids)} spans in the store")


# --- what is in the repository ---


@pytest.mark.parametrize(
    "more", [(), ("token",), ("tls",), ("redact",), ("token", "tls", "redact")], ids=lambda names: "+".join(names) or "alone"
)
def test_otelcol_configuration_with_each_overlay_validates(more: tuple[str, ...], tmp_path: Path) -> None:
    files = [ROOT / "otel-config.yaml", *(DISTRIBUTION / f"{name}.yaml" for name in more)]
    secrets = {f"SPANGRAD_COLLECTOR__{name}": "x" for name in ("TOKEN", "TLS_CERTIFICATE", "TLS_KEY")} if more else {}

    checked = subprocess.run(
        [otelcol(), "validate", *(f"--config={file}" for file in files)],
        env=secrets,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (checked.returncode, checked.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_otelcol_manifest_matches_components_of_built_program() -> None:
    manifest = yaml.safe_load((DISTRIBUTION / "builder.yaml").read_text())
    reported = yaml.safe_load(subprocess.run([otelcol(), "components"], capture_output=True, text=True, check=True).stdout)

    kinds = ("receivers", "processors", "exporters", "extensions", "providers")
    assert reported["buildinfo"]["command"] == manifest["dist"]["name"]
    assert reported["buildinfo"]["version"] == manifest["dist"]["version"]
    assert {kind: sorted(part["module"] for part in reported[kind]) for kind in kinds} == {
        kind: sorted(part["gomod"] for part in manifest[kind]) for kind in kinds
    }


def test_otelcol_configuration_uses_only_manifest_components() -> None:
    manifest = yaml.safe_load((DISTRIBUTION / "builder.yaml").read_text())
    built = "\n".join(
        part["gomod"].replace("_", "") for kind in ("receivers", "processors", "exporters", "extensions") for part in manifest[kind]
    )
    for file in (ROOT / "otel-config.yaml", *(DISTRIBUTION / f"{name}.yaml" for name in ("token", "tls", "redact"))):
        config = yaml.safe_load(file.read_text())
        used = {
            f"{name.split('/')[0].replace('_', '')}{kind[:-1]}"
            for kind in ("receivers", "processors", "exporters")
            for name in config.get(kind, ())
        }
        assert {part for part in used if not re.search(rf"/{part} ", built)} == set()


# --- the way of a span ---


async def test_collector_with_unmodified_agent_fills_store(store: StoreSettings, tmp_path: Path) -> None:
    program = "import asyncio, plain_agents; print(asyncio.run(plain_agents.ask({'city': 'rome'})))"
    with running_collector(store, collector_values(tmp_path), tmp_path / "log") as collector:
        service = uuid.uuid4().hex
        async with FakeEngine().running() as engine:
            agent = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("opentelemetry-instrument")),
                *(sys.executable, "-c", program),
                cwd=AGENTS,
                env={
                    "PATH": os.environ["PATH"],
                    "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                    "OTEL_SERVICE_NAME": service,
                    "OPENAI_BASE_URL": f"{engine}/v1",
                    "OPENAI_API_KEY": "none",
                },
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await asyncio.wait_for(agent.communicate(), 120)  # it imports much
        assert (agent.returncode, out.decode().strip()) == (0, "0.0"), errors.decode()

        def read() -> list[tuple[object, ...]]:
            return rows_of(
                store,
                "SELECT SpanName, ScopeName FROM spangrad.rollout_spans WHERE ServiceName = {service:String} ORDER BY ALL",
                service=service,
            )

        await asyncio.to_thread(wait_until, lambda: len(read()) == 2, 30, "the agent's spans")
        assert read() == [("ChatCompletion", "openinference.instrumentation.openai"), ("POST", "opentelemetry.instrumentation.httpx")]
        # What an agent sends beside its spans is no error for it.
        assert post(f"{collector.url}/v1/metrics", b"") == 200


def test_collector_spans_end_a_wait_for_arrivals(store: StoreSettings, tmp_path: Path) -> None:
    with running_collector(store, collector_values(tmp_path), tmp_path / "log") as collector:
        arrivals = Arrivals(connect(store), store, [Topic.ROOTS])
        arrivals.wait(0)
        assert post(f"{collector.url}/v1/traces", spans(1)[0]) == 200
        assert arrivals.wait(20) == {Topic.ROOTS}


def test_collector_span_larger_than_batch_is_stored(store: StoreSettings, tmp_path: Path) -> None:
    body, ids = spans(1, text="x" * (20 * 2**20))
    with running_collector(store, collector_values(tmp_path), tmp_path / "log") as collector:
        assert post(f"{collector.url}/v1/traces", body) == 200
        wait_stored(store, ids)
    (length,) = rows_of(store, "SELECT length(SpanAttributes['text']) FROM otel.otel_traces WHERE SpanId = {id:String}", id=ids.pop())
    assert length == (20 * 2**20,)


@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_collector_stopped_or_store_away_stores_every_accepted_span(tmp_path: Path, end: signal.Signals) -> None:
    store, values = store_settings(tmp_path / "data"), collector_values(tmp_path)
    batches = [spans(50) for _ in range(6)]
    sent = iter(batches)
    with running_store(store, tmp_path / "store.log"), running_collector(store, values, tmp_path / "log") as collector:
        traces = f"{collector.url}/v1/traces"
        assert post(traces, next(sent)[0]) == 200
    with running_store(store, tmp_path / "store.log") as child, running_collector(store, values, tmp_path / "log") as collector:
        child.stop()
        assert [post(traces, next(sent)[0]) for _ in range(2)] == [200, 200]
        with running_store(store, tmp_path / "store.log"):
            # It never stopped, and finds the store by itself.
            wait_stored(store, batches[1][1] | batches[2][1])
            collector.child.process.send_signal(signal.SIGHUP)
            # Until then the receiver of before may still take spans.
            wait_until(lambda: _reloaded(collector.child.log.read_text()), 60, "the reload")
            wait_until(lambda: _takes(traces, batches[3][0]), 60, "the collector after its reload")
        next(sent)
        # The store is away again, and then the collector.
        assert [post(traces, next(sent)[0]) for _ in range(2)] == [200, 200]
        collector.child.process.send_signal(end)
        assert collector.child.process.wait(60) == (-end if end is signal.SIGKILL else 0)
        for port in PORTS:
            require_free_port("127.0.0.1", int(str(values[port])), port)
    with running_store(store, tmp_path / "store.log"), running_collector(store, values, tmp_path / "log"):
        wait_stored(store, set[str]().union(*(ids for _, ids in batches)))
        assert rows_of(store, "SELECT count() FROM spangrad.rollout_spans") == [(300,)]


def _reloaded(log: str) -> bool:
    return "Everything is ready" in log.partition("Config updated, restart service")[2]


def _takes(url: str, body: bytes) -> bool:
    try:
        return post(url, body) == 200
    except OSError:
        return False


def test_otelcol_without_token_variables_refuses_every_sender(tmp_path: Path) -> None:
    files = (ROOT / "otel-config.yaml", DISTRIBUTION / "token.yaml")
    values = collector_values(tmp_path)
    variables = {f"SPANGRAD_COLLECTOR__{name.upper()}": str(value) for name, value in values.items()}
    command = [otelcol(), *(f"--config={file}" for file in files)]
    collector = Child("otelcol", command, tmp_path / "log", variables, inherit_settings=False)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{values['otlp_grpc_port']}") as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
            for shown in ("Bearer ", "Bearer other"):
                with pytest.raises(grpc.RpcError) as caught:
                    TraceServiceStub(channel).Export(ExportTraceServiceRequest(), timeout=30, metadata=(("authorization", shown),))
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    finally:
        collector.stop()


def test_collector_requires_token_over_tls(store: StoreSettings, tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    values = collector_values(tmp_path, token="o$pen{1}", tls_certificate=str(certificate), tls_key=str(key))
    (refused, _), (body, ids) = spans(1), spans(1)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with running_collector(store, values, tmp_path / "log") as collector:
        url = f"{collector.url.replace('http:', 'https:')}/v1/traces"

        def status(sent: bytes, **headers: str) -> int:
            request = urllib.request.Request(url, sent, {"Content-Type": "application/x-protobuf", **headers})
            try:
                with urllib.request.urlopen(request, context=trusting, timeout=30) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code

        shown = ("other", "o$pen{1}", agent_token("o$pen{1}"))
        answers = [status(refused), *(status(body, Authorization=f"Bearer {token}") for token in shown)]
        with (
            grpc.secure_channel(collector.grpc, grpc.ssl_channel_credentials(certificate.read_bytes())) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            TraceServiceStub(channel).Export(ExportTraceServiceRequest(), timeout=30)

        assert answers == [401, 401, 200, 200]
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        wait_stored(store, ids)


def test_collector_redacted_call_keeps_no_ids(store: StoreSettings, tmp_path: Path) -> None:
    ids = {
        "spangrad__input__token_ids": b"\1\0\0\0",
        "spangrad__output__token_ids": b"\2\0\0\0",
        "spangrad__output__logprobs": bytes(4),
    }
    run, mail = uuid.uuid4().hex, "write to ada.b@example.org now"
    bodies = [
        spans(1, "secret", "spangrad.gateway", spangrad__run__id=run, spangrad__request__json=mail, spangrad__response__json="ok", **ids)[
            0
        ],
        spans(1, "plain", "spangrad.gateway", spangrad__run__id=run, spangrad__request__json="hello", spangrad__response__json="ok", **ids)[
            0
        ],
        spans(
            1,
            "answer",
            "openinference.instrumentation.openai",
            spangrad__run__id=run,
            input__value=mail,
            output__value='{"token_ids": [2]}',
        )[0],
        spans(1, "health", spangrad__run__id=run, url__path="/healthz")[0],
    ]
    values = collector_values(tmp_path, configs=[str(DISTRIBUTION / "redact.yaml")])
    with running_collector(store, values, tmp_path / "log") as collector:
        assert [post(f"{collector.url}/v1/traces", body) for body in bodies] == [200] * len(bodies)
        kept = "mapFilter((k, v) -> k != 'spangrad.run.id', SpanAttributes)"
        ours = "SpanAttributes['spangrad.run.id'] = {run:String}"
        asked = f"SELECT SpanName, {kept} FROM otel.otel_traces WHERE {ours} ORDER BY SpanName"
        wait_until(lambda: len(rows_of(store, asked, run=run)) == 3, 30, "the spans")
    redacted = "write to [email] now"
    assert rows_of(store, asked, run=run) == [
        ("answer", {"input.value": redacted}),
        (
            "plain",
            {
                "spangrad.input.token_ids": "AQAAAA==",
                "spangrad.request.json": "hello",
                "spangrad.response.json": "ok",
                "spangrad.output.logprobs": "AAAAAA==",
                "spangrad.output.token_ids": "AgAAAA==",
            },
        ),
        ("secret", {"spangrad.redacted": "true", "spangrad.request.json": redacted, "spangrad.response.json": "ok"}),
    ]
    calls = "SELECT Redacted, PromptIds, ResponseIds, Logprobs FROM spangrad.calls WHERE RunId = {run:String} ORDER BY Redacted"
    assert rows_of(store, calls, run=run) == [(False, [1], [2], [0.0]), (True, [], [], [])]


@pytest.mark.slow
@pytest.mark.vllm
def test_demo_through_collector_stores_spans(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    flags = ["--collector", "otelcol", "--max-steps", "1", "--group-size", "4", "--directory", str(run)]
    demo = subprocess.run(
        own_command("demo", *flags),
        env={**os.environ, "SPANGRAD_OTELCOL": otelcol()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert demo.returncode == 0, demo.stdout + demo.stderr
    report = json.loads((run / "report.json").read_text())
    settings = tomllib.loads((run / "spangrad.toml").read_text())
    assert report["calls"] == report["transitions"] + report["dropped_calls"] > 0
    assert (report["steps"], report["rollouts"], report["policy_versions"]) == (1, 32, 2)
    assert settings["store"]["otlp_endpoint"] == f"http://127.0.0.1:{settings['collector']['otlp_http_port']}"
    for port in PORTS:
        require_free_port("127.0.0.1", settings["collector"][port], port)


# --- what it refuses to start with ---


def _refused(store: StoreSettings, tmp_path: Path, **changes: object) -> str:
    child = start_collector(store, collector_values(tmp_path, **changes), tmp_path / "log")
    try:
        assert child.process.wait(60) == 1
        return child.log.read_text()
    finally:
        child.stop()


def test_collector_with_unreachable_store_refuses_to_start_and_names_it(tmp_path: Path) -> None:
    store = store_settings(tmp_path / "data")
    assert _refused(store, tmp_path) == (
        f"spangrad: the span store at {store.url} does not answer (Connection refused). Start it with `spangrad store`, or set store.url.\n"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("DROP TABLE spangrad_internal.schema_migrations", "lacks 0001_otel.sql, 0002_rollouts.sql, "),
        (
            "INSERT INTO spangrad_internal.schema_migrations (Number, Name, Layout) VALUES (999, '0999_later.sql', 'one server')",
            "this spangrad is older than the store",
        ),
    ],
    ids=["older", "newer"],
)
def test_collector_with_other_store_schema_refuses_to_start(tmp_path: Path, change: str, sentence: str) -> None:
    store = store_settings(tmp_path / "data")
    with running_store(store, tmp_path / "store.log"):
        client = connect(store)
        client.command(change)
        client.close()
        message = _refused(store, tmp_path)
    assert sentence in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"host": "0.0.0.0"}, "Set collector.token, or bind 127.0.0.1."),
        ({"otlp_http_port": "TAKEN"}, "Stop what uses it, or set collector.otlp_http_port to another port."),
        ({"configs": ["nowhere.yaml"]}, "nowhere.yaml"),
        ({"tls_certificate": "nowhere.pem", "tls_key": "nowhere.key"}, "collector.tls_certificate = 'nowhere.pem' is no file."),
    ],
    ids=["host", "port", "config", "certificate"],
)
def test_collector_user_errors_are_one_sentence(store: StoreSettings, tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    taken = {key: store.clickhouse_port if value == "TAKEN" else value for key, value in changes.items()}
    message = _refused(store, tmp_path, **taken)
    assert sentence in message
    assert (message.startswith("spangrad: "), message.count("\n")) == (True, 1)


def test_collector_with_non_executable_otelcol_names_it(store: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake").write_bytes(b"\x7fELF nothing")
    (tmp_path / "fake").chmod(0o755)
    monkeypatch.setenv("SPANGRAD_OTELCOL", str(tmp_path / "fake"))
    assert "fake does not run (Exec format error). Set SPANGRAD_OTELCOL to an OpenTelemetry Collector" in _refused(store, tmp_path)


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])

    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = directory / "certificate.pem", directory / "key.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    secret.write_bytes(key.private_bytes(*form))
    return certificate, secret
