"""The units in deploy/: they parse, their parts fit together, and every command in them is one that `spangrad` takes."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spangrad.cli import app
from spangrad.settings.sources import load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
EXECUTABLE = "/opt/spangrad/bin/spangrad"
UNITS = sorted((DEPLOY / "systemd").iterdir())
DOCUMENTS: list[dict[str, Any]] = [
    one for file in sorted((DEPLOY / "kubernetes").iterdir()) for one in yaml.safe_load_all(file.read_text())
]
CRON = [line for line in (DEPLOY / "cron/spangrad-train").read_text().splitlines() if line.startswith("*")]


class Unit(configparser.RawConfigParser):
    def __init__(self, file: Path) -> None:
        super().__init__(strict=True)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(file)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod's specification, by what makes it."""
    for one in DOCUMENTS:
        spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one.get("spec", {})
        if "template" in spec:
            yield f"{one['kind']}/{one['metadata']['name']}", spec["template"]["spec"]


def commands() -> Iterator[tuple[str, list[str]]]:
    for unit in UNITS:
        if unit.suffix == ".service":
            yield unit.name, shlex.split(Unit(unit)["Service"]["ExecStart"])
    for name, pod in pods():
        yield from ((f"{name}/{one['name']}", one["command"]) for one in pod["containers"])
    for line in CRON:
        words = shlex.split(line.split("&&")[1].partition(">>")[0])
        yield "cron", words[words.index(EXECUTABLE) :]


COMMANDS = list(commands())


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_deploy_commands_parse_in_cli(place: str, command: list[str]) -> None:
    executable, *arguments = command
    assert executable == EXECUTABLE
    function, bound, ignored = app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert (function.__name__, ignored) == ({"queue": "_serve", "train": "_train"}.get(arguments[0], arguments[0]), {})
    assert [name for name in bound.arguments if name not in {"follow", "once"}] == []


def test_deploy_every_service_has_unit_and_container() -> None:
    told = {place.split("/")[0] if "/" not in place else "kubernetes": set[str]() for place, _ in COMMANDS}
    for place, command in COMMANDS:
        told["kubernetes" if "/" in place else place] |= {" ".join(command[1:])}
    everything = {"store", "engine", "gateway", "queue", "build --follow", "train --follow", "train --once"}
    assert told.pop("kubernetes") == everything
    assert told.pop("cron") == {"train --once"}
    assert {one for commands in told.values() for one in commands} == everything


@pytest.mark.parametrize("arguments", [["train", "--hourly"], ["trian"], ["build", "--follow", "extra"]])
def test_deploy_check_rejects_unknown_command(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)unknown|unused|unable|invalid"):
        app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_deploy_settings_load_and_ports_match(tmp_path: Path) -> None:
    here = load_settings(file=DEPLOY / "spangrad.toml", env={})
    (config,) = [one for one in DOCUMENTS if one["kind"] == "ConfigMap"]
    (tmp_path / "spangrad.toml").write_text(config["data"]["spangrad.toml"])
    cluster = load_settings(
        file=tmp_path / "spangrad.toml",
        env={"SPANGRAD_STORE__TOKEN": "s", "SPANGRAD_GATEWAY__TOKEN": "g", "SPANGRAD_QUEUE__TOKEN": "q"},
    )
    assert here.trainer.modes == cluster.trainer.modes == ("train", "production")
    assert here.engine.model == here.trainer.model
    assert cluster.engine.model == cluster.trainer.model
    ports = {one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]} for one in DOCUMENTS if one["kind"] == "Service"}
    store, gateway = cluster.store, cluster.gateway
    assert ports == {
        "spangrad-store": {store.otlp_grpc_port, store.otlp_http_port, store.clickhouse_port},
        "spangrad-gateway": {gateway.port},
        "spangrad-queue": {cluster.queue.port},
    }
    assert here.queue.url == f"http://{here.queue.host}:{here.queue.port}"
    assert cluster.queue.url
    for url in (store.url, store.otlp_endpoint, gateway.url, cluster.queue.url):
        host, port = url.removeprefix("http://").split(":")
        assert int(port) in ports[host]


def test_deploy_kubernetes_objects_are_consistent() -> None:
    kinds = [(one["kind"], one["metadata"]["name"]) for one in DOCUMENTS]
    assert len(kinds) == len(set(kinds))
    claims = {name for kind, name in kinds if kind == "PersistentVolumeClaim"}
    for name, pod in pods():
        volumes = {one["name"]: one for one in pod["volumes"]}
        used = {one["persistentVolumeClaim"]["claimName"] for one in volumes.values() if "persistentVolumeClaim" in one}
        assert used <= claims, name
        for container in pod["containers"]:
            mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys(), name
            (config,) = [one["value"] for one in container["env"] if one["name"] == "SPANGRAD_CONFIG"]
            assert Path(config).parent == Path(mounts["settings"])
            # vLLM gets no tokens: it takes orders from its own pod alone.
            assert ("envFrom" in container) is (container["name"] != "engine")
    for one in DOCUMENTS:
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    (cron,) = [one for one in DOCUMENTS if one["kind"] == "CronJob"]
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert re.fullmatch(r"(\S+ ){4}\S+", cron["spec"]["schedule"])


def test_deploy_systemd_units_verify(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("systemd-analyze is not there")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(EXECUTABLE, sys.executable))
    paths = [str(tmp_path / unit.name) for unit in UNITS]
    verified = subprocess.run([analyze, "verify", "--man=no", *paths], capture_output=True, text=True, check=False)
    assert (verified.returncode, [line for line in verified.stderr.splitlines() if str(tmp_path) in line]) == (0, [])
    calendar = Unit(DEPLOY / "systemd/spangrad-train.timer")["Timer"]["OnCalendar"]
    assert subprocess.run([analyze, "calendar", calendar], capture_output=True, check=False).returncode == 0
