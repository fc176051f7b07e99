"""Settings of the span store and of the collector before it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import Field

from spangrad.settings.section import Port, Section, ServerUrl, Token


class StoreSettings(Section):
    """Settings of the embedded span store, and its address for every other part."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `token`."""
    otlp_grpc_port: Port = 4317
    """TCP port of the store's OTLP/gRPC receiver."""
    otlp_http_port: Port = 4318
    """TCP port of the store's OTLP/HTTP receiver."""
    clickhouse_port: Port = 8123
    """TCP port of the store's ClickHouse HTTP interface."""
    path: Path = Path("data/store")
    """Directory of the embedded database. One process owns it."""
    token: Token | None = None
    """Bearer token (and ClickHouse password) required of every client. None: no token is required."""
    read_token: Token | None = None
    """Token of clients that may only read by SQL, within the reader's limits. None: there are no such clients."""
    reader_max_rows: int = Field(default=1_000_000, ge=10_000)
    """Largest number of rows in a response to the bearer of `read_token`. Drivers read some thousand when they connect."""
    reader_max_seconds: int = Field(default=60, ge=1)
    """Time limit of a statement of the bearer of `read_token`, in seconds; the transfer of its response included."""
    url: ServerUrl = "http://127.0.0.1:8123"
    """URL of ClickHouse's HTTP interface: this store's, a server's or a cluster's."""
    otlp_endpoint: ServerUrl = "http://127.0.0.1:4318"
    """URL to which spans are sent, by OTLP/HTTP."""
    linger_ms: float = 10
    """Time that a received request waits for others, to be written together with them, in milliseconds."""
    settle_seconds: float = Field(default=2, ge=0)
    """Time that acknowledged spans wait in the journal for others before they enter the tables, in seconds; a query ends the wait. 0: no
    wait."""
    queue_bytes: int = 256 * 2**20
    """Size limit of what is accepted and not yet committed, in bytes; beyond it, senders are asked to wait."""
    cluster: str | None = Field(default=None, pattern=r"^[\w.{}-]+$")
    """Name of the ClickHouse cluster that holds the tables, replicated. None: one server, such as the embedded store."""
    sharded: bool = False
    """True to distribute the tables over the cluster's shards."""
    sequential_consistency: bool | None = None
    """True if reads of the trainer and the builder must see every row that a quorum of replicas has acknowledged. None: True where
    store.cluster is set."""
    ttl_days: int | None = Field(default=None, ge=1)
    """Time for which spans and the rows built from them are kept, in days; those that a committed batch used stay. None: forever."""

    @property
    def password(self) -> str:
        """Return the password of statements: that of `url`, else `token`, else `read_token`. Empty: there is none."""
        token = self.token or self.read_token
        return unquote(urlsplit(self.url).password or "") or (token.get_secret_value() if token else "")

    @property
    def reads_in_sequence(self) -> bool:
        """Return whether reads that draw conclusions from missing rows request sequential consistency."""
        return self.cluster is not None if self.sequential_consistency is None else self.sequential_consistency


class CollectorSettings(Section):
    """Settings of the OpenTelemetry Collector before the store (`spangrad collector`)."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs a token."""
    otlp_grpc_port: Port = 14317
    """TCP port of the Collector's OTLP/gRPC receiver."""
    otlp_http_port: Port = 14318
    """TCP port of the Collector's OTLP/HTTP receiver."""
    health_port: Port = 13133
    """Port on loopback that answers health checks while the collector is up."""
    queue_path: Path = Path("data/collector")
    """Directory of the data that is accepted and not stored yet. One collector owns it."""
    queue_bytes: int = Field(default=2 * 2**30, ge=2**27)
    """Size limit of the queue of a signal (traces, logs), in bytes; beyond it, senders must wait. A request has 64 MiB at most."""
    token: Token | None = None
    """Bearer token required of senders. None: `store.token`, which spangrad's own processes send; without that, no token is required."""
    tls_certificate: Path | None = None
    """File (PEM) of the certificate that senders see. None: plain HTTP and gRPC."""
    tls_key: Path | None = None
    """File (PEM) of the certificate's key."""
    configs: tuple[Path, ...] = ()
    """Further configuration files of the collector, merged over otel-config.yaml; collector/distribution/redact.yaml is one."""
