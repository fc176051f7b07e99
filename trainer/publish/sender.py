"""Sender of a version's weights to the engines' workers on the gateway's request: the trainer's side of vLLM's weight-transfer protocol.

In: where a version's weights are, and the gateway's requests (gateway/weights/transfer.py has their form). Out: sums, and the way in which
workers get the words: over `http` from each of the trainer's ranks, or over `nccl` whole from this process. Invariant: weights are sent
only on requests with the token, which only the gateway gets; the weights sent are those of the checksum.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Generator, Mapping
from typing import Any

from spangrad.errors import SettingsError, TrainerError
from spangrad.http.tokens import is_token
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import ChecksumScope
from trainer.publish.nccl_sender import NcclSender
from trainer.publish.offers import WeightsOffer, WeightSource
from trainer.publish.token_server import TokenServer

logger = logging.getLogger(__name__)


class WeightsSender:
    """HTTP server of the trainer for publications."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Listen at trainer.weight_sync.transfer_host.

        Raises:
            SettingsError: it is not an address of this machine, or the port is taken.
        """
        self.token = secrets.token_urlsafe(24)
        self.sent: Mapping[str, int] = {}
        """Bytes that were sent over HTTP for the last version, as words (`full`) and as differences (`delta`). Empty: not known."""
        self._offer: WeightsOffer | None = None
        self._nccl = NcclSender()
        sync = settings.weight_sync
        self._delta = sync.delta
        try:
            self._server = TokenServer(sync.transfer_host, sync.transfer_port, lambda _, shown: is_token(shown, self.token), self._answer)
        except OSError as error:
            raise SettingsError(
                f"trainer.weight_sync.transfer_host = {sync.transfer_host!r}, trainer.weight_sync.transfer_port = "
                f"{sync.transfer_port}: cannot listen "
                f"there ({error}). Set an address of this machine that the gateway and the engines reach."
            ) from error
        self.url = self._server.url

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    @contextlib.contextmanager
    def offering(self, source: WeightSource) -> Generator[Mapping[str, str]]:
        """Offer these weights to the engines that the gateway names, until the block ends; yield URL and token for the gateway."""
        offer = self._offer = WeightsOffer(source, delta=self._delta)
        self.sent = {}
        try:
            yield {"url": self.url, "token": self.token}
        finally:
            self._offer = None
            try:
                self.sent = offer.end()
            except TrainerError as error:
                logger.warning("a rank of the trainer could not be asked to end a transfer: %s", error)

    def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        offer = self._offer
        if offer is None:
            raise TrainerError("no version is being published.")
        match path:
            case "/checksum":
                return offer.sums(body["dtype"], body["others"], ChecksumScope(body["scope"]))
            case "/transfers":
                return self._transfer(offer, body)
            case _:
                raise TrainerError(f"there is no {path}.")

    def _transfer(self, offer: WeightsOffer, body: Mapping[str, Any]) -> dict[str, Any]:
        match body["over"]:
            case "http":
                plan = offer.plan(body["dtype"])
                update = plan | {"base": ""} if body["whole"] else plan
                return {"group": "http", "init": None if body["group"] == "http" else {}, "update": update}
            case "nccl":
                return self._nccl.send(offer.named(), body)
            case over:
                raise TrainerError(f"weights are sent over http or nccl, not {over!r}.")
