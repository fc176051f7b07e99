"""Prompts as rows of the queue's database: versions, the published version, and the edits of prompt searches.

In: a connection, and requests. Out: rows, or responses. Invariant: a prompt's versions are 1, 2, 3 and so on, without a gap; the same text
is the same version, however often it is stored; an edit is written once, and its first result stays.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from runner.queue.tables import PROMPT_EDITS, PROMPT_HEADS, PROMPT_VERSIONS
from spangrad.agent.prompt_store import TEXT_MOST
from spangrad.database import insert_new
from spangrad.http.queue_messages import NO_NULL, Struct

Text = Annotated[str, Meta(min_length=1, max_length=TEXT_MOST, pattern=NO_NULL)]
PromptName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""Name of a prompt; part of URLs, of baggage and of environment variables."""
_Step = Annotated[int, Meta(ge=0, lt=2**31)]


class SearchStep(Struct, frozen=True, kw_only=True):
    """Position of an edit in a prompt search."""

    search: Annotated[str, Meta(min_length=1, max_length=100, pattern=NO_NULL)]
    round: _Step
    parent: _Step
    """Version that was edited."""
    number: _Step
    """Number of the edit among the parent's edits in that round, from 0."""
    critique: Annotated[str, Meta(pattern=NO_NULL)] = ""
    """Critique of the parent."""


class Put(Struct, frozen=True, kw_only=True):
    """Body of PUT /v1/prompts/{name}."""

    text: Text | None
    """None: the model gave no prompt; only the edit is recorded."""
    publish: bool = True
    """True if requests without a version get this one from now on."""
    edit: SearchStep | None = None
    """None: the text is not from a search."""


class PromptRow(Struct, frozen=True, kw_only=True):
    """One version of a prompt."""

    name: str
    version: int
    checksum: str
    text: str
    created_at: float
    published: bool


class Prompts(Struct, frozen=True, kw_only=True):
    """Response to GET /v1/prompts and /v1/prompts/{name}/versions."""

    prompts: list[PromptRow]


class StoredEdit(SearchStep, frozen=True, kw_only=True):
    """An edit that a search has made."""

    version: int | None
    """None: the model gave no prompt."""


class Edits(Struct, frozen=True, kw_only=True):
    """Response to GET /v1/prompts/{name}/edits."""

    edits: list[StoredEdit]


class PromptPut(Struct, frozen=True, kw_only=True):
    """Response to PUT /v1/prompts/{name}."""

    name: str
    version: int | None
    """None: there was no text."""
    new: bool
    """True if the text was not stored before."""


def put(transaction: sa.Connection, name: str, request_body: Put) -> PromptPut:
    """Store a text as a version, publish it, record the edit that it came from: each of these only if the request asks for it."""
    step = request_body.edit
    edit_key = {"name": name, "search": step.search, "round": step.round, "parent": step.parent, "number": step.number} if step else None
    if edit_key is not None:
        recorded = transaction.execute(
            sa.select(PROMPT_EDITS.c.version).where(*[PROMPT_EDITS.c[key] == value for key, value in edit_key.items()])
        ).first()
        if recorded is not None:
            return PromptPut(name=name, version=recorded.version, new=False)
    version, new = _keep(transaction, name, request_body.text) if request_body.text is not None else (None, False)
    if edit_key is not None and step is not None:
        transaction.execute(PROMPT_EDITS.insert().values(**edit_key, version=version, critique=step.critique))
    if request_body.publish and version is not None:
        insert_new(transaction, PROMPT_HEADS, [{"name": name, "version": version}])
        transaction.execute(PROMPT_HEADS.update().where(PROMPT_HEADS.c.name == name).values(version=version))
    return PromptPut(name=name, version=version, new=new)


def _keep(transaction: sa.Connection, name: str, text: str) -> tuple[int, bool]:
    of_prompt, checksum = PROMPT_VERSIONS.c.name == name, hashlib.sha256(text.encode()).hexdigest()
    same = transaction.execute(sa.select(PROMPT_VERSIONS.c.version).where(of_prompt, PROMPT_VERSIONS.c.checksum == checksum)).scalar()
    if same is not None:
        return same, False
    version = (transaction.execute(sa.select(sa.func.max(PROMPT_VERSIONS.c.version)).where(of_prompt)).scalar() or 0) + 1
    values = {"name": name, "version": version, "checksum": checksum, "text": text, "created_at": time.time()}
    transaction.execute(PROMPT_VERSIONS.insert().values(values))
    return version, True


def get(connection: sa.Connection, name: str, version: int | None) -> PromptRow | None:
    """Return a version, or None if there is none; `version` None: the published one."""
    query = _SHOWN.where(PROMPT_VERSIONS.c.name == name)
    row = connection.execute(query.where(PROMPT_VERSIONS.c.version == (PROMPT_HEADS.c.version if version is None else version))).first()
    return _prompt(row) if row else None


def versions(connection: sa.Connection, name: str) -> Prompts:
    """Return every version of a prompt, oldest first."""
    rows = connection.execute(_SHOWN.where(PROMPT_VERSIONS.c.name == name).order_by(PROMPT_VERSIONS.c.version))
    return Prompts(prompts=[_prompt(row) for row in rows])


def newest(connection: sa.Connection) -> Prompts:
    """Return each prompt in its published version, or in its newest if none is published."""
    last = (
        sa.select(PROMPT_VERSIONS.c.name, sa.func.max(PROMPT_VERSIONS.c.version).label("version"))
        .group_by(PROMPT_VERSIONS.c.name)
        .subquery()
    )
    chosen = sa.func.coalesce(PROMPT_HEADS.c.version, last.c.version)
    rows = connection.execute(
        _SHOWN.join(last, last.c.name == PROMPT_VERSIONS.c.name).where(PROMPT_VERSIONS.c.version == chosen).order_by(PROMPT_VERSIONS.c.name)
    )
    return Prompts(prompts=[_prompt(row) for row in rows])


def edits(connection: sa.Connection, name: str, search: str | None) -> Edits:
    """Return the edits of a prompt by one search, or by all searches."""
    columns = [PROMPT_EDITS.c[key] for key in ("search", "round", "parent", "number")]
    query = sa.select(PROMPT_EDITS).where(PROMPT_EDITS.c.name == name).order_by(*columns)
    rows = connection.execute(query if search is None else query.where(PROMPT_EDITS.c.search == search)).mappings()
    return Edits(edits=[msgspec.convert({str(key): value for key, value in row.items() if key != "name"}, StoredEdit) for row in rows])


_SHOWN = sa.select(PROMPT_VERSIONS, PROMPT_HEADS.c.version.label("head")).select_from(
    PROMPT_VERSIONS.outerjoin(PROMPT_HEADS, PROMPT_HEADS.c.name == PROMPT_VERSIONS.c.name)
)


def _prompt(row: sa.Row[Any]) -> PromptRow:
    return PromptRow(
        name=row.name,
        version=row.version,
        checksum=row.checksum,
        text=row.text,
        created_at=row.created_at,
        published=row.version == row.head,
    )
