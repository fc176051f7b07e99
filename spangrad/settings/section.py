"""What every section of the settings is: frozen, and without keys that nobody knows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True)
