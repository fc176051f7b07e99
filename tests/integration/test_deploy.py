"""The units in deploy/: they parse, their parts fit together, and every command and setting in them is one that `spangrad` takes."""

from __future__ import annotations

import configparser
import os
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

from commands.options import flag_values
from spangrad.cli import app
from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings, variable_of

DEPLOY = Path(__file__).parents[2] / "deploy"
EXECUTABLE = "/opt/spangrad/bin/spangrad"
UNITS = sorted((DEPLOY / "systemd").iterdir())
DOCUMENTS: list[dict[str, Any]] = [
    document for file in sorted((DEPLOY / "kubernetes").iterdir()) for document in yaml.safe_load_all(file.read_text())
]
SLURM = sorted((DEPLOY / "slurm").glob("*.sbatch"))
CRON = [line for line in (DEPLOY / "cron/spangrad-train").read_text().splitlines() if line.startswith("*")]


class Unit(configparser.RawConfigParser):
    def __init__(self, file: Path) -> None:
        super().__init__(strict=True)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(file)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod's specification, by what makes it."""
    for document in DOCUMENTS:
        spec = document["spec"]["jobTemplate"]["spec"] if document["kind"] == "CronJob" else document.get("spec", {})
        if "template" in spec:
            yield f"{document['kind']}/{document['metadata']['name']}", spec["template"]["spec"]


def commands() -> Iterator[tuple[str, list[str]]]:
    for unit in UNITS:
        if unit.suffix == ".service":
            yield unit.name, shlex.split(Unit(unit)["Service"]["ExecStart"])
    for name, pod in pods():
        yield from (
            (f"{name}/{container['name']}", [word.replace("$(POD_IP)", "10.0.0.7") for word in container["command"]])
            for container in pod["containers"]
        )
    for line in CRON:
        words = shlex.split(line.split("&&")[1].partition(">>")[0])
        yield "cron", words[words.index(EXECUTABLE) :]


COMMANDS = list(commands())


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_deploy_commands_parse_in_cli(place: str, command: list[str]) -> None:
    settings_of(command)


def settings_of(command: list[str]) -> Settings:
    """Return the settings that a command's --set give, once it parses."""
    executable, *arguments = command
    assert executable == EXECUTABLE
    function, bound, ignored = app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert (function.__name__, ignored) == ({"queue": "_serve", "train": "_train"}.get(arguments[0], arguments[0]), {})
    assert bound.arguments.keys() <= {"follow", "once", "port", "options", "set_"}
    return load_settings(flag_values(bound.arguments.get("set_")), env={})


def test_deploy_every_service_has_unit_and_container() -> None:
    subcommands = {place.split("/")[0] if "/" not in place else "kubernetes": set[str]() for place, _ in COMMANDS}
    for place, command in COMMANDS:
        subcommands["kubernetes" if "/" in place else place] |= {re.split(r" --(?!follow|once)", " ".join(command[1:]))[0]}
    everything = {"store", "engine", "gateway", "queue", "build --follow", "train --follow", "train --once"}
    assert subcommands.pop("kubernetes") == everything | {"worker"}
    assert subcommands.pop("cron") == {"train --once"}
    assert {subcommand for commands in subcommands.values() for subcommand in commands} == everything


@pytest.mark.parametrize("arguments", [["train", "--hourly"], ["trian"], ["build", "--follow", "extra"]])
def test_deploy_check_rejects_unknown_command(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)unknown|unused|unable|invalid"):
        app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_deploy_settings_load_and_ports_match(tmp_path: Path) -> None:
    settings = load_settings(file=DEPLOY / "spangrad.toml", env={})
    (config,) = [document for document in DOCUMENTS if document["kind"] == "ConfigMap"]
    (tmp_path / "spangrad.toml").write_text(config["data"]["spangrad.toml"])
    cluster = load_settings(
        file=tmp_path / "spangrad.toml",
        env={"SPANGRAD_STORE__TOKEN": "s", "SPANGRAD_GATEWAY__TOKEN": "g", "SPANGRAD_QUEUE__TOKEN": "q"},
    )
    assert settings.trainer.modes == cluster.trainer.modes == ("train", "production")
    assert settings.engine.model == settings.trainer.model
    assert cluster.engine.model == cluster.trainer.model
    ports = {
        document["metadata"]["name"]: {port["port"] for port in document["spec"]["ports"]}
        for document in DOCUMENTS
        if document["kind"] == "Service"
    }
    store, gateway = cluster.store, cluster.gateway
    assert ports == {
        "spangrad-store": {store.otlp_grpc_port, store.otlp_http_port, store.clickhouse_port},
        "spangrad-gateway": {gateway.port},
        "spangrad-queue": {cluster.queue.port},
    }
    assert settings.queue.url == f"http://{settings.queue.host}:{settings.queue.port}"
    assert cluster.queue.url
    for url in (store.url, store.otlp_endpoint, gateway.url, cluster.queue.url):
        host, port = url.removeprefix("http://").split(":")
        assert int(port) in ports[host]


def test_deploy_kubernetes_objects_are_consistent() -> None:
    kinds = [(document["kind"], document["metadata"]["name"]) for document in DOCUMENTS]
    assert len(kinds) == len(set(kinds))
    claims = {name for kind, name in kinds if kind == "PersistentVolumeClaim"}
    for name, pod in pods():
        assert pod["enableServiceLinks"] is False, name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume}
        assert used <= claims, name
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys(), name
            (config,) = [variable["value"] for variable in container["env"] if variable["name"] == "SPANGRAD_CONFIG"]
            assert Path(config).parent == Path(mounts["settings"])
            # vLLM gets no tokens but those of its registration; in the gateway's pod it takes orders from its own pod alone.
            assert ("envFrom" in container) is (container["name"] != "engine")
            variables = {variable["name"] for variable in container["env"]} - {"SPANGRAD_CONFIG", "POD_IP"}
            assert variables == ({"SPANGRAD_GATEWAY__TOKEN", "SPANGRAD_ENGINE__TOKEN"} if name == "Deployment/spangrad-engine" else set())
            assert variables <= {variable_of(origin.key) for origin in explain_settings(env={})}
    for document in DOCUMENTS:
        if document["kind"] == "Deployment":
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
    (cron,) = [document for document in DOCUMENTS if document["kind"] == "CronJob"]
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert re.fullmatch(r"(\S+ ){4}\S+", cron["spec"]["schedule"])


def submitted(script: Path, directory: Path, **variables: str) -> tuple[list[str], list[str]]:
    """Run a batch script as Slurm would, with programs that write down how they are called; return its last command, and the steps."""
    calls = directory / "calls"
    calls.mkdir()
    # Written whole, and then given its name.
    stub = '#!/bin/bash\nown=$(basename "$0")-$$\nprintf "%s\\0" "$own" "$@" > "$CALLS/.$own"\nmv "$CALLS/.$own" "$CALLS/$own"\n'
    replies = {"hostname": '[ "$1" = -s ] && echo node1 || echo 10.0.0.7 172.17.0.1', "ray": 'echo " 0.0/16.0 GPU"'}
    programs = directory / "bin"
    programs.mkdir()
    for name in ("spangrad", "ray", "srun", "hostname"):
        (programs / name).write_text(stub + replies.get(name, ""))
        (programs / name).chmod(0o755)
    (directory / "environment").write_text("SPANGRAD_GATEWAY__TOKEN=g\n")
    text = (
        script.read_text()
        .replace("/opt/spangrad/bin", str(programs))
        .replace("/shared/spangrad/environment", str(directory / "environment"))
    )
    environment = {"PATH": f"{programs}:{os.defpath}", "CALLS": str(calls), **variables}
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=environment, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    count = 2 if int(variables.get("SLURM_NNODES", "1")) > 1 else 0
    wait_until(lambda: len(list(calls.glob("srun-*"))) == count, 60, "the job's steps")
    invocations = {file.name: file.read_text().split("\0")[:-1] for file in calls.glob("[!.]*")}
    (last,) = [words for name, words in invocations.items() if name.startswith("spangrad-")]
    return [EXECUTABLE, *last[1:]], [" ".join(words) for name, words in invocations.items() if name.startswith("srun-")]


def test_deploy_slurm_engines_register_at_ports_of_their_own(tmp_path: Path) -> None:
    command, steps = submitted(DEPLOY / "slurm/spangrad-engine.sbatch", tmp_path, SLURM_ARRAY_TASK_ID="3")
    settings = settings_of(command)
    assert (command[1:4], steps) == (["engine", "--port", "8003"], [])
    assert (settings.engine.host, settings.engine.url) == ("10.0.0.7", "http://10.0.0.7:8003")
    assert settings.engine.cache_dir == Path("/tmp/spangrad-vllm-8003")


def test_deploy_slurm_workers_take_rollouts(tmp_path: Path) -> None:
    command, steps = submitted(DEPLOY / "slurm/spangrad-worker.sbatch", tmp_path)
    settings_of(command)
    assert (command[1], steps) == ("worker", [])


@pytest.mark.parametrize("nodes", [1, 2])
def test_deploy_slurm_trainer_has_a_rank_for_each_gpu(tmp_path: Path, nodes: int) -> None:
    command, steps = submitted(DEPLOY / "slurm/spangrad-train.sbatch", tmp_path, SLURM_NNODES=str(nodes), SLURM_GPUS_ON_NODE="8")
    workers = settings_of(command).trainer.workers
    assert command[1:3] == ["train", "--follow"]
    assert (workers.per_node, workers.nodes) == (8, nodes)
    assert workers.ray_address == ("10.0.0.7:6379" if nodes > 1 else None)
    assert sorted("--head" in step for step in steps) == [False, True] * (nodes - 1)
    assert all("--block" in step and "6379" in step for step in steps)


@pytest.mark.parametrize("script", SLURM, ids=[script.name for script in SLURM])
def test_deploy_slurm_options_come_before_commands(script: Path) -> None:
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash"
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    assert f"#SBATCH --job-name={script.stem}" in options
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert [line for line in lines[first:] if line.startswith("#SBATCH")] == []


def test_deploy_slurm_settings_load_and_name_one_host() -> None:
    settings = load_settings(
        file=DEPLOY / "slurm/spangrad.toml",
        env={"SPANGRAD_STORE__TOKEN": "s", "SPANGRAD_GATEWAY__TOKEN": "g", "SPANGRAD_QUEUE__TOKEN": "q"},
    )
    store, gateway, queue = settings.store, settings.gateway, settings.queue
    assert store.url == f"http://{store.host}:{store.clickhouse_port}"
    assert store.otlp_endpoint == f"http://{store.host}:{store.otlp_http_port}"
    assert (gateway.url, gateway.engine_url) == (f"http://{gateway.host}:{gateway.port}", "")
    assert queue.url == f"http://{queue.host}:{queue.port}"
    assert settings.runner.run_id == settings.trainer.run_id


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
