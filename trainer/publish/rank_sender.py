"""Sender of one rank's own parts of the weights: to the process that publishes their sums, to engines' workers the words that they hold.

In: the rank's parts in memory or in a version's files, copied when it is to be sent. Out: sums; words, or their differences from the
version that was sent before. Invariant: words are sent only with the key of the version that is being published, and only of parts that
this rank answers for.

The process that publishes asks with the rank's token: `POST /versions` {"version", "dtype", "key", "delta", "directory"} -> {"parts":
[[name, shape, first, words], ...]} copies the parts, of a version's files where `directory` names them; `POST /sums` {"dtype", "others",
"scope"} -> {"tensors"}; `POST /whole` -> {"sum"}, the addend to the checksum in float32; `POST /end` {"keep"} -> {"full", "delta"}, the
bytes that were sent. Workers ask with the key (`gateway/vllm_plugin/fetching.py` has the form).
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spangrad.errors import SettingsError, TrainerError
from spangrad.http.tokens import is_token
from spangrad.weights.shards import ChecksumScope
from trainer.publish.parts import HeldParts, Parts, Piece
from trainer.publish.shared_file import FilePart, sums_of_parts
from trainer.publish.token_server import Binary, TokenServer

WORDS_PATH = "/words"
WrittenParts = Callable[[Path], Iterable[FilePart]]
"""Function that reads a rank's share of the weights in a version's directory, in float32, one part at a time."""


class RankAddress(msgspec.Struct, frozen=True):
    """Address of a rank's sender, and the token of the process that publishes."""

    url: str
    token: str


class PartsService:
    """Answers to requests for the parts of one rank."""

    def __init__(self, parts: Parts, written: WrittenParts) -> None:
        """Answer for the parts in memory, or for those in a version's files; they are read when a version is to be sent."""
        self._parts, self._written = parts, written
        self._directory: Path | None = None
        """Directory of the version that is being published. None: it is in memory."""
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._held: dict[str, HeldParts] = {}
        """Copies by dtype."""
        self._keys: dict[str, str] = {}
        """Keys by dtype. Empty: nothing is being published."""
        self._sent = {"full": 0, "delta": 0}

    def is_key(self, shown: str | None) -> bool:
        """Return whether words are sent to a request with this token."""
        return any(is_token(shown, key) for key in list(self._keys.values()))

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response to a request of the process that publishes.

        Raises:
            TrainerError: the request cannot be met.
        """
        with self._lock:
            match path:
                case "/versions":
                    dtype = body["dtype"]
                    held = self._held.get(dtype) or HeldParts(dtype)
                    self._held[dtype] = held
                    self._directory = Path(body["directory"]) if body["directory"] else None
                    held.take(self._source(), body["version"], keep_changes=body["delta"])
                    self._keys[dtype] = body["key"]
                    return {"parts": held.listed(), "base": held.base}
                case "/sums":
                    sums = self._of(body["dtype"]).sums(body["others"], ChecksumScope(body["scope"]))
                    return {"tensors": {name: msgspec.structs.asdict(each) for name, each in sums.items()}}
                case "/whole":
                    return {"sum": sum(sums_of_parts([part])[part.name].plain for part in self._source() if part.words.size)}
                case "/end":
                    self._keys.clear()
                    if not body["keep"]:
                        self._held.clear()
                    with self._counting:
                        sent, self._sent = self._sent, {"full": 0, "delta": 0}
                    return dict(sent)
                case _:
                    raise TrainerError(f"there is no {path}.")

    def words(self, body: Mapping[str, Any]) -> Binary:
        """Return the words of pieces, or their differences from the version that the worker holds.

        Raises:
            TrainerError: they are not those of the version that is being published.
        """
        held, version, pieces = self._of(body["dtype"]), str(body["version"]), _pieces(body["pieces"])
        delta = held.delta(pieces) if body["base"] and body["base"] == held.base else None
        words = held.words(pieces) if delta is None else []
        if version != held.version:
            raise TrainerError("another version is being published.")
        with self._counting:
            self._sent["full" if delta is None else "delta"] += held.size(pieces) if delta is None else len(delta)
        if delta is not None:
            return Binary(len(delta), [delta], {"x-delta": "1"})
        return Binary(held.size(pieces), [each.reshape(-1).view("u1").data for each in words])

    def _source(self) -> Iterable[FilePart]:
        return self._parts() if self._directory is None else self._written(self._directory)

    def _of(self, dtype: str) -> HeldParts:
        if dtype not in self._keys:
            raise TrainerError(f"no version is being published in {dtype}.")
        return self._held[dtype]


class RankSender:
    """HTTP server of one rank for publications."""

    def __init__(self, parts: Parts, written: WrittenParts, host: str, port: int = 0) -> None:
        """Listen at the address of this machine from which the process that publishes is reached, at a port, or with 0 at any free one.

        `host` is that process's address, trainer.weight_sync.transfer_host.

        Raises:
            SettingsError: this process cannot listen there.
        """
        token = secrets.token_urlsafe(24)
        self.service = PartsService(parts, written)
        own = own_address(host)

        def allows(path: str, shown: str | None) -> bool:
            return self.service.is_key(shown) if path == WORDS_PATH else is_token(shown, token)

        def answer(path: str, body: Mapping[str, Any]) -> dict[str, Any] | Binary:
            return self.service.words(body) if path == WORDS_PATH else self.service.answer(path, body)

        try:
            self._server = TokenServer(own, port, allows, answer)
        except OSError as error:
            raise SettingsError(
                f"a rank of the trainer cannot listen at {own}, port {port} ({error}). Set trainer.weight_sync.transfer_port to a port "
                "that is free with as many after it as the trainer has ranks, or to 0."
            ) from error
        self.address = RankAddress(self._server.url, token)

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


def own_address(host: str) -> str:
    """Return the address of this machine on the way to `host`, which is `host` itself if that is an address of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as datagrams:
            datagrams.connect(address)  # sends nothing
            return str(datagrams.getsockname()[0])
    except OSError as error:
        raise SettingsError(
            f"trainer.weight_sync.transfer_host = {host!r} cannot be reached from a rank of the trainer ({error}). Set the address at "
            "which other machines reach this one."
        ) from error


def _pieces(listed: Any) -> list[Piece]:
    return [(int(part), int(offset), [(int(size), int(stride)) for size, stride in dimensions]) for part, offset, dimensions in listed]
