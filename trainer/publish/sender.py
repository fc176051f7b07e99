"""Sender of a version's weights to the engines' workers on the gateway's request: the trainer's side of vLLM's weight-transfer protocol.

In: a version's weights, and the gateway's requests (gateway/weights/transfer.py has their form). Out: the weights, to one engine at a
time, in the engine's dtype, over a carrier that the engine names: `http` anywhere, `nccl` between two GPUs. Invariant: weights are
sent only on requests with the token, which only the gateway gets, and no other body is read; the weights sent are those of the checksum.

Each engine has a connection (group) of its own, so that one that fails delays no other. Over NCCL the sender is rank 0 of a group with
the engine's workers; it is PyTorch's own, since vLLM is not installed beside the trainer: vLLM's workers join by a unique id.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spangrad.errors import SettingsError, SpangradError, TrainerError
from spangrad.http.service import in_url
from spangrad.http.tokens import credential, is_token
from spangrad.settings import TrainerSettings
from spangrad.weights.checksums import nbytes, sums_of_arrays, words_of
from spangrad.weights.shards import ChecksumScope, TensorSums, checksum_of

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 64 * 2**10
"""Largest body of a request of the gateway, in bytes."""
_SILENT_SECONDS = 60.0
"""Time after which a connection on which nothing moves is closed, in seconds."""
Weights = Callable[[], Iterator[tuple[str, NDArray[np.float32]]]]
"""Function that yields each parameter by its Hugging Face name."""


class _Offer:
    """Weights of one version, fetched at the first request."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, frozenset[tuple[str, str]], ChecksumScope], dict[str, TensorSums]] = {}

    @cached_property
    def _named(self) -> dict[str, NDArray[np.float32]]:
        return dict(self._weights())

    @property
    def named(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights by name, in the order in which they are sent."""
        with self._lock:
            return self._named

    def sums(self, dtype: str, others: Mapping[str, str], scope: ChecksumScope) -> dict[str, Any]:
        """Return the sums of each tensor as an engine holds it, and the checksum of all words; engines of a kind share the work."""
        named = self.named
        with self._lock:
            tensors = self._summed(named, dtype, others, scope)
            whole = self._summed(named, "float32", {}, scope) if scope is ChecksumScope.FULL else None
        sums = {name: msgspec.structs.asdict(each) for name, each in tensors.items()}
        return {"tensors": sums, "whole": checksum_of(whole, "float32") if whole else ""}

    def _summed(
        self, named: Mapping[str, NDArray[np.float32]], dtype: str, others: Mapping[str, str], scope: ChecksumScope
    ) -> dict[str, TensorSums]:
        key = dtype, frozenset(others.items()), scope
        if key not in self._sums:
            self._sums[key] = sums_of_arrays(named, dtype, others, scope)
        return self._sums[key]

    def update(self, dtype: str) -> dict[str, Any]:
        """Return the description for vLLM's workers: names, dtypes and shapes."""
        named = self.named
        shapes = [list(array.shape) for array in named.values()]
        return {"names": list(named), "dtype_names": [dtype] * len(named), "shapes": shapes}


class WeightsSender:
    """HTTP server of the trainer for publications."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Listen at trainer.weight_sync.transfer_host.

        Raises:
            SettingsError: it is not an address of this machine, or the port is taken.
        """
        self.token = secrets.token_urlsafe(24)
        self._offer: _Offer | None = None
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[_Offer, str, int]] = {}
        """Weights, their dtype, and how often they may still be fetched over HTTP, by key."""
        self._groups: dict[str, Any] = {}
        """Connected NCCL communicators, by group."""
        try:
            self._server = ThreadingHTTPServer((settings.weight_sync.transfer_host, settings.weight_sync.transfer_port), _handler(self))
        except OSError as error:
            raise SettingsError(
                f"trainer.weight_sync.transfer_host = {settings.weight_sync.transfer_host!r}, trainer.weight_sync.transfer_port = "
                f"{settings.weight_sync.transfer_port}: cannot listen "
                f"there ({error}). Set an address of this machine that the gateway and the engines reach."
            ) from error
        self._server.daemon_threads = True
        host, port = self._server.server_address[:2]
        self.url = f"http://{in_url(str(host))}:{port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="sender of weights", daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def offering(self, weights: Weights) -> Generator[Mapping[str, str]]:
        """Offer these weights to the engines that the gateway names, until the block ends; yield URL and token for the gateway."""
        self._offer = _Offer(weights)
        try:
            yield {"url": self.url, "token": self.token}
        finally:
            self._offer = None
            self._keys.clear()

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response to a request of the gateway.

        Raises:
            TrainerError: the request cannot be met.
        """
        offer = self._offer
        if offer is None:
            raise TrainerError("no version is being published.")
        if path == "/checksum":
            return offer.sums(body["dtype"], body["others"], ChecksumScope(body["scope"]))
        if path != "/transfers":
            raise TrainerError(f"there is no {path}.")
        match body["over"]:
            case "http":
                return self._over_http(offer, body)
            case "nccl":
                return self._over_nccl(offer, body)
            case over:
                raise TrainerError(f"weights are sent over http or nccl, not {over!r}.")

    def fetched(self, key: str) -> tuple[_Offer, str] | None:
        """Return the weights that a worker may fetch with a key, each worker once, and their dtype. None: the key is not valid."""
        with self._lock:
            offer, dtype, left = self._keys.pop(key, (None, "", 0))
            if offer is not None and left > 1:
                self._keys[key] = offer, dtype, left - 1
        return None if offer is None else (offer, dtype)

    def _over_http(self, offer: _Offer, body: Mapping[str, Any]) -> dict[str, Any]:
        key = secrets.token_urlsafe(24)
        self._keys[key] = offer, body["dtype"], body["workers"]
        update = {**offer.update(body["dtype"]), "url": f"{self.url}/weights/{key}"}
        return {"group": "http", "init": None if body["group"] == "http" else {}, "update": update}

    def _over_nccl(self, offer: _Offer, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start to send over NCCL; return the transfer's description. The tests of this project, without a GPU, do not run it."""
        import torch

        nccl: Any = importlib.import_module("torch.cuda.nccl")
        if not torch.cuda.is_available():
            raise TrainerError(
                "engine.transfer = nccl, and the trainer's process sees no GPU. Give it one of its own, beside the engine's, or set "
                "engine.transfer = http."
            )
        group, init = body["group"], None
        if group not in self._groups:
            group, unique_id = secrets.token_urlsafe(8), nccl.unique_id()
            encoded = base64.b64encode(unique_id).decode()
            init = {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": body["workers"] + 1, "packed": False}

            def communicator() -> Any:
                connection = nccl.init_rank(body["workers"] + 1, unique_id, 0)
                # vLLM's workers begin with a sum of one element, which waits for all ranks.
                nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[connection])
                self._groups[group] = connection
                return connection
        else:

            def communicator() -> Any:
                return self._groups[group]

        def send() -> None:
            try:
                to = communicator()
                for array in offer.named.values():
                    nccl.broadcast([torch.from_numpy(array).to("cuda", getattr(torch, body["dtype"]))], comms=[to])
                torch.cuda.synchronize()
            except RuntimeError:
                logger.exception("weights could not be sent to engine %s", body["engine"])

        # Each side waits for the other inside NCCL, so this one begins before the gateway's order has come to the engine.
        threading.Thread(target=send, name=f"sends to {body['engine']}", daemon=True).start()
        return {"group": group, "init": init, "update": offer.update(body["dtype"])}


def _handler(sender: WeightsSender) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SILENT_SECONDS

        def do_POST(self) -> None:
            if not is_token(credential(self.headers.get("authorization", "")), sender.token):
                self._refuse(401, b"another token is needed.")
                return
            length = self.headers.get("content-length", "")
            if not length.isascii() or not length.isdigit():
                self._refuse(411, b"a request states its length.")
                return
            if int(length) > _REQUEST_BYTES:
                self._refuse(413, f"a request may have {_REQUEST_BYTES} bytes.".encode())
                return
            try:
                response = sender.answer(self.path, json.loads(self.rfile.read(int(length))))
            except SpangradError as error:
                self._respond(409, str(error).encode())
            except (ValueError, KeyError, TypeError) as error:
                self._respond(400, f"that is no request of the gateway's: {error!r}".encode())
            else:
                self._respond(200, json.dumps(response).encode(), "application/json")

        def do_GET(self) -> None:
            offered = sender.fetched(self.path.removeprefix("/weights/"))
            if offered is None:
                self._respond(404, b"nothing is offered there.")
                return
            offer, dtype = offered
            named = offer.named
            self.send_response(200)
            self.send_header("content-length", str(sum(nbytes(array, dtype) for array in named.values())))
            self.end_headers()
            for array in named.values():
                self.wfile.write(words_of(array, dtype).data)

        def _refuse(self, status: int, body: bytes) -> None:
            """Respond without reading the request's body, and close the connection, on which it would be taken for the next request."""
            self.close_connection = True
            self._respond(status, body)

        def _respond(self, status: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug("sender: " + format, *args)

    return Handler
