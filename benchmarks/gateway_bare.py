"""A reverse proxy of nothing but aiohttp, which records nothing: what any proxy of these libraries adds to a call on this machine.

In: a port, the upstream's address. Out: the upstream's answers. Invariant: the libraries and their options are those of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web

from spangrad.http.server import HttpServer


async def serve(port: int, upstream: str) -> None:
    """Answer until the process is ended."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def forward(request: web.Request) -> web.Response:
            headers = {"Content-Type": request.headers.get("Content-Type", "")}
            url = upstream + request.path
            async with session.request(request.method, url, data=await request.read() or None, headers=headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{rest:.*}", forward)
        async with HttpServer(application, "127.0.0.1", port):
            await asyncio.Event().wait()


def main() -> None:
    """Serve on a port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.upstream))


if __name__ == "__main__":
    main()
