"""References to environments on a command line: classes, Gymnasium's ids, and servers' URLs.

In: `MODULE:CLASS`, `gymnasium:ID`, `openenv+http://...`, `ors+http://...`, `opentinker+http://...`; several URLs are joined by commas.
Out: a function that creates environments with reset and step. Invariant: a class of OpenEnv or Gymnasium is recognised by the package that
it descends from, which is not imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from spangrad.episode.adapters import gymnasium_class, openenv_class
from spangrad.episode.environment import Environment, is_environment_class
from spangrad.episode.openenv_fields import ROLES
from spangrad.errors import EnvironmentsError

TOKEN_VARIABLE = "SPANGRAD_ENVIRONMENTS_TOKEN"
"""Environment variable with the token that servers of environments ask for."""
_GYMNASIUM = "gymnasium:"
OPENENV = "openenv+"
_SERVERS = (OPENENV, "ors+", "opentinker+")


class EnvironmentFactory:
    """Function that creates environments with reset and step."""

    def __init__(self, name: str, create: Callable[[], Environment]) -> None:
        self.__name__ = name
        self._create = create

    def __call__(self) -> Environment:
        """Create an environment."""
        return self._create()


def names_environment(reference: str) -> bool:
    """Return whether a reference is no class, but an id of Gymnasium, or a URL with its protocol."""
    return reference.startswith((_GYMNASIUM, *(f"{prefix}http" for prefix in _SERVERS)))


def by_openenv(reference: str) -> str:
    """Return URLs with OpenEnv's protocol, where they name none; another reference as it is."""
    if not reference.startswith(("http://", "https://")):
        return reference
    return ",".join(f"{OPENENV}{url.strip()}" for url in reference.split(","))


def factory_of(reference: str, load: Callable[[str], Any]) -> Any:
    """Return the function that creates environments, or what the reference names, if that is none; `load` imports MODULE:NAME.

    Raises:
        EnvironmentsError: URLs of several protocols are mixed.
    """
    if reference.startswith(_GYMNASIUM):
        name = reference.removeprefix(_GYMNASIUM)
        return EnvironmentFactory(name, lambda: gymnasium_class.GymnasiumEnvironment.make(name))
    if names_environment(reference):
        return _of_servers(reference)
    value = load(reference)
    return adapted(value) if is_environment_class(value) else value


def is_factory(value: object) -> TypeGuard[Callable[[], Environment]]:
    """Return whether a value creates environments with reset and step."""
    return isinstance(value, EnvironmentFactory) or is_environment_class(value)


def adapted(kind: Callable[[], Environment]) -> Callable[[], Environment]:
    """Return a class as it is, or a function that adapts its objects, where it is of OpenEnv or Gymnasium."""
    packages = {base.__module__.split(".")[0] for base in getattr(kind, "__mro__", ())}
    name = getattr(kind, "__name__", str(kind))
    for module, adapter in ((openenv_class, openenv_class.OpenEnvEnvironment), (gymnasium_class, gymnasium_class.GymnasiumEnvironment)):
        if module.PACKAGE in packages:
            return EnvironmentFactory(name, lambda adapter=adapter: adapter(kind()))
    return kind


def _of_servers(reference: str) -> EnvironmentFactory:
    given = [url.strip() for url in reference.split(",")]
    prefixes = {next((prefix for prefix in _SERVERS if url.startswith(prefix)), "") for url in given}
    if len(prefixes) != 1 or "" in prefixes:
        raise EnvironmentsError(f"{reference} mixes protocols. Begin each URL with the same of {', '.join(_SERVERS)}.")
    (prefix,) = prefixes
    urls = [url.removeprefix(prefix) for url in given]
    return EnvironmentFactory(urls[0], lambda: _create(prefix, urls, os.environ.get(TOKEN_VARIABLE)))


def _create(prefix: str, urls: Sequence[str], token: str | None) -> Environment:
    if prefix == OPENENV:
        from spangrad.episode.adapters.openenv_players import PlayersOfServer
        from spangrad.episode.adapters.openenv_server import OpenEnvServer

        server = OpenEnvServer(urls, token)
        return PlayersOfServer(server) if server.about.get(ROLES) and not server.seat else server
    if prefix == "ors+":
        from spangrad.episode.adapters.ors_server import OrsServer

        return OrsServer(urls, token)
    from spangrad.episode.adapters.opentinker_server import OpenTinkerServer

    return OpenTinkerServer(urls, token)
