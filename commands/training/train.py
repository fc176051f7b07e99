"""`spangrad train`, and its subcommands for the groups that training skipped."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve

train = App(name="train", help="Train on finished groups of rollouts, once or as they finish.")
train.command("commands.training.train_skips:skipped", name="skipped", help="List the groups that the trainer skipped, and why.")
train.command("commands.training.train_skips:restore", name="restore", help="Bring skipped groups back.")


@train.default
def _train(
    *,
    follow: bool = False,
    once: bool = False,
    plan: bool = False,
    json: bool = False,
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
        plan: print what --once would train now, group by group, and why not the rest; change nothing.
        json: print the plan as JSON.
        model: directory of the weights that training begins with.
        run_id: the run whose rollouts are trained.
        max_steps: steps after which --follow ends.
    """
    from spangrad.errors import SettingsError

    if follow + once + plan > 1:
        raise SettingsError("--follow, --once and --plan contradict each other: give one.")
    if json and not plan:
        raise SettingsError("--json is the form of a plan: give --plan with it.")
    flags = {"trainer.model": model, "trainer.run_id": run_id, "trainer.max_steps": max_steps}
    settings = resolve(config, set_, flags)
    log_to_stderr()
    if plan:
        from commands.training.train_plan import as_json, show
        from trainer.data.planning import make_plan

        made = make_plan(settings)
        if json:
            print(as_json(made))
        else:
            show(made)
        return
    from trainer.loop import train as run_trainer

    run_trainer(settings, follow=follow)
