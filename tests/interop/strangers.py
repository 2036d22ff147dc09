"""What clients without credentials can take from a relay: its memory, its places, and its time for others.

  memory       connections that put a byte into each 4 KiB of all their streams' windows, until the relay ends them
  places       connections that ask for nothing
  datagrams    a request that never ends, and DATAGRAM frames for it, while a user of another connection has an echo

Prints one line of JSON for each. Memory is the resident set of the relay's process, highest while it was attacked.
"""

import argparse
import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import wire
from hostile import HostileClient, Relay, origin
from relay_options import RelayOptions, add_relay_options, relay_options
from udp_echo import udp_echo
from wire import varint

BLOCK_BYTES = 4096
"""The smallest piece of memory that s2n-quic takes for bytes of a stream."""

AT_ONCE = 50
"""Connections that are made at the same time."""


def resident_kib(pid: int) -> int:
    """The memory that a process has in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def connect(server: RelayOptions, stack: AsyncExitStack) -> HostileClient | None:
    """A connection that stays, or nothing where the relay refuses it."""
    try:
        async with asyncio.timeout(5):
            return await stack.enter_async_context(HostileClient.open(server, True))
    except (ConnectionError, TimeoutError):
        return None


async def connections(server: RelayOptions, count: int, stack: AsyncExitStack) -> list[HostileClient]:
    """As many connections as the relay accepts of so many attempts."""
    accepted = []
    for first in range(0, count, AT_ONCE):
        attempts = range(min(AT_ONCE, count - first))
        made = await asyncio.gather(*(connect(server, stack) for _ in attempts))
        accepted += [client for client in made if client]
    return accepted


async def scatter(client: HostileClient) -> int:
    """Puts a byte into each block of what flow control allows on 16 streams; returns how many bytes that took."""
    sent = 0
    for stream in [4 * number for number in range(8)] + [14 + 4 * number for number in range(8)]:
        for first in range(0, 256, 40):
            if client.terminated:
                return sent
            blocks = range(first, min(first + 40, 256))
            frames = [wire.stream_frame(stream, block * BLOCK_BYTES + 1, b"\0") for block in blocks]
            client.packet(b"".join(frames))
            sent += sum(map(len, frames))
            await asyncio.sleep(0)
    return sent


async def memory(server: RelayOptions, options: argparse.Namespace) -> dict[str, object]:
    """What strangers have the relay hold."""
    async with AsyncExitStack() as stack:
        before, began = resident_kib(options.pid), time.monotonic()
        clients = await connections(server, options.connections, stack)
        connected = resident_kib(options.pid)
        sent = sum(await asyncio.gather(*map(scatter, clients)))
        highest = resident_kib(options.pid)
        for _ in range(20):
            await asyncio.sleep(0.1)
            highest = max(highest, resident_kib(options.pid))
        return {
            "attempts": options.connections,
            "accepted": len(clients),
            "ended_by_relay": sum(client.terminated is not None for client in clients),
            "sent_bytes": sent,
            "before_kib": before,
            "connected_kib": connected,
            "highest_kib": highest,
            "seconds": round(time.monotonic() - began, 1),
        }


async def places(server: RelayOptions, options: argparse.Namespace) -> dict[str, object]:
    """How many places strangers get, and for how long."""
    async with AsyncExitStack() as stack:
        before, began = resident_kib(options.pid), time.monotonic()
        clients = await connections(server, options.connections, stack)
        took, held = time.monotonic() - began, resident_kib(options.pid)
        ended = [client.until(lambda client=client: client.terminated, 60) for client in clients]
        await asyncio.gather(*ended)
        return {
            "attempts": options.connections,
            "accepted": len(clients),
            "seconds": round(took, 1),
            "before_kib": before,
            "highest_kib": max(held, resident_kib(options.pid)),
            "ended_by_relay": sum(client.terminated is not None for client in clients),
            "last_ended_after_seconds": round(time.monotonic() - began, 1),
        }


async def datagrams(server: RelayOptions, options: argparse.Namespace) -> dict[str, object]:
    """What a flood of DATAGRAM frames for a request that never ends costs a neighbour."""
    relay = Relay(options.pid)
    async with AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(udp_echo())
        user, stranger = [
            await stack.enter_async_context(HostileClient.open(server, True)) for _ in range(2)
        ]
        for client in (user, stranger):
            client.relay, client.path = server, server.path(host, port)
            client.start()
        tunnel = await user.tunnel()
        stranger.bidi(b"\x01\x40")
        frames = b"".join(b"\x31\x03" + varint(0) + b"\0" + b"x" for _ in range(260))
        cpu_ns, echoes, packets, began = relay.cpu_ns(), 0, 0, time.monotonic()
        while (passed := time.monotonic() - began) < options.seconds:
            # 700 packets of 1,300 bytes a second, and a hundred payloads of the neighbour's.
            while packets < 700 * passed and not stranger.terminated:
                stranger.packet(frames)
                packets += 1
            user.datagram(varint(tunnel // 4) + wire.udp_payload(b"payload"))
            echoes += 1
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        return {
            "hostile_packets": packets,
            "stranger_ended_by": str(stranger._lost()),
            "echoes_asked": echoes,
            "echoes_back": len(user.received[tunnel].payloads),
            "relay_cpu_s": round((relay.cpu_ns() - cpu_ns) / 1e9, 3),
        }


KINDS = {"memory": memory, "places": places, "datagrams": datagrams}


async def run(options: argparse.Namespace) -> int:
    """Measures the kinds that were asked for."""
    server = relay_options(options)
    for name in options.kinds or KINDS:
        row = origin(options) | {"plan": "strangers", "config": name}
        print(json.dumps(row | await KINDS[name](server, options)), flush=True)
    return 0


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_relay_options(parser)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="which; without any, all")
    parser.add_argument("--pid", type=int, required=True, help="the relay's process")
    parser.add_argument("--connections", type=int, default=400, help="attempts to connect")
    parser.add_argument("--seconds", type=float, default=10, help="how long datagrams are sent")
    options = parser.parse_args()
    options.clock, options.seed = "wall", None
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
