"""`spangrad lineage`: from a policy version to the spans that it was trained on, and from a span to the versions trained on it."""

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
    """Show a version's parents, batch, rollouts and their spans; or, for a span, every version that was trained on it.

    Queries the copy of the ledger in the store at store.url. If no store answers there, the data of a stopped store (store.path, else the
    last demo's) is opened for the time of the query.

    Args:
        version: policy version, as POLICY@VERSION.
        span: span to show instead of a version, as TRACE/SPAN, both in hexadecimal.
        branch: branch of the version, if several branches have a version of that number.
        depth: number of versions to show with rollouts and spans: this one and its ancestors.
        json_: print JSON instead of text.
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
                answer = lineage.of_version(client, *version_name(version), branch, depth)
                text = of_version(answer)
            else:
                answer = lineage.of_span(client, *span_name(span or ""))
                text = of_span(answer)
        client.close()
    print(json.dumps(answer.as_json(), indent=2) if json_ else "\n".join(text), file=sys.stdout)


def version_name(text: str) -> tuple[str, int]:
    """Return the policy and the version number of POLICY@VERSION.

    Raises:
        SettingsError: the text has another form.
    """
    policy, _, number = text.rpartition("@")
    if not policy or not number.isdecimal():
        raise SettingsError(f"{text!r} names no version. Write POLICY@VERSION: policy@3.")
    return policy, int(number)


def span_name(text: str) -> tuple[str, str]:
    """Return the trace id and the span id of TRACE/SPAN.

    Raises:
        SettingsError: the text has another form.
    """
    trace, _, span = text.partition("/")
    if not trace or not span:
        raise SettingsError(f"{text!r} names no span. Write TRACE/SPAN, both in hex as `spangrad rollout show` prints them.")
    return trace, span
