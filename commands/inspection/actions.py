"""Actions of the page that need the trainers' ledger or the builder, by the functions of `spangrad policy`, `train restore`, `export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.changes import examples, skips, versions
from commands.changes.versions import VersionKey
from spangrad.errors import SpangradError
from spangrad.settings import Settings

if TYPE_CHECKING:
    from page.actions.perform import ActionCommands
    from page.actions.requests import (
        CollectRequest,
        PinRequest,
        PublishRequest,
        RestoreRequest,
        RollbackRequest,
        UnpinRequest,
        VersionRequest,
    )


def action_commands() -> ActionCommands:
    """Return the functions by which the page carries out actions."""
    from commands.playing.process import start_play
    from page.actions.perform import ActionCommands

    return ActionCommands(_publish, _roll_back, _pin, _restore, _collect, start_play)


def _publish(settings: Settings, request: PublishRequest) -> str:
    return f"{versions.publish(_key(request), settings)}."


def _roll_back(settings: Settings, request: RollbackRequest) -> str:
    from trainer.ledger.recovery import of_branch

    sentences = list[str]()
    try:
        for sentence in versions.roll_back(_key(request), of_branch(settings, request.policy, request.branch)):
            sentences.append(sentence)
    except SpangradError as error:
        if sentences:  # the branch is at the version already: who reads the error must know
            raise type(error)(f"{'; '.join(sentences)}. But {error}") from error
        raise
    return f"{'; '.join(sentences)}."


def _pin(settings: Settings, request: PinRequest | UnpinRequest) -> str:
    from page.actions.requests import PinRequest

    change = versions.pin if isinstance(request, PinRequest) else versions.unpin
    return f"{change(_key(request), settings)}."


def _restore(settings: Settings, request: RestoreRequest) -> str:
    from trainer.ledger.recovery import of_branch

    restored = skips.restore(request.groups, of_branch(settings, request.policy, request.branch))
    return " ".join(skips.restored_text(row) for row in restored)


def _collect(settings: Settings, request: CollectRequest) -> str:
    return examples.add_rollout(request.rollout, request.set_name, settings)


def _key(request: VersionRequest) -> VersionKey:
    return VersionKey(request.policy, request.version, request.branch)
