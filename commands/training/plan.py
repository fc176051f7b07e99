"""`spangrad plan`: memory and time of a model on GPUs that need not be here, and the settings that fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, flag_values, resolve
from commands.output_files import make_directory_of

if TYPE_CHECKING:
    from trainer.capacity.search import CapacityPlan


def plan(
    *,
    model: Path,
    gpus: str,
    nodes: int = 1,
    host_memory: float | None = None,
    write: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Plan a training run on GPUs that need not be here: memory by item, bytes moved, seconds of a step, and the settings that fit.

    Reads the model's config.json alone. Settings of the file and of --set stay as they are; the others are searched. Exits with 1 where
    nothing fits, after the nearest miss.

    Args:
        model: directory of the model, or its config.json.
        gpus: GPUs of one node, at most 64, as COUNTxMEMORY in GB or COUNTxNAME: 8x80, 8xH100.
        nodes: number of nodes.
        host_memory: main memory of a node, in GB. Default: what is needed is shown and held against nothing.
        write: settings file (TOML) that is written with the settings that fit; an existing one is refused.
        json: print the plan as one JSON object.
    """
    from commands.training.plan_report import as_json, settings_file, show
    from spangrad.errors import SettingsError, TrainerError
    from spangrad.settings.sources import explain_settings
    from trainer.capacity.architecture import read_architecture
    from trainer.capacity.hardware import cluster_of
    from trainer.capacity.search import best_of, by_layout, candidates

    if write:
        if write.exists():
            raise SettingsError(f"{write} exists already. Name another file with --write.")
        make_directory_of(write, "--write")
    kept = [origin.key for origin in explain_settings(flag_values(set_), file=config) if origin.source != "default"]
    cluster = cluster_of(gpus, nodes, host_memory)
    plans = candidates(read_architecture(model), resolve(config, set_), cluster, kept)
    best = best_of(plans)
    if json:
        print(as_json(best))
    else:
        show(best, by_layout(plans))
    if best.misses:
        raise TrainerError(_refusal(best))
    if write:
        with write.open("x") as out:
            out.write(settings_file(best, model))
        if not json:
            print(f"{write} is written. `spangrad config --config {write}` shows all settings.")


def _refusal(nearest: CapacityPlan) -> str:
    return (
        f"nothing fits {nearest.cluster.hosts} node(s) of {nearest.cluster.per_host} x {nearest.cluster.gpu.name}; in the nearest miss, "
        f"above, {'; '.join(nearest.misses)}. Plan with more or larger GPUs, a shorter engine.max_model_len, or a smaller model."
    )
