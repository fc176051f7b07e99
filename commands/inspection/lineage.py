"""`spangrad lineage`: from a policy version to the spans that made it, and from a span to the versions that it made."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import SettingsError


def lineage(
    version: Annotated[str | None, Parameter(name="POLICY@VERSION")] = None,
    /,
    *,
    span: str | None = None,
    branch: str | None = None,
    depth: int = 1,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Lead from a version to its parents, its batch, its rollouts and their spans; or from a span to every version that it trained.

    Asks the store's copy of the ledger at store.url. When nobody answers there, the data of a store that has stopped (store.path, else
    the last demo's) is opened for the time of the question.

    Args:
        version: as POLICY@VERSION.
        span: TRACE/SPAN, to be asked for instead of a version.
        branch: of the version, where several branches have one of that number.
        depth: how many versions, from this one back, are shown with rollouts and spans.
        json_: print JSON.
    """
    from commands.inspection.lineage_text import of_span, of_version
    from commands.stopped_store import answering_store
    from spangrad.store import lineage
    from spangrad.store.clickhouse import connect, store_errors

    if (version is None) == (span is None):
        raise SettingsError("give a version, `spangrad lineage POLICY@VERSION`, or a span, `spangrad lineage --span TRACE/SPAN`.")
    with answering_store(resolve(config, set_).store) as store:
        client = connect(store)
        with store_errors(store.url):
            if version is not None:
                found = lineage.of_version(client, *version_name(version), branch, depth)
                text = of_version(found)
            else:
                found = lineage.of_span(client, *span_name(span or ""))
                text = of_span(found)
        client.close()
    print(json.dumps(found.as_json(), indent=2) if json_ else "\n".join(text), file=sys.stdout)


def version_name(text: str) -> tuple[str, int]:
    """Policy and number of POLICY@VERSION.

    Raises:
        SettingsError: it is not written so.
    """
    policy, _, number = text.rpartition("@")
    if not policy or not number.isdecimal():
        raise SettingsError(f"{text!r} names no version. Write POLICY@VERSION: policy@3.")
    return policy, int(number)


def span_name(text: str) -> tuple[str, str]:
    """Trace and span of TRACE/SPAN.

    Raises:
        SettingsError: it is not written so.
    """
    trace, _, span = text.partition("/")
    if not trace or not span:
        raise SettingsError(f"{text!r} names no span. Write TRACE/SPAN, both in hex as `spangrad rollout show` prints them.")
    return trace, span
