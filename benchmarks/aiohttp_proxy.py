"""A proxy as one writes it with aiohttp, on uvloop: what `headwater bench proxy` shows beside headwater's.

python aiohttp_proxy.py PORT UPSTREAM_URL
"""

import asyncio
import json
import signal
import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(port: int, upstream: str) -> None:
    """Until SIGTERM."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        json.loads(body)
        headers = {"content-type": "application/json"}
        async with session.request(request.method, upstream + request.path, data=body, headers=headers) as answer:
            kind = {"content-type": answer.headers.get("content-type", "application/json")}
            if answer.headers.get("transfer-encoding") != "chunked":
                return web.Response(status=answer.status, headers=kind, body=await answer.read())
            streamed = web.StreamResponse(status=answer.status, headers=kind)
            await streamed.prepare(request)
            async for piece in answer.content.iter_any():
                await streamed.write(piece)
            await streamed.write_eof()
            return streamed

    application = web.Application(client_max_size=64 << 20)
    application.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await runner.cleanup()
    await session.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
