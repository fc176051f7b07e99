"""Backends that were registered at run time, which a gateway remembers beyond its end.

In: the backends that come and go. Out: a file, and at the next start what it holds. Invariant: the file is replaced as a whole, and only
its owner may read it, since it holds backends' keys.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import SecretStr

from spangrad.errors import JSON_ERRORS, GatewayError
from spangrad.processes import make_private
from spangrad.settings import BackendSettings

log = logging.getLogger(__name__)

FILE = "backends.json"


class RegisteredBackend(msgspec.Struct, frozen=True):
    """Backend that was registered at run time; the fields are those of `gateway.backends`."""

    url: str
    policy: str = ""
    """Policy whose calls it answers. Empty, in a request: that of `gateway.policy`."""
    kind: Literal["engine", "openai", "anthropic"] = "engine"
    key: str | None = None
    limit: int | None = None
    model: str | None = None

    @classmethod
    def of(cls, settings: BackendSettings) -> RegisteredBackend:
        """Return the form in which a backend's settings are written."""
        key = settings.key.get_secret_value() if settings.key else None
        return cls(settings.url, settings.policy, settings.kind, key, settings.limit, settings.model)

    @property
    def settings(self) -> BackendSettings:
        """Return the backend's settings."""
        # A secret before it is checked: pydantic's error shows the value that it refuses.
        key = SecretStr(self.key) if self.key is not None else None
        return BackendSettings(url=self.url, policy=self.policy, kind=self.kind, key=key, limit=self.limit, model=self.model)


class BackendRegistry:
    """File of the backends that were registered with one gateway."""

    def __init__(self, directory: Path) -> None:
        """Use `backends.json` in a directory, which is made when something is written."""
        self._file = directory / FILE

    def read(self) -> list[BackendSettings]:
        """Return the backends that were written last; none where there is no file.

        Raises:
            GatewayError: the file cannot be read.
        """
        try:
            return [backend.settings for backend in msgspec.json.decode(self._file.read_bytes(), type=list[RegisteredBackend])]
        except FileNotFoundError:
            return []
        except (OSError, *JSON_ERRORS) as error:
            raise GatewayError(
                f"{self._file}, where the gateway remembers backends that were registered with it, cannot be read ({error}). Restore it "
                "from a copy, or remove it: engines register again, and other backends are added by `spangrad backends add`."
            ) from None

    def write(self, backends: Iterable[BackendSettings]) -> None:
        """Replace what was written; a failure is logged, since the gateway works without."""
        registered = [RegisteredBackend.of(backend) for backend in backends]
        new = self._file.with_suffix(".new")
        try:
            make_private(new.parent)
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(msgspec.json.encode(registered))
            new.replace(self._file)
        except OSError as error:
            log.warning("backends that a restart of the gateway needs could not be written to %s: %s", self._file, error)
