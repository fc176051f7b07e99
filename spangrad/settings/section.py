"""Base class of every section of the settings: frozen, and without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
