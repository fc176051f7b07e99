"""`spangrad train`: training on rollouts, and its subcommands for skipped groups."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve

train = App(name="train", help="Train on finished groups of rollouts, once or as they finish.")
train.command("commands.training.train_skips:skipped", name="skipped", help="List the groups that the trainer skipped, with the reasons.")
train.command("commands.training.train_skips:restore", name="restore", help="Make skipped groups trainable again.")


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
        once: train on the groups that have finished, then exit (the default).
        plan: print, group by group, whether --once would train it now, or why not; train nothing.
        json: print the plan as JSON.
        model: directory of the weights that training begins with; default: trainer.model.
        run_id: id of the run whose rollouts are trained; default: trainer.run_id.
        max_steps: number of training steps after which --follow ends; default: trainer.max_steps.
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

        training_plan = make_plan(settings)
        if json:
            print(as_json(training_plan))
        else:
            show(training_plan)
        return
    if follow:
        from spangrad.http.readiness import await_services, need_of_store

        await_services(need_of_store(settings), settings.engine.start_timeout_seconds)
    from trainer.run import train as run_trainer

    run_trainer(settings, follow=follow)
