"""The engine of the cancellation benchmark: the loop's, which writes down when each call was in flight, and whether it was answered.

In: as `loop_engine`; the first message of a call names its rollout. Out: at /sequences, each call's rollout, begin, end and whether the
engine answered it. Invariant: a call whose client leaves ends at once, as a sequence in vLLM does.
"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from benchmarks.loop_engine import Engine, run


class Sequence(msgspec.Struct):
    """A call in the engine; times are seconds since 1970."""

    rollout: str
    began: float
    ended: float | None = None
    """None: it is in flight."""
    answered: bool = False


class SequenceEngine(Engine):
    """An engine that remembers its calls."""

    def app(self) -> web.Application:
        """Return the server's application."""
        app = super().app()
        self._sequences: list[Sequence] = []
        app.router.add_get("/sequences", self._list)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        sequence = Sequence(body["messages"][0]["content"], time.time())
        self._sequences.append(sequence)
        try:
            response = await super()._chat(request)
            sequence.answered = True
            return response
        finally:
            sequence.ended = time.time()

    async def _list(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._sequences), content_type="application/json")


if __name__ == "__main__":
    run(SequenceEngine, __doc__)
