"""`spangrad demo`: the whole training loop on one machine, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from commands.options import ConfigFile, Overrides, flag_values
from spangrad.errors import SettingsError, SpangradError
from spangrad.processes import end_by_interrupt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_tools"


def demo(
    *,
    seed: int = 0,
    max_steps: int = 80,
    target: float = 0.97,
    group_size: int = 32,
    directory: Path = Path("runs/demo"),
    example: Path = EXAMPLE,
    collector: Literal["embedded", "otelcol"] = "embedded",
    gateway: Literal["on", "off"] = "on",
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run the whole training loop on this machine: train a tiny model until its agent succeeds, then write a report.

    Args:
        seed: random seed of the tiny model's weights and of the engine's sampling.
        max_steps: maximum number of training steps.
        target: success rate, from 0 to 1, at which training ends; compared with the mean of the last three batches.
        group_size: rollouts per task in each batch.
        directory: directory for the run's data, logs, report and reward curve; files of an earlier demo in it are deleted first.
        example: directory with the task, the agent and the script that makes the model.
        collector: path of spans to the store: "embedded" for the store's own receivers, "otelcol" for the real OpenTelemetry Collector.
        gateway: "on": the agent's calls go through the gateway; "off": they go to vLLM directly. New weights always go through the gateway.
    """
    if not (example / "agent.py").is_file():
        raise SpangradError(f"{example} holds no agent.py. Run the demo from a checkout, or name an example with --example.")

    if max_steps < 1:
        raise SettingsError(f"--max-steps {max_steps} leaves nothing to do. Give at least 1.")
    if not 0 <= target <= 1:
        raise SettingsError(f"--target {target} is no success rate. Give one from 0 to 1.")

    end_by_interrupt()
    from commands.demo.learning import DemoPlan, learn

    plan = DemoPlan(
        example=example.resolve(),
        directory=directory,
        seed=seed,
        max_steps=max_steps,
        target=target,
        group_size=group_size,
        otelcol=collector == "otelcol",
        gateway=gateway == "on",
    )
    learn(plan, flag_values(set_), config)
