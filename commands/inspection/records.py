"""Records of rollouts, and messages of calls, read with what stages know of them: the builder's dialects, the trainers' ledger.

In: a client of the store, the id of a rollout. Out: its `Record`; the messages of calls; the groups that a branch skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spangrad.errors import LedgerError, StoreError
from spangrad.http.service import without_userinfo
from spangrad.settings import Settings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from page.rollouts.conversation import CallMessages
    from page.training import SkippedQuery, SkippedRow
    from spangrad.store.rollout.reader import SkipLookup
    from spangrad.store.rollout.record import Record
    from trainer.ledger.ledger import Ledger


def read_record(client: Client, settings: Settings, id_: str, attempt: int | None = None) -> Record:
    """Read everything that the store and the ledger hold of a rollout.

    Raises:
        StoreError: the store holds no span of it; `http_status` is then 404.
    """
    from commands.inspection.span_kinds import describe
    from spangrad.store.rollout.reader import read, similar_ids

    ledger, error = _ledger(settings)
    with closing(ledger) if ledger else nullcontext():
        record = replace(read(client, id_, describe, attempt, _skip_lookup(ledger) if ledger else None), ledger_silent=error)
    if not record.spans:
        what = f"rollout {id_!r}" if attempt is None else f"attempt {attempt} of rollout {id_!r}"
        missing = StoreError(
            f"the store at {without_userinfo(settings.store.url)} holds no span of {what}. {similar_ids(client, id_, attempt)}"
        )
        missing.http_status = 404
        raise missing
    return record


def read_messages(client: Client, calls: Sequence[Mapping[str, Any]]) -> list[CallMessages]:
    """Return the messages of each call (TraceId, SpanId, ChoiceIndex and Timestamp), in the order of the calls."""
    from page.rollouts.conversation import CallMessages
    from transition_builder.dialects.messages import Dialogue
    from transition_builder.export.call_texts import read_dialogues

    def of(result: object) -> CallMessages:
        if not isinstance(result, Dialogue):
            return CallMessages(problem=str(result))
        prompt = [{"role": "prompt", "content": result.prompt}] if isinstance(result.prompt, str) else result.prompt
        reply = {"role": "assistant", "content": result.reply} if isinstance(result.reply, str) else result.reply
        return CallMessages(prompt, reply, len(result.tools))

    return [of(result) for result in read_dialogues(client, calls)]


def read_skipped(settings: Settings, query: SkippedQuery) -> tuple[list[SkippedRow], dict[str, int]]:
    """Return a page of the groups that a branch skipped, the newest first; and with the first page the number of all by reason.

    Raises:
        LedgerError: there is no ledger, or it does not answer.
    """
    from page.training import SkippedRow
    from trainer.ledger.recovery import of_branch, require_ledger

    with closing(require_ledger(of_branch(settings, query.policy, query.branch))) as ledger:
        skipped = ledger.skips.newest(limit=query.limit, after=query.after, since=query.since, until=query.until)
        reasons = {} if query.after else ledger.skips.counts(query.since, query.until)
    rows = [
        SkippedRow(
            *(row.group.run_id, row.group.mode, row.group.build_spec, row.group.group_id, row.reason.value, row.detail),
            remedy=row.reason.remedy,
            newest_version=row.version,
            skipped_us=row.place[1],
        )
        for row in skipped
    ]
    return rows, {reason.value: count for reason, count in reasons.items()}


def _ledger(settings: Settings) -> tuple[Ledger | None, str]:
    """Return the trainers' ledger, or None and the reason if it cannot be read: the store's part is then shown without it."""
    from trainer.ledger.recovery import existing_ledger

    try:
        return existing_ledger(settings), ""
    except LedgerError as error:
        return None, str(error)


def _skip_lookup(ledger: Ledger) -> SkipLookup:
    from trainer.data.source import Group
    from trainer.ledger.policies import skipped_by

    def of(run: str, mode: str, spec: str, group: str) -> list[tuple[str, str, str, str]]:
        return skipped_by(ledger.database, Group(run, mode, spec, group))

    return of
