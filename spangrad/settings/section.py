"""Base class of every section of the settings: frozen, and without unknown keys."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import reduce
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from spangrad.http.service import is_sendable


def _one_line(token: SecretStr) -> SecretStr:
    text = token.get_secret_value().strip()
    if not text or not is_sendable(text):
        raise ValueError("a token is one line of printable ASCII characters")
    return SecretStr(text)


Port = Annotated[int, Field(ge=0, le=65535)]
"""TCP port to listen at; at 0 the system chooses one."""
Token = Annotated[SecretStr, Field(min_length=1), AfterValidator(_one_line)]
"""Token or key that requests carry in a header; whitespace around it, such as the line break at the end of a file, is no part of it."""
Seconds = Annotated[float, Field(gt=0, le=1e7)]
"""Time, in seconds: no more than requests of the queue may name, since JSON has no infinity."""


def _is_server(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:  # of a port that is no number or too large, too
        raise ValueError("give the URL of a server, http(s)://HOST:PORT, with a port up to 65535") from None
    return url


ServerUrl = Annotated[str, AfterValidator(_is_server)]
"""URL of a server, by HTTP or HTTPS."""


def models_in(kind: Any) -> list[type[BaseModel]]:
    """Return the models that a type names."""
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return [kind]
    return [model for argument in get_args(kind) for model in models_in(argument)]


def has_secret(kind: Any) -> bool:
    """Return whether values of a type hold a secret."""
    fields = [field.annotation for model in models_in(kind) for field in model.model_fields.values()]
    return kind is SecretStr or any(map(has_secret, [*get_args(kind), *fields]))


class Section(BaseModel):
    """A section of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def values_of(self, keys: Iterable[str]) -> dict[str, object]:
        """Return the values of dotted keys below the section, as JSON has them."""
        values = self.model_dump(mode="json")
        return {key: reduce(lambda table, name: table[name], key.split("."), values) for key in keys}
