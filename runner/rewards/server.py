"""`spangrad rewards serve`: a Python evaluator over HTTP.

In: the input and output of an attempt, as JSON. Out: its reward, a number or an object of numbers, or null. Invariant: at most
runner.evaluations evaluators run at once, and further requests are answered 503; beyond loopback each request needs the token.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from spangrad.agent.flushing import exit_process
from spangrad.agent.reward_values import rewards_from
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions, user_call
from spangrad.http import server as http_server
from spangrad.http.server import Address, BusyError, body, json_response, json_server
from spangrad.settings import Settings
from spangrad.text_sanitizer import storable, storable_trace

log = logging.getLogger(__name__)


class EvaluationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request; unknown fields are ignored."""

    rollout_id: str
    attempt: int
    task_id: str
    input: Any = None
    output: Any = None
    environment: Any = None
    """Value of the attempt's environment. None: it had none."""


def address_of(settings: Settings) -> Address:
    """Return the address at which the service listens."""
    return Address("rewards", "docs/guides/environments.md", settings.rewards.host, settings.rewards.port, settings.rewards.token)


def serve(settings: Settings, evaluator: Callable[..., Any]) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then end the process.

    Raises:
        SpangradError: the address may not be bound, or is in use.
    """
    address_of(settings).require_usable()
    concurrency = settings.runner.evaluations
    http_server.serve(
        lambda: running(settings, evaluator), lambda url: log.info("rewards ready: %s, %d evaluators at once", url, concurrency)
    )
    logging.shutdown()
    exit_process()  # an ordinary exit would wait for an evaluator's thread that never ends


@asynccontextmanager
async def running(settings: Settings, evaluator: Callable[..., Any]) -> AsyncGenerator[str]:
    """Serve for as long as the block; yield its URL."""
    routes = EvaluatorRoutes(evaluator, settings.runner.evaluations)
    async with json_server(address_of(settings), [web.post("/", routes.answer)]) as server:
        yield server.url


class EvaluatorRoutes:
    """Runs an evaluator, a bounded number of times at once."""

    def __init__(self, evaluator: Callable[..., Any], concurrency: int) -> None:
        self._evaluator = evaluator
        self._most = concurrency
        self._running = 0
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="evaluator")
        self._takes_environment = inspect.signature(evaluator).parameters.keys() & {"environment"}

    async def answer(self, request: web.Request) -> web.Response:
        """Answer the reward of one attempt."""
        # msgspec's decoder refuses halves of surrogate pairs, which an agent's output may hold.
        judged = msgspec.convert(json.loads(await body(request)), EvaluationRequest)
        if self._running >= self._most:
            raise BusyError(f"{self._most} evaluations are running")
        self._running += 1
        task = asyncio.ensure_future(self._answer(judged))
        # A thread continues after its client has left: it counts until it ends.
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not task.cancelled():
            task.exception()  # mark as retrieved

    async def _answer(self, judged: EvaluationRequest) -> web.Response:
        try:
            with plain_exceptions():
                return json_response(rewards_from(await self._judge(judged)))
        except USER_ERRORS as error:  # caught in this task: an exit that ends a task ends the event loop, too
            sentence = storable(f"{type(error).__name__}: {error}"[:1000])
            log.warning("the evaluator failed on rollout %s: %s\n%s", storable(judged.rollout_id), sentence, storable_trace(error))
            return json_response({"error": sentence}, 500)

    async def _judge(self, judged: EvaluationRequest) -> Any:
        keywords = dict.fromkeys(self._takes_environment, judged.environment)
        return await user_call(self._threads, self._evaluator, judged.input, judged.output, **keywords)
