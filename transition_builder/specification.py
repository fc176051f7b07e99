"""Checks of a build specification: that it can be evaluated, and that its files are unchanged since the builder began."""

from __future__ import annotations

from spangrad.errors import BuilderError
from spangrad.selection import conditions
from spangrad.settings import BuilderSettings
from transition_builder.rewards import air


def check(spec: BuilderSettings) -> None:
    """Check, before anything is built, that the rules and the selection can be evaluated.

    Raises:
        BuilderError: a rule cannot be evaluated.
        SettingsError: a pattern of the selection is no regular expression.
    """
    air.check(spec)
    conditions(spec.selection, "builder.selection")


def require_unchanged(spec: BuilderSettings, began_as: str) -> None:
    """Raise if a file of the specification was changed since it was `began_as`, which rows name: it identifies the content of its files.

    Raises:
        BuilderError: a file that the settings name was changed.
    """
    if (spec.rules or spec.sql_rewards) and spec.spec != began_as:
        raise BuilderError(
            "a file that builder.rules or builder.sql_rewards names was changed since the builder began, and makes another build "
            "specification. Start the builder again: it then builds with the file as it is."
        )
