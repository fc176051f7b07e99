"""Pages that browsers load, from Jinja templates, and the directory of their style sheets, scripts and vendored assets.

In: names. Out: texts. Invariant: templates get names of our own alone; nothing of the store is put into markup.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from spangrad import __version__
from spangrad.settings import PageSettings

STATIC = Path(__file__).with_name("static")
PAGES = {
    "/": ("overview", "Overview"),
    "/rollouts": ("rollouts", "Rollouts"),
    "/rollout": ("rollout", "Rollout"),
    "/beside": ("beside", "Side by side"),
    "/call": ("call", "Call"),
    "/queue": ("queue", "Queue"),
    "/training": ("training", "Training"),
    "/version": ("version", "Version"),
    "/compare": ("compare", "Compare"),
    "/actions": ("actions", "Actions"),
    "/play": ("play", "Play"),
}
"""Path of a page -> its template and title."""
NAVIGATION = tuple((path, PAGES[path][1]) for path in ("/", "/rollouts", "/queue", "/training", "/compare", "/actions"))


class PageTemplates:
    """Templates of the page."""

    def __init__(self, settings: PageSettings) -> None:
        self._environment = Environment(
            loader=PackageLoader("page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._trace_url = settings.trace_url or ""

    def page(self, name: str, *, refused: bool = False, action_token: str = "") -> str:
        """Return the page of a template. Requests for actions must show `action_token`; empty: the page offers none.

        With `refused`, it says that a login has just been refused.
        """
        titles = dict(PAGES.values())
        return self._environment.get_template(f"{name}.html").render(
            name=name,
            title=titles.get(name, "Log in"),
            navigation=NAVIGATION,
            version=__version__,
            trace_url=self._trace_url,
            refused=refused,
            action_token=action_token,
        )
