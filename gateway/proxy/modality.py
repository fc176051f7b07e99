"""Modality of a policy call: the images, audio, video and files among its prompt's and its answer's parts.

In: a request in any dialect, an answer's JSON. Out: the kinds of parts that are not text; empty: text only. Invariant: only content is
looked at, so that a tool's schema or arguments, or a text that speaks of images, are never taken for one; JSON that cannot be read has no
modality, and nothing fails.

Token ids of such a call hold placeholders where the engine saw pixels or sound, which a trainer does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from gateway.dialects.base import ClientRequest
from spangrad.errors import JSON_ERRORS

_KINDS = {
    **dict.fromkeys(
        ("image", "image_url", "input_image", "image_pil", "image_embeds", "image_generation_call", "computer_screenshot"), "image"
    ),
    **dict.fromkeys(("audio", "audio_url", "input_audio", "output_audio", "audio_embeds"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video", "video_embeds"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Types of content parts that are not text, in every dialect, and fields that hold such a part where it names no type."""
_UNTYPED = {**_KINDS, "images": "image"}
_NESTED = ("choices", "message", "content", "output", "outputs")
"""Fields that hold content. A tool call's `input` and `arguments`, and a tool's schema, are not among them."""
_INITIALS = "".join(sorted({name[0] for name in _UNTYPED})).encode()
_NAMED = re.compile(
    rb'"(?=[%b])(?:' % _INITIALS + b"|".join(name.encode() for name in sorted(_UNTYPED, reverse=True)) + rb')"(?!\s*:\s*null)'
)
"""Names of such parts and fields. The look-ahead at the first letter alone spares most of the time in a text with many quotes."""
_ESCAPED = re.compile(rb"\\u00[67]")
"""Escapes of ASCII letters, which no encoder writes: the name of a type may be written with them."""


def modality(request: ClientRequest, answer: bytes | None) -> str:
    """Return the kinds of content of a call that are not text, joined by commas in alphabetical order, such as `audio,image`.

    Args:
        request: the client's; its conversation is the fields that stayed raw.
        answer: as whole JSON. None: there is none.
    """
    conversation = [bytes(value) for value in request.fields.values() if isinstance(value, msgspec.Raw)]
    kinds = _kinds(_decoded(conversation if answer is None else [*conversation, answer]))
    if request.fields.get("prompt_embeds"):
        kinds.add("embeddings")
    return ",".join(sorted(kinds))


def _decoded(texts: Iterable[bytes]) -> Iterable[Any]:
    """Decode the texts that may hold such a part, and only those: decoding a long conversation costs more than all else here."""
    for text in texts:
        if _NAMED.search(text) or _ESCAPED.search(text):
            try:
                yield msgspec.json.decode(text)
            except JSON_ERRORS:
                continue


def _kinds(values: Iterable[Any]) -> set[str]:
    kinds, todo = set[str](), list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += cast("list[Any]", value)
        elif isinstance(value, dict):
            part = cast("dict[str, Any]", value)
            kind = part.get("type")
            if isinstance(kind, str):
                kinds |= {_KINDS[kind]} if kind in _KINDS else set()
            else:
                kinds |= {_UNTYPED[name] for name, held in part.items() if held and name in _UNTYPED}
            todo += [part[name] for name in _NESTED if name in part]
    return kinds
