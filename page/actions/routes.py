"""HTTP route of actions.

In: requests of browsers and programs. Out: sentences on what was done. Invariant: a request that another site could have sent, or that does
not show the page's token for actions, changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from page.access import PageAccess
from page.actions.perform import ActionRunner
from page.actions.requests import read_request
from page.encoding import encode, json_answer
from spangrad.http.server import body

InThread = Callable[[Callable[[], str]], Awaitable[str]]


class ActionRoutes:
    """Handler of requests for actions."""

    def __init__(self, access: PageAccess, runner: ActionRunner | None, in_thread: InThread) -> None:
        """Store the arguments.

        Args:
            access: decides which requests may act.
            runner: carries actions out. None: the page offers none.
            in_thread: runs a blocking function.
        """
        self._access = access
        self._runner = runner
        self._in_thread = in_thread

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [web.post("/api/actions", self.act)]

    async def act(self, request: web.Request) -> web.Response:
        """Carry out an action."""
        if self._runner is None:
            return json_answer(encode({"error": "this page offers no actions. Set page.actions to true."}), 403)
        problem = self._access.action_problem(request)
        if problem:
            return json_answer(encode({"error": problem}), 403)
        runner, action = self._runner, read_request(await body(request))
        return json_answer(encode({"done": await self._in_thread(lambda: runner.run(action, request.remote or ""))}))
