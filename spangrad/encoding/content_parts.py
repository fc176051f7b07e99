"""Modality of a policy call: the images, audio, video and files among the parts of its prompt and its response.

In: prompts and responses in any dialect or convention, as JSON values. Out: the kinds of parts that are not text. Invariant: only content
is looked at, so that a tool's schema or arguments, or a text that speaks of images, are never taken for one.

Token ids of such a call hold placeholders where the engine saw pixels or sound, which a trainer does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

_KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("image", "image_url", "input_image", "image_pil", "image_embeds", "image_generation_call", "computer_screenshot"), "image"
    ),
    **dict.fromkeys(("audio", "audio_url", "input_audio", "output_audio", "audio_embeds"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video", "video_embeds"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Types of content parts that are not text, in every dialect, and fields that hold such a part where it names no type."""
_UNTYPED = {**_KINDS, "images": "image"}
NAMES: Final = tuple(sorted(_UNTYPED, reverse=True))
"""Types and fields without one of which JSON holds no such part; of two that begin alike the longer stands first."""
_NESTED = ("choices", "message", "content", "output", "outputs", "parts")
"""Fields that hold content. A tool call's `input` and `arguments`, and a tool's schema, are not among them."""
FIELDS: Final = ("type", "modality", *_NESTED, *NAMES)
"""Fields of an object that are looked at; the others say nothing of its modality."""


def modality(contents: Iterable[Any], prompt_embeds: object = None) -> str:
    """Return the kinds of content that are not text, joined by commas in alphabetical order, such as `audio,image`; empty: text only.

    Args:
        contents: prompts (messages, system prompts, texts) and responses, decoded.
        prompt_embeds: the request's field of this name, which holds a prompt as embeddings.
    """
    kinds, todo = {"embeddings"} if prompt_embeds else set[str](), list(contents)
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += cast("list[Any]", value)
        elif isinstance(value, dict):
            part = cast("dict[str, Any]", value)
            types = [type_ for name in ("type", "modality") if isinstance(type_ := part.get(name), str)]
            kinds |= {_KINDS[type_] for type_ in types if type_ in _KINDS}
            if not types:
                kinds |= {_UNTYPED[name] for name, held in part.items() if held and name in _UNTYPED}
            todo += [part[name] for name in _NESTED if name in part]
    return ",".join(sorted(kinds))
