"""`spangrad page`: the web page."""

from __future__ import annotations

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.stopped_store import answering_store


def page(*, port: int | None = None, host: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Serve the web page over the span store: rollouts, calls token by token, training steps, versions, and actions on them.

    If no store answers at store.url, the data of a stopped store (store.path, else the last demo's) is opened for as long as the page.

    Args:
        port: TCP port of the page.
        host: address to bind; anything but loopback needs page.token.
    """
    settings = resolve(config, set_, {"page.port": port, "page.host": host})
    log_to_stderr()
    from commands.inspection.actions import action_commands
    from commands.inspection.records import read_messages, read_record, read_skipped
    from page.server import serve
    from page.views import PageReaders

    with answering_store(settings.store) as store:
        serve(settings.model_copy(update={"store": store}), PageReaders(read_record, read_messages, read_skipped), action_commands())
