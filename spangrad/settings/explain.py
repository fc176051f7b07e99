"""Explanation of settings: the sentence, unit, type and default of each field, from the code, and the value now in force.

In: a key. Out: lines for `spangrad config --explain`; docs/reference/settings.md is written with the same functions.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from enum import EnumType, StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from spangrad.settings import Settings
from spangrad.settings.section import models_in
from spangrad.settings.sources import explain_settings, require_known

_UNITS = {"seconds": "seconds", "days": "days", "ms": "milliseconds", "bytes": "bytes", "mib": "MiB", "tokens": "tokens", "rows": "rows"}
"""Last word of a field's name -> its unit."""


def explain_key(key: str, flags: Mapping[str, object] | None = None, *, file: Path | None = None) -> list[str]:
    """Return the lines that explain a setting, or that list a section's settings; arguments as for `load_settings`.

    Raises:
        SettingsError: the key is unknown, or the settings are not valid.
    """
    require_known(key)
    origins = {origin.key: origin for origin in explain_settings(flags, file=file)}
    *sections, name = key.split(".")
    model: Any = Settings
    for section in sections:
        model = model.model_fields[section].annotation
    field = model.model_fields[name]
    if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
        texts = docstrings(field.annotation)
        lines = [f"[{key}]  {' '.join((field.annotation.__doc__ or '').split())}"]
        for child in field.annotation.model_fields:
            origin = origins.get(f"{key}.{child}")
            shown = f"{origin.text} ({origin.source})" if origin else "a section"
            lines += [f"  {key}.{child} = {shown}" if origin else f"  {key}.{child}: {shown}", f"      {texts.get(child, '')}".rstrip()]
        return [line for line in lines if line]
    unit = _UNITS.get(name.rpartition("_")[2])
    return [
        key,
        f"  {docstrings(model).get(name, '')}",
        *([f"  unit:    {unit}"] if unit else []),
        f"  type:    {type_name(field.annotation)}".replace("`", ""),
        f"  default: {default_text(field)}".replace("`", ""),
        f"  value:   {origins[key].text} ({origins[key].source})",
    ]


def type_name(kind: Any) -> str:
    """Return a field's type for people."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind is type(None):
        return "none"
    if inspect.isclass(kind) and issubclass(kind, StrEnum):
        return ", ".join(f"`{member.value}`" for member in kind)
    arguments = [argument for argument in get_args(kind) if argument is not Ellipsis]
    if "Literal" in str(kind).split("[", maxsplit=1)[0]:
        return ", ".join(f"`{argument}`" for argument in arguments)
    names = {
        "SecretStr": "text",
        "datetime": "time",
        "str": "text",
        "Path": "path",
        "int": "integer",
        "float": "number",
        "bool": "true, false",
    }
    if not arguments:
        return names.get(getattr(kind, "__name__", ""), "table" if models_in(kind) else getattr(kind, "__name__", str(kind)))
    name = getattr(kind, "__name__", "")
    if name in ("tuple", "list", "frozenset", "set", "Sequence"):
        return f"list of {type_name(arguments[0])}"
    if name in ("dict", "Mapping"):
        return f"table of {type_name(arguments[1])}"
    return " or ".join(dict.fromkeys(type_name(argument) for argument in arguments if argument is not type(None)))


def default_text(field: Any) -> str:
    """Return a field's default for people."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, dict | tuple | list | frozenset | set) and not value:
        return "empty"
    if isinstance(value, dict):
        return ", ".join(f"`{key} = {entry}`" for key, entry in value.items())
    if isinstance(value, tuple | list | frozenset | set):
        return ", ".join(f"`{entry}`" for entry in value)
    return f"`{value}`"


def docstrings(owner: type[Any] | EnumType) -> dict[str, str]:
    """Return the docstrings that follow the attributes of a class and of its bases, by attribute."""
    texts: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not base.__module__.startswith(("spangrad", "trainer")):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
            if docstring_of(after):
                texts.update({target.id: docstring_of(after) for target in targets if isinstance(target, ast.Name)})
    return texts


def docstring_of(node: ast.AST | None) -> str:
    """Return the text of a statement that is a string, on one line; empty: it is none."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
