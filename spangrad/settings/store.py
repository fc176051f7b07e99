"""Settings of the span store and of the collector before it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from spangrad.settings.section import Section


class StoreSettings(Section):
    """The embedded span store, and where everybody else finds it."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `token`."""
    otlp_grpc_port: int = 4317
    otlp_http_port: int = 4318
    clickhouse_port: int = 8123
    path: Path = Path("data/store")
    """Directory of the embedded engine. One process owns it."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token (and ClickHouse password) asked of every client. None: nothing is asked."""
    read_token: SecretStr | None = Field(default=None, min_length=1)
    """Token of those who may only ask SQL questions, within the reader's limits. None: there are none."""
    reader_max_rows: int = Field(default=1_000_000, ge=10_000)
    """Rows of an answer to the bearer of `read_token`. Drivers read some thousand when they connect."""
    reader_max_seconds: int = Field(default=60, ge=1)
    """How long a statement of the bearer of `read_token` may run, its answer's way included."""
    url: str = "http://127.0.0.1:8123"
    """ClickHouse's HTTP interface: this store's, a server's or a cluster's."""
    otlp_endpoint: str = "http://127.0.0.1:4318"
    """Where spans are sent, by OTLP/HTTP."""
    linger_ms: float = 10
    """How long a request waits for company before it is written."""
    settle_seconds: float = Field(default=2, ge=0)
    """How long acknowledged spans wait for company in the journal before they enter the tables, unless somebody asks. 0: not at all."""
    queue_bytes: int = 256 * 2**20
    """Bytes accepted and not yet committed before senders are told to wait."""
    cluster: str | None = Field(default=None, pattern=r"^[\w.{}-]+$")
    """The ClickHouse cluster that holds the tables, replicated. None: one server, the embedded store say."""
    sharded: bool = False
    """Spread the tables over the cluster's shards."""
    sequential_consistency: bool | None = None
    """Whether the trainer's and the builder's reads ask for every row that a quorum of replicas has acknowledged. None: where
    store.cluster is set."""
    ttl_days: int | None = Field(default=None, ge=1)
    """How long spans and what was made of them are kept, but for what a committed batch used. None: for ever."""

    @property
    def reads_in_sequence(self) -> bool:
        """Whether reads that conclude from missing rows ask for sequential consistency."""
        return self.cluster is not None if self.sequential_consistency is None else self.sequential_consistency


class CollectorSettings(Section):
    """The real OpenTelemetry Collector before the store (`spangrad collector`)."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs a token."""
    otlp_grpc_port: int = 14317
    otlp_http_port: int = 14318
    health_port: int = 13133
    """Answers on loopback while the collector is up."""
    zpages_port: int = 55679
    """Pages on loopback that show what it does."""
    queue_path: Path = Path("data/collector")
    """Directory of what was accepted and is not stored yet. One collector owns it."""
    queue_bytes: int = Field(default=2 * 2**30, ge=2**27)
    """Bytes in the queue of a signal (traces, logs) before senders must wait. A request has 64 MiB at most."""
    memory_mib: int = Field(default=1024, ge=256)
    """Memory beyond which senders are told to come again."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token asked of senders. None: `store.token`, which our own parts show; without that, nothing is asked."""
    tls_certificate: Path | None = None
    """File (PEM) of the certificate that senders see. None: they speak plain HTTP and gRPC."""
    tls_key: Path | None = None
    """File (PEM) of the certificate's key."""
    configs: tuple[Path, ...] = ()
    """Further configuration files of the collector, merged over otel-config.yaml; collector/distribution/redact.yaml is one."""
