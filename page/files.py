"""Pages and files that browsers load: Jinja templates, style sheets, scripts, vendored assets; all from this package.

In: names. Out: texts and contents. Invariant: templates get names of our own alone; nothing of the store is put into markup.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined

from spangrad import __version__
from spangrad.settings import PageSettings

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
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


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    content_type: str
    etag: str


class PageFiles:
    """Templates and files of the page."""

    def __init__(self, settings: PageSettings) -> None:
        """Load the templates."""
        self._environment = Environment(
            loader=PackageLoader("page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._trace_url = settings.trace_url or ""
        self.pages = {path: name for path, (name, _) in PAGES.items()}

    def page(self, name: str, *, refused: bool = False, action_token: str = "") -> str:
        """Return a page.

        Args:
            name: name of its template.
            refused: whether a login has just been refused.
            action_token: text that requests for actions show; empty: the page offers none.
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

    @staticmethod
    def static(name: str) -> StaticFile | None:
        """Return a file below page/static. None: there is none of that name and of a type that browsers need."""
        return _static(name)


@lru_cache(256)
def _static(name: str) -> StaticFile | None:
    path = PurePosixPath(name)
    kind = _TYPES.get(path.suffix)
    if kind is None or path.is_absolute() or ".." in path.parts:
        return None
    file = files("page").joinpath("static", *path.parts)
    if not file.is_file():
        return None
    content = file.read_bytes()
    return StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
