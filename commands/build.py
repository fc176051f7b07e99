"""`spangrad build`."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve


def build(*, follow: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Build transitions from complete rollouts, once or as they finish.

    Args:
        follow: keep building until stopped.
    """
    settings = resolve(config, set_)
    log_to_stderr()
    from transition_builder import loop

    if follow:
        loop.follow(settings)
    else:
        loop.build_once(settings)
