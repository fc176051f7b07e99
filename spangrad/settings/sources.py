"""Sources of the settings: flags over environment over TOML file over defaults.

In: `spangrad.toml` (or --config FILE, or SPANGRAD_CONFIG), variables `SPANGRAD_SECTION__KEY`, flags. Out: a `Settings`, and for
`spangrad config` the source of each value. Invariant: an unknown key is an error in every source, and no written value is ignored: not
even None, which the environment and the file write as the text `null`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spangrad.errors import SettingsError
from spangrad.http.service import without_userinfo
from spangrad.settings import ENV_NESTING, ENV_PREFIX, Settings
from spangrad.settings.section import has_secret, models_in

_FILES = {"SPANGRAD_CONFIG", "SPANGRAD_OTELCOL", "SPANGRAD_CHGO"}
_AGENT_VARIABLES = {"SPANGRAD_ENVIRONMENT", "SPANGRAD_HOST"}
_OF_PROMPTS = {f"SPANGRAD_PROMPT{suffix}" for suffix in ("", "_NAME", "_TOKEN", "_URL", "_VARIABLE", "_VERSION")}
ENV_NOT_SETTINGS = frozenset(_FILES | _AGENT_VARIABLES | _OF_PROMPTS)
"""Variables with our prefix that name files, or that describe an attempt to its agent; they are read where they are used."""
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(?!\w*{ENV_NESTING})(\w+_)?(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT=(tcp|udp|sctp)://|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=)"
)
"""Variables by which Kubernetes gives every container the address of a service such as spangrad-store."""
_OF_THIS_PROCESS = _AGENT_VARIABLES | {"SPANGRAD_CONFIG"}
DEFAULT_FILE = "spangrad.toml"
_PYTHON = "engine.python"
_NULL = "null"
"""Text of None in the environment and in TOML, which have no null value."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One leaf of the tree and the source of its value."""

    key: str
    value: object
    source: str

    @property
    def text(self) -> str:
        """Value for people: a secret is hidden, as is the password in a URL."""
        return str(_shown(self.key, self.value))


def load_settings(flags: Mapping[str, object] | None = None, *, file: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Resolve the settings.

    Args:
        flags: dotted key -> value, the strongest source; the value of a section is a table, and None is a value as any other.
        file: a TOML file that must exist; without it SPANGRAD_CONFIG of the environment.
        env: the environment. None: that of this process, and spangrad.toml of its working directory where no file is named.

    Raises:
        SettingsError: a key is unknown, a value malformed, or the file missing or not TOML.
    """
    return _resolve(flags or {}, file, env)[0]


def explain_settings(
    flags: Mapping[str, object] | None = None, *, file: Path | None = None, env: Mapping[str, str] | None = None
) -> list[Origin]:
    """List every leaf of the resolved tree with its source; arguments as for `load_settings`."""
    settings, sources = _resolve(flags or {}, file, env)
    return [Origin(key, value, sources.get(key, "default")) for key, value in _leaves(settings.model_dump())]


def settings_variables(
    flags: Mapping[str, object] | None = None, *, file: Path | None = None, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return environment variables that resolve to the same settings in another process, which reads no file; it may be elsewhere.

    Arguments as for `load_settings`, which refuses what these variables would not carry.
    """
    values = {key: value for _, layer in _layers(flags or {}, file, env) for key, value in layer.items()}
    variables = os.environ if env is None else env
    carried = {name: variables[name] for name in ENV_NOT_SETTINGS - _OF_THIS_PROCESS if name in variables}
    return {**carried, "SPANGRAD_CONFIG": os.devnull, **{variable_of(key): as_variable(value) for key, value in values.items()}}


def as_variable(value: object) -> str:
    """Return the text of an environment variable that gives a setting a value."""
    if isinstance(value, date):  # TOML has dates and times
        return value.isoformat()
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def _layers(flags: Mapping[str, object], file: Path | None, env: Mapping[str, str] | None) -> list[tuple[str, dict[str, object]]]:
    """Return the values of each source by dotted key, the weakest source first."""
    variables, default = (os.environ, DEFAULT_FILE) if env is None else (env, os.devnull)
    path, from_file = _read_file(file, variables, Path(default))
    return [
        (f"file {path}", _relative_to_file(path, _as_written(_leaves(from_file)))),
        ("environment", _read_env(variables)),
        ("flag", dict(leaf for key, value in flags.items() for leaf in _of_key(key, value))),
    ]


def _resolve(flags: Mapping[str, object], file: Path | None, env: Mapping[str, str] | None) -> tuple[Settings, dict[str, str]]:
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in _layers(flags, file, env):
        for key, value in layer.items():
            if key in _SECTIONS:
                raise SettingsError(f"{key} ({source}) is a section, and has no value of its own. Set {key}.NAME.")
            if key not in _KEYS:
                raise SettingsError(f"unknown setting {key!r} ({source}).{_nearest(key)}")
            *sections, name = key.split(".")
            table = merged
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = value
            sources[key] = f"environment {variable_of(key)}" if source == "environment" else source
    try:
        return Settings.model_validate(merged), sources
    except ValidationError as error:
        first, *others = error.errors()
        key_path = _key_path(first)
        source = next((source for key, source in sources.items() if f"{key_path}.".startswith(f"{key}.")), "default")
        alternatives = [other["msg"] for other in others if _is_alternative(other) and _key_path(other) == key_path]
        problem = ", or ".join([first["msg"].removeprefix("Value error, "), *alternatives])
        raise SettingsError(f"setting {key_path}{_given(key_path, first)} ({source}): {problem}") from None


def _key_path(error: ErrorDetails) -> str:
    """Return the key of a refused value, without the alternative of its type that refused it."""
    return ".".join(str(part) for part in (error["loc"][:-1] if _is_alternative(error) else error["loc"]))


def _is_alternative(error: ErrorDetails) -> bool:
    """Return whether a value was refused by one of several types, which pydantic then names last, such as `literal['auto']`."""
    return any(str(part).endswith("]") for part in error["loc"][-1:])


def _given(key: str, error: ErrorDetails) -> str:
    """Return ` = VALUE` for a refused value; empty where it is a secret, or may be one: that of a key which does not exist."""
    kind: Any = Settings
    for part in error["loc"]:
        kind = next((model.model_fields[part].annotation for model in models_in(kind) if part in model.model_fields), kind)
    if isinstance(error["input"], Mapping):
        return " = {...}"
    return "" if error["type"] == "extra_forbidden" or has_secret(kind) else f" = {_shown(key, error['input'])!r}"


def _shown(key: str, value: object) -> object:
    if isinstance(value, str) and ("://" in value or key.endswith(("url", "endpoint"))):
        return without_userinfo(value)
    return value


def _read_file(file: Path | None, env: Mapping[str, str], default: Path) -> tuple[Path, dict[str, Any]]:
    named = file or (Path(env["SPANGRAD_CONFIG"]) if env.get("SPANGRAD_CONFIG") else None)
    path = named or default
    try:
        return path, tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if named:
            raise SettingsError(f"settings file {path} does not exist. Create it, or drop --config and SPANGRAD_CONFIG.") from None
        return path, {}
    except OSError as error:
        raise SettingsError(f"settings file {path} cannot be read ({error.strerror}). Name a file of TOML that you may read.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise SettingsError(
            f"settings file {path} is not TOML: {error}. Correct that place: TOML is UTF-8, and texts have quotes."
        ) from None


def _read_env(env: Mapping[str, str]) -> dict[str, object]:
    """Return our environment variables by dotted key; pydantic-settings parses the values, but would ignore unknown names."""
    named = {
        name: name.removeprefix(ENV_PREFIX).lower().replace(ENV_NESTING, ".")
        for name in env
        if name.startswith(ENV_PREFIX) and name not in ENV_NOT_SETTINGS and not _is_service_link(name, env[name])
    }
    for name, key in named.items():
        if key not in _KEYS and key not in _SECTIONS:
            raise SettingsError(f"unknown setting {name} (environment).{_nearest(key)}")
    values = dict[str, object]()
    if not named:
        return values
    from pydantic_settings import EnvSettingsSource
    from pydantic_settings import SettingsError as UnreadableVariableError

    source = EnvSettingsSource(cast("Any", Settings), env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_NESTING)
    for name in sorted(named):  # one by one, so that an error can name the variable; sections come before their settings
        source.env_vars = {name.lower(): env[name]}
        try:
            values |= _as_written(_leaves(source()))
        except UnreadableVariableError:
            raise SettingsError(f'{name} (environment) is no JSON. Lists are written as JSON: \'["a", "b"]\'.') from None
    return values


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes set a variable; `SPANGRAD_GATEWAY_PORT=9000` is a user's, with an underscore missing."""
    return name.removeprefix(ENV_PREFIX).lower() not in _KEYS | _SECTIONS and bool(_SERVICE_LINK.match(f"{name}={value}"))


def _as_written(leaves: Iterable[tuple[str, object]]) -> dict[str, object]:
    return {key: None if value == _NULL else value for key, value in leaves}


def _relative_to_file(file: Path, values: dict[str, object]) -> dict[str, object]:
    """Return a file's values with the path of vLLM's interpreter relative to the file, not to the working directory."""
    python = values.get(_PYTHON)
    return values if not isinstance(python, str) else {**values, _PYTHON: str(file.parent / python)}


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every key below a model, and True where it is a section."""
    for name, field in model.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        section = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield key, section
        if section:
            yield from _fields(cast("type[BaseModel]", kind), f"{key}.")


def _secret_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys below a model whose values hold secrets; those of sections too, which a variable may set as a whole."""
    for name, field in model.model_fields.items():
        if has_secret(field.annotation):
            yield f"{prefix}{name}"
            for section in models_in(field.annotation):
                yield from _secret_keys(section, f"{prefix}{name}.")


_SECTIONS = frozenset(key for key, section in _fields(Settings) if section)
_KEYS = frozenset(key for key, section in _fields(Settings) if not section)


def _of_key(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a key's value: the value itself, or the leaves of a section's table."""
    if key in _SECTIONS and isinstance(value, Mapping):
        yield from _leaves(cast("Mapping[str, object]", value), f"{key}.")
    else:
        yield key, value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _of_key(f"{prefix}{key}", value)


def require_known(key: str) -> None:
    """Refuse a key that is neither a setting nor a section.

    Raises:
        SettingsError: with the nearest key.
    """
    if key not in _KEYS and key not in _SECTIONS:
        raise SettingsError(f"unknown setting {key!r}.{_nearest(key)}")


def variable_of(key: str) -> str:
    """Return the environment variable that sets a dotted key."""
    return ENV_PREFIX + key.replace(".", ENV_NESTING).upper()


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that set secrets of ours: tokens, keys, and URLs with a password."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(ENV_PREFIX) or (name.upper() not in _SECRET_VARIABLES and without_userinfo(value) == value)
    }


_SECRET_VARIABLES = frozenset(variable_of(key) for key in _secret_keys(Settings))


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, _KEYS | _SECTIONS, n=1)
    parent, _, name = key.rpartition(".")
    is_setting = bool(close) and close[0] in _KEYS
    if (
        parent in _SECTIONS
        and not is_setting
        and not difflib.get_close_matches(name, [last.rpartition(".")[2] for last in close], cutoff=0.8)
    ):
        return f" `spangrad config --explain {parent}` lists the settings of this section."
    if not close:
        return " `spangrad config` lists all settings."
    return f" Did you mean {'' if is_setting else 'the section '}{close[0]!r}?"
