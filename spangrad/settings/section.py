"""Base class of every section of the settings: frozen, and without unknown keys."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def values_of(self, keys: Iterable[str]) -> dict[str, object]:
        """Return the values of dotted keys below the section, as JSON has them."""
        values = self.model_dump(mode="json")
        return {key: reduce(lambda table, name: table[name], key.split("."), values) for key in keys}
