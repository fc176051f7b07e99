"""Player whose replies a function writes: an opponent to train against, or to be measured by.

In: MODULE:FUNCTION, which takes the messages so far and returns the reply's text. Out: replies. Invariant: a script's replies are no calls
of a policy, so that nothing of them is trained.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from spangrad.episode.player import ModelReply, ReplyRequest
from spangrad.episode.user_calls import user_call
from spangrad.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ScriptModel:
    """Model that is a function, plain or async."""

    function: Callable[[Sequence[Mapping[str, Any]]], Any]

    @classmethod
    def load(cls, reference: str) -> Self:
        """Import a function.

        Raises:
            SettingsError: the reference names none.
        """
        module, _, name = reference.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"runner.episode.players: the script {reference!r} cannot be imported ({error}). Name MODULE:FUNCTION of the agent's "
                "directory."
            ) from error
        return cls(function)

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Call the function; a plain one in a thread."""
        text = await user_call(None, self.function, request.messages)
        return ModelReply({"role": "assistant", "content": str(text)}, "stop")
