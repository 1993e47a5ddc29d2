"""Serve with the code on PYTHONPATH, of this checkout or another, until the standard input ends.

    python -P bench/support/gateway_side.py

Print a JSON object: addresses of a mesh with the echo engine and of a trivial application behind the gateway's HTTP
server, and the processes that serve them.
"""

import asyncio
import json
import os
import sys
from typing import Any

import uvloop

from bench.support.load import processes_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from gateway.http.server import HttpServer
from sluice import settings as config

SLOTS = 16


async def trivial(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def main() -> None:
    """Serve."""
    server = HttpServer("127.0.0.1:0", trivial)
    server.bind()
    await server.start()
    http = config.HttpSettings(address="127.0.0.1:0")
    async with mesh_of(mesh_settings(echo(SLOTS), http=http)) as mesh:
        served = {
            "grpc": mesh.address,
            "http": mesh.http,
            "trivial": server.address,
            "gateway": processes_of(mesh)["gateway"].pid,
            "own": os.getpid(),
        }
        print(json.dumps(served), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    await server.close()


if __name__ == "__main__":
    uvloop.run(main())
