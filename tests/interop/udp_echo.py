"""A UDP target that sends every payload back to its sender."""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MAX_PAYLOAD_BYTES = 65535


def answer(echo: socket.socket) -> None:
    """Returns the payloads that are queued at a socket."""
    with suppress(BlockingIOError):
        while True:
            payload, sender = echo.recvfrom(MAX_PAYLOAD_BYTES)
            echo.sendto(payload, sender)


@asynccontextmanager
async def udp_echo(
    host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[str, int]]:
    """Echoes on host and port while the context lasts; yields the bound address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    loop = asyncio.get_running_loop()
    # A bare socket: asyncio's datagram transport sends no empty payload.
    with socket.socket(family, socket.SOCK_DGRAM) as echo:
        echo.setblocking(False)
        echo.bind((host, port))
        loop.add_reader(echo, answer, echo)
        try:
            yield echo.getsockname()[:2]
        finally:
            loop.remove_reader(echo)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free one")
    options = parser.parse_args()
    async with udp_echo(options.host, options.port) as (host, port):
        print(json.dumps({"host": host, "port": port}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(_main())
    except KeyboardInterrupt:
        pass
