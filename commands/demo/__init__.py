"""`spangrad demo`: the whole loop on one machine, in minutes.

In: an example (a task, an agent, a tiny model). Out: a policy that learned it, `report.json` and a reward curve.
Every part is the real one, in a process of its own; they meet in the span store and over HTTP, as in production.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal

from commands.options import ConfigFile, Overrides, flag_values
from spangrad.errors import SpangradError

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
    """See the whole loop learn, on this machine.

    Args:
        seed: of the tiny model and of the engine's sampling.
        max_steps: training steps at the most.
        target: success rate, as the mean of three batches, at which training ends.
        group_size: rollouts a task in each batch.
        directory: where the run's data, logs, report and curve go; a second run starts clean.
        example: directory with the task, the agent and the model to make.
        collector: how spans reach the store: by its own receivers, or by the real OpenTelemetry Collector.
        gateway: whether the agent's calls go through the gateway, or straight to vLLM; new weights always go through it.
    """
    if not (example / "agent.py").is_file():
        raise SpangradError(f"{example} holds no agent.py. Run the demo from a checkout, or name an example with --example.")

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    from commands.demo.learning import Plan, learn

    plan = Plan(
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
