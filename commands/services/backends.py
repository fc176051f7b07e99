"""`spangrad backends`: the engines and other upstreams behind a running gateway."""

from __future__ import annotations

import os
import time
import urllib.error
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import GatewayError, SettingsError
from spangrad.http.json_http import ask, refusal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spangrad.settings import GatewaySettings

_PIPE_WIDTH = 200
_ANSWER_SECONDS = 30
_STATUS_STYLES = {"serving": "green", "publishing": "cyan", "asleep": "blue", "draining": "yellow", "down": "red"}

backends = App(name="backends", help="Look at the backends of a running gateway, add and remove them.")


@backends.command(name="list")
def _list(
    *,
    watch: Annotated[bool, Parameter(help="Keep the view up to date until Ctrl-C.", negative=())] = False,
    interval: float = 1.0,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Print the policies and backends of the gateway at gateway.url, and how they stand.

    Args:
        interval: seconds between two looks of --watch.
    """
    from rich.live import Live

    from commands.console import plain_console

    gateway = resolve(config, set_).gateway
    console = plain_console(_PIPE_WIDTH)
    if not watch:
        console.print(_look(gateway))
        return
    with Live(_look(gateway), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_look(gateway), refresh=True)


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
    """Register a backend until the gateway ends; `gateway.backends` in the settings keeps it.

    Args:
        url: where it listens.
        policy: whose calls it answers; gateway.policy by default.
        kind: a vLLM of `spangrad engine`, any other server with OpenAI's interface, or Anthropic's own.
        limit: calls in flight at once.
        model: name by which it knows the model.
        key_variable: environment variable that holds its key.
    """
    asked = {"url": url, "policy": policy, "kind": kind, "limit": limit, "model": model, "key": _key(key_variable)}
    body = {name: value for name, value in asked.items() if value is not None}
    added = _ask(resolve(config, set_).gateway, "POST", "/admin/backends", body)
    print(f"{added['name']}: {added['kind']} of policy {added['policy']!r} at {added['url']}, {added['status']}")


@backends.command(name="drain")
def _drain(name: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Take a backend out once its calls in flight have ended; new calls go elsewhere at once.

    Args:
        name: of the backend, as `spangrad backends list` shows it.
    """
    _take_out(resolve(config, set_).gateway, name, now=False)


@backends.command(name="remove")
def _remove(name: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Take a backend out at once; its calls in flight go on.

    Args:
        name: of the backend, as `spangrad backends list` shows it.
    """
    _take_out(resolve(config, set_).gateway, name, now=True)


def _take_out(gateway: GatewaySettings, name: str, *, now: bool) -> None:
    # Calls may last as long as a request may.
    seconds = _ANSWER_SECONDS if now else gateway.request_timeout_seconds + _ANSWER_SECONDS
    _ask(gateway, "DELETE", f"/admin/backends/{quote(name, safe='')}?now={str(now).lower()}", seconds=seconds)
    print(f"{name} has left")


def _key(variable: str | None) -> str | None:
    """A backend's key, from the environment: command lines are seen by all users of a machine."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingsError(f"--key-variable {variable}: the environment has no such variable, or it is empty. Export the key in it.")
    return key


def _look(gateway: GatewaySettings) -> RenderableType:
    """Policies and backends as two tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    policies = Table("policy", "status", "version", "before", "canary", "waiting", "reason", box=None, pad_edge=False)
    for one in _ask(gateway, "GET", "/admin/policies")["policies"]:
        canary = one.get("canary")
        shown = f"version {canary['version']} on {canary['backend']}, {canary['share']:.0%}" if canary else "-"
        row = (_shown(one["version"]), _shown(one.get("before")), shown, str(one.get("waiting", 0)), one.get("reason", ""))
        policies.add_row(Text(one["policy"]), _status(one["status"]), *map(Text, row))
    table = Table(
        "backend", "policy", "kind", "status", "version", "in flight", "limit", "calls", "url", "reason", box=None, pad_edge=False
    )
    for one in _ask(gateway, "GET", "/admin/backends")["backends"]:
        numbers = (_shown(one["version"]), str(one["in_flight"]), _shown(one["limit"]), str(one["calls"]))
        words = (one["name"], one["policy"], one["kind"])
        table.add_row(*map(Text, words), _status(one["status"]), *map(Text, (*numbers, one["url"], one["reason"])))
    return Group(policies, Text(), table)


def _status(status: str) -> RenderableType:
    from rich.text import Text

    return Text(status, style=_STATUS_STYLES.get(status, ""))


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _ask(
    gateway: GatewaySettings, method: str, path: str, body: Mapping[str, object] | None = None, seconds: float = _ANSWER_SECONDS
) -> dict[str, Any]:
    """Ask the gateway.

    Raises:
        GatewayError: it does not answer, or refuses.
    """
    try:
        return ask(gateway.url, gateway.token, method, path, body, seconds)
    except urllib.error.HTTPError as error:
        raise GatewayError(f"the gateway at {gateway.url} refuses ({error.code}): {refusal(error)}") from None
    except (OSError, ValueError) as error:  # URLError, timeouts, answers of something else
        reason = getattr(error, "reason", error)
        raise GatewayError(
            f"no gateway answers at {gateway.url} ({reason}). Start it with `spangrad gateway`, or set gateway.url."
        ) from None
