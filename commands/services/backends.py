"""`spangrad backends`: the inference engines and other upstreams behind a running gateway."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import SettingsError
from spangrad.http.json_http import ask
from spangrad.http.service import gateway_service

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spangrad.settings import GatewaySettings

_ANSWER_SECONDS = 30
_STATUS_STYLES = {"serving": "green", "publishing": "cyan", "asleep": "blue", "draining": "yellow", "down": "red"}

backends = App(name="backends", help="Show, add and remove backends of a running gateway.")


@backends.command(name="list")
def _list(
    *,
    watch: Annotated[bool, Parameter(help="keep the tables up to date until Ctrl-C.", negative=())] = False,
    interval: float = 1.0,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Print the policies and backends of the gateway at gateway.url, with their state.

    Args:
        interval: time between two updates of --watch, in seconds.
    """
    from rich.live import Live

    from commands.console import plain_console

    if not 0 < interval < float("inf"):
        raise SettingsError(f"--interval {interval:g} is no time between updates. Give seconds, more than 0.")
    gateway = resolve(config, set_).gateway
    console = plain_console()
    if not watch:
        console.print(_tables(gateway))
        return
    with Live(_tables(gateway), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_tables(gateway), refresh=True)


@backends.command(name="add")
def _add(
    url: str,
    /,
    *,
    policy: str | None = None,
    kind: Literal["engine", "openai", "anthropic"] = "engine",
    limit: int | None = None,
    model: str | None = None,
    key_variable: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Add a backend. The gateway remembers it, also after a restart, until it is drained or removed.

    Args:
        url: URL on which the backend listens, with or without `/v1`.
        policy: name of the policy whose calls the backend answers; default: gateway.policy.
        kind: "engine" for vLLM started by `spangrad engine`, "openai" for any other server with OpenAI's interface, "anthropic" for
            Anthropic's.
        limit: maximum number of calls in flight; further calls wait. Default: no limit.
        model: name under which the backend serves the model; default: for an engine the policy, else the name that the client requests.
        key_variable: environment variable that holds the backend's API key.
    """
    fields = {"url": url, "policy": policy, "kind": kind, "limit": limit, "model": model, "key": _key(key_variable)}
    body = {name: value for name, value in fields.items() if value is not None}
    added = _ask(resolve(config, set_).gateway, "POST", "/admin/backends", body)
    print(f"{added['name']}: {added['kind']} of policy {added['policy']!r} at {added['url']}, {added['status']}")


@backends.command(name="drain")
def _drain(name: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Remove a backend after its calls in flight have ended; from now on, new calls go to other backends.

    Args:
        name: name of the backend, as `spangrad backends list` shows it.
    """
    _remove_backend(resolve(config, set_).gateway, name, now=False)


@backends.command(name="remove")
def _remove(name: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Remove a backend immediately; its calls in flight continue.

    Args:
        name: name of the backend, as `spangrad backends list` shows it.
    """
    _remove_backend(resolve(config, set_).gateway, name, now=True)


def _remove_backend(gateway: GatewaySettings, name: str, *, now: bool) -> None:
    # Calls in flight may last up to the request timeout.
    seconds = _ANSWER_SECONDS if now else gateway.request_timeout_seconds + _ANSWER_SECONDS
    _ask(gateway, "DELETE", f"/admin/backends/{quote(name, safe='')}?now={str(now).lower()}", seconds=seconds)
    print(f"{name} has left")


def _key(variable: str | None) -> str | None:
    """Return a backend's API key from the environment, because all users of a machine can see command lines."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingsError(f"--key-variable {variable}: the environment has no such variable, or it is empty. Export the key in it.")
    return key


def _tables(gateway: GatewaySettings) -> RenderableType:
    """Return the gateway's policies and backends as two tables."""
    from rich.console import Group
    from rich.text import Text

    from commands.console import plain_table

    policies = plain_table("policy", "status", "version", "before", "canary", "waiting", "reason")
    for entry in _ask(gateway, "GET", "/admin/policies")["policies"]:
        canary = entry.get("canary")
        shown = f"version {canary['version']} on {canary['backend']}, {canary['share']:.0%}" if canary else "-"
        row = (_shown(entry["version"]), _shown(entry.get("before")), shown, str(entry.get("waiting", 0)), entry.get("reason", ""))
        policies.add_row(Text(entry["policy"]), _status(entry["status"]), *map(Text, row))
    table = plain_table("backend", "policy", "kind", "topology", "status", "version", "in flight", "limit", "calls", "url", "reason")
    for backend in _ask(gateway, "GET", "/admin/backends")["backends"]:
        numbers = (_shown(backend["version"]), str(backend["in_flight"]), _shown(backend["limit"]), str(backend["calls"]))
        words = (backend["name"], backend["policy"], backend["kind"], _topology(backend["topology"]))
        reason = backend["reason"] or backend["uncompared"]
        table.add_row(*map(Text, words), _status(backend["status"]), *map(Text, (*numbers, backend["url"], reason)))
    return Group(policies, Text(), table)


def _topology(sizes: Mapping[str, int] | None) -> str:
    """Return the processes of an engine in short, such as `tp2 dp4 api4`; 1: it has one worker."""
    if sizes is None:
        return "-"
    shown = {"tp": sizes["tensor"], "pp": sizes["pipeline"], "dp": sizes["data"], "api": sizes["api_servers"]}
    return " ".join(f"{name}{size}" for name, size in shown.items() if size > 1) or "1"


def _status(status: str) -> RenderableType:
    from rich.text import Text

    return Text(status, style=_STATUS_STYLES.get(status, ""))


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _ask(
    gateway: GatewaySettings, method: str, path: str, body: Mapping[str, object] | None = None, seconds: float = _ANSWER_SECONDS
) -> dict[str, Any]:
    """Send a request to the gateway's administration API, and return its response."""
    return ask(gateway_service(gateway.url, gateway.token), method, path, body, seconds=seconds)
