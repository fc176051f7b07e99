"""`spangrad train`."""

from __future__ import annotations

from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def train(
    *,
    follow: bool = False,
    once: bool = False,
    model: Path | None = None,
    run_id: str | None = None,
    max_steps: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Train on finished groups of rollouts, once or as they finish.

    Args:
        follow: keep training as groups finish, until stopped.
        once: train on what has finished, then exit (the default).
        model: directory of the weights that training begins with.
        run_id: the run whose rollouts are trained.
        max_steps: steps after which --follow ends.
    """
    from spangrad.errors import SettingsError

    if follow and once:
        raise SettingsError("--follow and --once contradict each other: give one.")
    flags = {"trainer.model": model, "trainer.run_id": run_id, "trainer.max_steps": max_steps}
    settings = resolve(config, set_, flags)
    log_to_stderr()
    from trainer.loop import train as run_trainer

    run_trainer(settings, follow=follow)
