"""The dense retrieval service: `python -m recipes.musique.retrieval --corpus FILE --embedder DIRECTORY`.

In: a corpus, a JSON object with `text` a line; an encoder in Hugging Face's layout, such as E5's, or `words`, which needs no model.
Out: HTTP, `POST /search {"query", "count"}` -> `{"documents": [TEXT]}`, nearest first; `GET /health`. Invariant: every vector has length 1,
so that the inner product orders by angle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str], str], Vectors]
"""(texts, "query" or "passage") -> vectors of length 1, shape (texts, width)."""
WORDS = "words"
_WIDTH = 256
_BATCH = 64


def embed_words(texts: Sequence[str], kind: str) -> Vectors:
    """Return sums of a random vector for each word, the same in every process."""
    vectors = np.zeros((len(texts), _WIDTH), np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            vector += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(_WIDTH, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def encoder(directory: Path) -> Embed:
    """Return the mean of an encoder's last hidden states, with E5's prefixes."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory).to(device).eval()

    def embed(texts: Sequence[str], kind: str) -> Vectors:
        parts = list[Vectors]()
        for begin in range(0, len(texts), _BATCH):
            prefixed = [f"{kind}: {text}" for text in texts[begin : begin + _BATCH]]
            rows: Any = tokenizer(prefixed, padding=True, truncation=True, max_length=512, return_tensors="pt").to(device)
            with torch.no_grad():
                states = model(**rows).last_hidden_state
            mask = rows["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(means, dim=1).float().cpu().numpy())
        return np.concatenate(parts)

    return embed


class Index:
    """A corpus and its vectors."""

    def __init__(self, texts: Sequence[str], embed: Embed) -> None:
        self._texts, self._embed = list(texts), embed
        self._vectors = embed(self._texts, "passage")

    def search(self, query: str, count: int) -> list[str]:
        """Return the texts nearest to a query, nearest first."""
        nearness = self._vectors @ self._embed([query], "query")[0]
        return [self._texts[place] for place in np.argsort(-nearness, kind="stable")[:count]]


def application(index: Index) -> web.Application:
    """Return the service of an index."""

    async def search(request: web.Request) -> web.Response:
        body = await request.json()
        documents = await asyncio.to_thread(index.search, str(body["query"]), int(body["count"]))
        return web.json_response({"documents": documents})

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    served = web.Application()
    served.add_routes([web.post("/search", search), web.get("/health", health)])
    return served


def main() -> None:
    """Serve a corpus."""
    parser = argparse.ArgumentParser(prog="python -m recipes.musique.retrieval", description="Serve a corpus for dense retrieval.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--embedder", required=True, help=f"directory of an encoder, or {WORDS}")
    parser.add_argument("--host", default="127.0.0.1", help="address that it listens on; it asks for no token")
    parser.add_argument("--port", type=int, default=8193)
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in arguments.corpus.read_bytes().splitlines()]  # a text would be cut at U+2028
    embed = embed_words if arguments.embedder == WORDS else encoder(Path(arguments.embedder))
    web.run_app(application(Index(texts, embed)), host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
