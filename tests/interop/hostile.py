"""Fills packets with each kind of QUIC frame and of capsule, and says what a packet costs a relay.

The figure is time on a CPU as the kernel counts it for the threads of the process (schedstat). Where time is counted
in instructions (tests/vm/run --icount), it is instructions; elsewhere it is as noisy as the machine.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import wire
from raw_client import RawClient
from relay_options import RelayOptions, add_relay_options, host_and_port, relay_options
from udp_echo import udp_echo
from wire import CapsuleType, FrameType, varint

PACKET_BYTES = 1300
"""Bytes of frames in a packet of about 1,340."""

Fill = Callable[[int], bytes]
"""Makes the frame of a number."""


STRANGERS: dict[str, Fill] = {
    "PADDING": lambda _: b"\0",
    "PING": lambda _: b"\1",
    "ACK": lambda _: b"\2\0\0\0\0",
    "STOP_SENDING": lambda _: b"\5" + varint(0) + varint(0x10C),
    "CRYPTO": lambda n: b"\6" + varint(n) + b"\1x",
    "STREAM, a byte each": lambda n: wire.stream_frame(0, n, b"\x21" if n == 0 else b"\x40"),
    "STREAM, a byte each, backwards": lambda n: wire.stream_frame(0, 60000 - n, b"x"),
    "STREAM, empty": lambda _: wire.stream_frame(0, 0, b""),
    "MAX_DATA": lambda n: b"\x10" + varint(1 << 30 | n),
    "MAX_STREAM_DATA": lambda n: b"\x11" + varint(0) + varint(1 << 20 | n),
    "MAX_STREAMS": lambda n: b"\x12" + varint(1000 + n),
    "DATA_BLOCKED": lambda n: b"\x14" + varint(n),
    "STREAM_DATA_BLOCKED": lambda n: b"\x15" + varint(0) + varint(n),
    "STREAMS_BLOCKED": lambda n: b"\x16" + varint(n),
    "PATH_CHALLENGE": lambda n: b"\x1a" + n.to_bytes(8),
    "PATH_RESPONSE": lambda n: b"\x1b" + n.to_bytes(8),
    "DATAGRAM, a byte each": lambda _: b"\x31\3\0\0x",
    "DATAGRAM, of no stream yet": lambda _: b"\x31\4\x40\xff\0x",
    "DATAGRAM, of no context": lambda _: b"\x31\2\0\7",
}
"""Frames of a client that nobody knows, with a request that has no end."""


USERS: dict[str, bytes] = {
    "capsules DATAGRAM, a byte each": wire.data(
        200 * wire.capsule(CapsuleType.DATAGRAM, wire.udp_payload(b"x"))
    ),
    "capsules DATAGRAM, empty": wire.data(
        200 * wire.capsule(CapsuleType.DATAGRAM, wire.udp_payload(b""))
    ),
    "capsules of an unknown type": wire.data(
        200 * wire.capsule(CapsuleType.RESERVED, b"")
    ),
    "DATA frames of a capsule each": wire.data(
        wire.capsule(CapsuleType.DATAGRAM, wire.udp_payload(b"x"))
    ),
    "DATA frames of no content": wire.data(b""),
    "frames of an unknown type": wire.frame(FrameType.RESERVED),
}
"""What a user sends in its tunnel's stream."""


class Relay:
    """The process whose time is counted."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")

    def cpu_ns(self) -> int:
        """The time that its threads have had on a CPU."""
        stats = (task / "schedstat" for task in self._tasks.iterdir())
        return sum(int(stat.read_text().split()[0]) for stat in stats)


async def settled(client: RawClient) -> None:
    """Waits until the relay has dealt with what was sent."""
    if client.terminated is None:
        await client.ping()


async def stranger(options: argparse.Namespace, relay: Relay, fill: Fill) -> float:
    """Sends packets of one frame on a connection of their own; returns nanoseconds a packet."""
    async with RawClient.open(options.relay_options, True) as client:
        client.relay = options.relay_options
        client.start()
        client.bidi(b"")
        await settled(client)
        number = 0
        packets = []
        for _ in range(options.packets):
            frames = bytearray()
            while len(piece := fill(number)) + len(frames) <= PACKET_BYTES:
                frames += piece
                number += 1
            packets.append(bytes(frames))
        return await cost(client, relay, packets)


async def user(options: argparse.Namespace, relay: Relay, piece: bytes) -> float:
    """As stranger, for bytes of a tunnel's stream."""
    async with RawClient.open(options.relay_options, True) as client:
        client.relay, client.path = options.relay_options, options.path
        client.start()
        stream = await client.tunnel()
        content = piece * (PACKET_BYTES * options.packets // len(piece))
        offset = client._quic._streams[stream].sender._buffer_stop
        chunks = range(0, len(content), PACKET_BYTES)
        packets = [
            wire.stream_frame(stream, offset + at, content[at : at + PACKET_BYTES])
            for at in chunks
        ]
        return await cost(client, relay, packets)


async def cost(client: RawClient, relay: Relay, packets: list[bytes]) -> float:
    """Sends packets a few at a time; returns what one costs the relay in nanoseconds."""
    before, sent = relay.cpu_ns(), 0
    for first in range(0, len(packets), 10):
        for frames in packets[first : first + 10]:
            client.packet(frames)
            sent += 1
        try:
            await settled(client)
        except ConnectionError:
            break
        if client.terminated is not None:
            break
    return (relay.cpu_ns() - before) / sent


async def run(options: argparse.Namespace) -> int:
    """Measures all kinds; returns the exit status."""
    options.relay_options = relay_options(options)
    relay = Relay(options.pid)
    async with AsyncExitStack() as stack:
        target = options.target or await stack.enter_async_context(udp_echo())
        options.path = options.relay_options.path(*target)
        kinds = [(name, stranger, fill) for name, fill in STRANGERS.items()]
        kinds += [(name, user, piece) for name, piece in USERS.items()]
        for name, measure, what in kinds:
            if options.only in name:
                spent = await measure(options, relay, what)
                print(f"{spent:12.0f} ns  {name}", flush=True)
    return 0


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_relay_options(parser)
    parser.add_argument("--pid", type=int, required=True, help="the relay's process")
    parser.add_argument("--target", type=host_and_port, metavar="HOST:PORT")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    parser.add_argument("--packets", type=int, default=200, help="packets of each kind")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
