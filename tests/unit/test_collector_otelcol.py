"""Start of `spangrad collector`: the binary it finds, the environment it hands on, and the settings it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from collector import otelcol
from spangrad.errors import SpangradError
from spangrad.http.tokens import agent_token
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings


def program(path: Path, script: str = "exit 0") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def settings(**flags: object) -> Settings:
    return load_settings({key.replace("__", "."): value for key, value in flags.items()}, env={})


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


def test_find_binary_prefers_variable_then_own_build(tmp_path: Path) -> None:
    ours, stock = program(tmp_path / "otelcol-spangrad"), program(tmp_path / "otelcol-contrib")
    named = program(tmp_path / "elsewhere" / "mine")
    path = str(tmp_path)

    assert otelcol.find_binary({"PATH": path}) == ours
    assert otelcol.find_binary({"PATH": path, "SPANGRAD_OTELCOL": named}) == named
    Path(ours).unlink()
    assert otelcol.find_binary({"PATH": path}) == stock


def test_find_binary_without_program_raises_with_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        SpangradError, match=r"none of otelcol-spangrad, otelcol-contrib, otelcol is in PATH\. Build it with `make otelcol`"
    ):
        otelcol.find_binary({"PATH": str(tmp_path)})
    with pytest.raises(SpangradError, match=r"SPANGRAD_OTELCOL = '.*none' is no file"):
        otelcol.find_binary({"PATH": str(tmp_path), "SPANGRAD_OTELCOL": str(tmp_path / "none")})
    (tmp_path / "plain").touch(0o644)
    with pytest.raises(SpangradError, match=r"may not be executed\. Make it executable: chmod"):
        otelcol.find_binary({"PATH": str(tmp_path), "SPANGRAD_OTELCOL": str(tmp_path / "plain")})


def test_require_room_queue_larger_than_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = tmp_path / "not" / "there" / "yet"
    collector = load_settings({"collector.queue_path": str(queue), "collector.queue_bytes": 2**30}, env={}).collector
    monkeypatch.setattr(otelcol.shutil, "disk_usage", lambda path: {tmp_path: DiskUsage(0, 0, 2**31 - 2**20)}[path])
    with pytest.raises(SpangradError) as caught:
        otelcol.require_room(collector)
    assert str(caught.value) == (
        f"collector.queue_path = {str(queue)!r} has room for 2047 MiB, and the queues of traces and logs may take 2048."
        " Set collector.queue_bytes to 1073217536 or less, or the path to a larger disk."
    )


def test_require_room_counts_existing_queue_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exporter_clickhouse__traces").write_bytes(bytes(2**20))
    collector = load_settings({"collector.queue_path": str(tmp_path), "collector.queue_bytes": 2**30}, env={}).collector
    monkeypatch.setattr(otelcol.shutil, "disk_usage", lambda path: {tmp_path: DiskUsage(0, 0, 2**31 - 2**20)}[path])
    otelcol.require_room(collector)


def test_otelcol_environment_has_settings() -> None:
    given = settings(
        store__url="https://me:p%40ss@ch.example",
        store__token="sesame",
        collector__host="::1",
        collector__queue_path="q",
        collector__token="a$b",
    )

    environment = otelcol.environment(given, {"PATH": "/bin", "GOGC": "50", "SPANGRAD_STORE__URL": "http://other"})

    assert environment == {
        "PATH": "/bin",
        "GOGC": "50",
        "GOMEMLIMIT": "768MiB",
        "CLICKHOUSE_COMPRESS": "lz4",
        "CLICKHOUSE_USER": "me",
        "CLICKHOUSE_PASSWORD": "p@ss",
        "SPANGRAD_STORE__URL": "https://ch.example:8443",
        "SPANGRAD_COLLECTOR__HOST": "[::1]",
        "SPANGRAD_COLLECTOR__OTLP_GRPC_PORT": "14317",
        "SPANGRAD_COLLECTOR__OTLP_HTTP_PORT": "14318",
        "SPANGRAD_COLLECTOR__HEALTH_PORT": "13133",
        "SPANGRAD_COLLECTOR__QUEUE_PATH": "q",
        "SPANGRAD_COLLECTOR__QUEUE_BYTES": str(2 * 2**30),
        # The Collector expands dollars; two are one.
        "SPANGRAD_COLLECTOR__TOKEN": "a$$b",
        "COLLECTOR_AGENT_TOKEN": agent_token("a$b"),
    }


def test_otelcol_environment_has_store_token_for_senders_and_store() -> None:
    environment = otelcol.environment(settings(store__token="sesame"), {})

    assert (environment["SPANGRAD_COLLECTOR__TOKEN"], environment["CLICKHOUSE_USER"], environment["CLICKHOUSE_PASSWORD"]) == (
        "sesame",
        "default",
        "sesame",
    )
    assert (environment["GOGC"], environment["CLICKHOUSE_COMPRESS"]) == ("200", "none")


def test_otelcol_configuration_files_follow_settings(tmp_path: Path) -> None:
    certificate, key = program(tmp_path / "c.pem"), program(tmp_path / "k.pem")
    tls = {"collector__tls_certificate": certificate, "collector__tls_key": key}

    def names(**flags: object) -> list[str]:
        files = otelcol.config_files(settings(**flags))
        assert all(file.is_file() for file in files[:3])
        return [file.name for file in files]

    assert names() == ["otel-config.yaml"]
    assert names(store__token="t") == names(collector__token="t") == ["otel-config.yaml", "token.yaml"]
    assert names(store__token="t", collector__configs=["mine.yaml"], **tls) == ["otel-config.yaml", "token.yaml", "tls.yaml", "mine.yaml"]
    with pytest.raises(SpangradError, match="need each other"):
        names(collector__tls_certificate=certificate)
    with pytest.raises(SpangradError, match=r"collector\.tls_key = 'nowhere' is no file"):
        names(**{**tls, "collector__tls_key": "nowhere"})
