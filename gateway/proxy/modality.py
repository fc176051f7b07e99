"""Modality of a policy call, of its request and its answer.

In: a request in any dialect, an answer's JSON. Out: the kinds of parts that are not text; empty: text only. Invariant: JSON that cannot be
read has no modality, and nothing fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.dialects.base import ClientRequest
from spangrad.encoding import content_parts
from spangrad.encoding.content_parts import NAMES
from spangrad.errors import JSON_ERRORS

_INITIALS = "".join(sorted({name[0] for name in NAMES})).encode()
_NAMED = re.compile(rb'"(?=[%b])(?:' % _INITIALS + b"|".join(name.encode() for name in NAMES) + rb')"(?!\s*:\s*null)')
"""Names of such parts and fields. The look-ahead at the first letter alone spares most of the time in a text with many quotes."""
_ESCAPED = re.compile(rb"\\u00[67]")
"""Escapes of ASCII letters, which no encoder writes: the name of a type may be written with them."""


def modality(request: ClientRequest, answer: bytes | None) -> str:
    """Return the kinds of content of a call that are not text, joined by commas in alphabetical order, such as `audio,image`.

    `answer` is whole JSON, also where it came as a stream. None: there is none.
    """
    # The conversation is what the dialect left raw.
    conversation = [bytes(value) for value in request.fields.values() if isinstance(value, msgspec.Raw)]
    contents = _decoded(conversation if answer is None else [*conversation, answer])
    return content_parts.modality(contents, request.fields.get("prompt_embeds"))


def _decoded(texts: Iterable[bytes]) -> Iterable[Any]:
    """Decode the texts that may hold such a part, and only those: decoding a long conversation costs more than all else here."""
    for text in texts:
        if _NAMED.search(text) or _ESCAPED.search(text):
            try:
                yield msgspec.json.decode(text)
            except JSON_ERRORS:
                continue
