"""Options that every command shares, and their conversion to settings."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from spangrad.errors import JSON_ERRORS, SettingsError
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings

ConfigFile = Annotated[
    Path | None, Parameter("--config", help="settings file (TOML); default: the file that SPANGRAD_CONFIG names, else ./spangrad.toml.")
]
Overrides = Annotated[
    list[str] | None,
    Parameter("--set", help="value of any setting, as SECTION.KEY=VALUE (VALUE: JSON or plain text). Can be repeated.", negative=()),
]


def resolve(config: Path | None, overrides: list[str] | None, flags: Mapping[str, object] | None = None) -> Settings:
    """Resolve the settings of a command. Its own flags take precedence, then --set, then the other sources."""
    return load_settings(flag_values(overrides, flags), file=config)


def flag_values(overrides: list[str] | None, flags: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the settings that the command line gives, by dotted key.

    Raises:
        SettingsError: an override is not KEY=VALUE.
    """
    values: dict[str, object] = {}
    for item in overrides or ():
        key, equals, text = item.partition("=")
        if not equals:
            raise SettingsError(f"--set {item!r} is not SECTION.KEY=VALUE.")
        values[key.strip()] = _value(text)
    return {**values, **{key: value for key, value in (flags or {}).items() if value is not None}}


def require_directory(name: str, directory: Path, purpose: str) -> None:
    """Refuse a directory that does not exist; the error has the option or setting that names it, and the purpose of the right one.

    Raises:
        SettingsError: it is no directory.
    """
    if not directory.is_dir():
        raise SettingsError(f"{name} {directory} is no directory. Name {purpose}.")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except JSON_ERRORS:
        return text


def log_to_stderr() -> None:
    """Configure logging for servers: one line an event, on standard error, at the level of LOG_LEVEL (default INFO).

    Raises:
        SettingsError: LOG_LEVEL names no level.
    """
    level = os.environ.get("LOG_LEVEL") or "INFO"
    if level.upper() not in logging.getLevelNamesMapping():
        raise SettingsError(f"LOG_LEVEL = {level!r} is no level. Set it to DEBUG, INFO, WARNING or ERROR, or unset it.")
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # Their warnings repeat what our own errors say.
    for driver in ("urllib3.connectionpool", "clickhouse_connect"):
        logging.getLogger(driver).setLevel(logging.ERROR)


def limit_builder_threads() -> None:
    """Make the builder compute on one thread, unless POLARS_MAX_THREADS says otherwise; before anything imports Polars.

    The builder's frames are small, so that threads cost more CPU time than they save.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
