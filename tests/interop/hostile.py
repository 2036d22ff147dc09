"""Fills packets with each kind of frame, of request and of capsule, and measures a packet's cost to a relay.

The figure is the CPU time that the kernel counts for the threads of the process (schedstat). Where time is counted
in instructions (tests/vm/run --icount), it is instructions; elsewhere, it is as noisy as the machine.

Each kind states how the relay must react: that it acknowledges all packets, so that it has processed all
their frames, or that it ends the connection with a certain error. Any other reaction is an error.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

from aioquic.buffer import Buffer
from aioquic.quic.packet import QuicFrameType, pull_ack_frame

import hostile_packets
import wire
from hostile_packets import (
    ACKNOWLEDGED,
    DISCARDED,
    NOTHING,
    OTHER_STREAM,
    SILENT,
    Content,
    Kind,
)
from raw_client import REACTION_S, Outcome, RawClient
from relay_options import add_relay_options, relay_options
from wire import varint

AFTERMATH_S = 0.05
"""The time that a relay may need to remove a connection that has ended."""


class Relay:
    """The process whose CPU time is measured."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")

    def cpu_ns(self) -> int:
        """The CPU time of its threads."""
        stats = (task / "schedstat" for task in self._tasks.iterdir())
        return sum(int(stat.read_text().split()[0]) for stat in stats)


class HostileClient(RawClient):
    """A client that knows which packets were acknowledged, and counts the relay's frames by type."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.frames: Counter[int] = Counter()
        self.acknowledged: set[int] = set()
        handlers = self._quic._QuicConnection__frame_handlers
        for kind, (handle, epochs) in list(handlers.items()):
            handlers[kind] = (self._counting(handle), epochs)

    def _counting(self, handle):
        def counting(context, kind, buffer):
            self.frames[kind] += 1
            if kind in (QuicFrameType.ACK, QuicFrameType.ACK_ECN):
                rest = Buffer(data=buffer.data_slice(buffer.tell(), buffer.capacity))
                for numbers in pull_ack_frame(rest)[0]:
                    self.acknowledged.update(numbers)
            handle(context, kind, buffer)

        return counting

    def know(self, *streams: int) -> None:
        """Registers streams that hand-made frames open; otherwise, the relay's frames about them would be errors."""
        for stream in streams:
            self._quic._get_or_create_stream_for_send(stream)

    async def settle(self) -> Outcome | None:
        """Waits until the relay has processed all packets; returns how the connection ended, if it did."""
        if self.terminated is None:
            answered = asyncio.ensure_future(self.ping())
            # The reason for a close is also recorded elsewhere.
            answered.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
            if not (await asyncio.wait([answered], timeout=REACTION_S))[0]:
                return SILENT
        return self._lost()


    async def end(self) -> Outcome | None:
        """Waits until the relay has ended the connection; returns how, if it did."""
        for _ in range(4):
            if await self.until(lambda: self.terminated, REACTION_S / 4):
                break
            # The close may get lost, and is repeated in response to packets (RFC 9000 §10.2.1).
            self.packet(b"\1")
        return self._lost()


class Measurement:
    """The relay's reaction to the packets of a kind, and their cost."""

    def __init__(self, name: str, outcome: str = str(ACKNOWLEDGED)) -> None:
        self.name = name
        self.outcome = outcome
        self.packets = 0
        self.pieces = 0
        self.samples: list[float] = []
        """Nanoseconds per packet, by connection or run."""
        self.faults: list[str] = []


class Hostility:
    """All measurements against one relay."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.server = relay_options(options)
        self.process = Relay(options.pid)
        # The target answers nothing, and its queue holds a part of the payloads.
        self.target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.target.bind(("127.0.0.1", 0))
        self.target.setblocking(False)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[HostileClient]:
        """A connection with a control stream."""
        async with HostileClient.open(self.server, True) as client:
            client.relay = self.server
            client.path = self.server.path(*self.target.getsockname())
            client.start()
            yield client

    @asynccontextmanager
    async def tunnel(self) -> AsyncIterator[tuple[HostileClient, int]]:
        """A tunnel to the target: its connection and its stream."""
        async with self.client() as client:
            yield client, await client.tunnel()

    async def stranger(self, kind: Kind) -> Measurement:
        """Sends the packets of a kind."""
        measured = Measurement(kind.name, str(kind.outcome))
        for _ in range(self.options.samples):
            async with self.client() as client:
                client.bidi(b"\x21")
                client.know(OTHER_STREAM, *range(4, 4 * kind.streams + 4, 4))
                await kind.prepare(client)
                await client.settle()
                packets, number = [], 0
                for _ in range(kind.packets or self.options.packets):
                    frames, pieces = kind.packet(client, number)
                    number += pieces
                    packets.append(frames)
                await self._send(client, kind, packets, measured)
            measured.pieces += number
        return measured

    async def _send(
        self,
        client: HostileClient,
        kind: Kind,
        packets: list[bytes],
        measured: Measurement,
    ) -> None:
        client.frames.clear()
        sent: set[int] = set()
        before, ended = self.process.cpu_ns(), None
        for first in range(0, len(packets), kind.at_once):
            for frames in packets[first : first + kind.at_once]:
                sent.add(client.packet(frames, kind.damaged))
            if ended := await client.settle():
                break
        if ended is None and kind.outcome not in (ACKNOWLEDGED, DISCARDED):
            ended = await client.end()
        if ended:
            await asyncio.sleep(AFTERMATH_S)
        measured.samples.append((self.process.cpu_ns() - before) / len(sent))
        measured.packets += len(sent)
        missing = len(sent - client.acknowledged)
        became = {0: ACKNOWLEDGED, len(sent): DISCARDED}.get(
            missing, Outcome(f"{missing} packets of {len(sent)} not acknowledged")
        )
        if not any(
            (ended or became).satisfies(wanted)
            for wanted in (kind.outcome, kind.or_else)
            if wanted
        ):
            measured.faults.append(str(ended or became))
        if kind.answer is not None and not client.frames[kind.answer]:
            measured.faults.append(f"no {kind.answer.name} in answer")

    async def user(self, content: Content) -> Measurement:
        """Repeats bytes in a tunnel's stream until they fill the packets."""
        measured = Measurement(content.name)
        piece = content.piece * max(1, 1280 // len(content.piece))
        for _ in range(self.options.samples):
            async with self.tunnel() as (client, stream):
                begin = client._quic._streams[stream].sender._buffer_stop
                sent = piece * self.options.packets
                packets = [
                    wire.stream_frame(stream, begin + at, sent[at : at + 1280])
                    for at in range(0, len(sent), 1280)
                ]
                await self._send(client, Kind(content.name, NOTHING), packets, measured)
                if client.received[stream].ended:
                    measured.faults.append("the tunnel has ended")
            self._look_at_target(content.delivers, measured)
        return measured

    async def ordinary(self) -> Measurement:
        """Sends payloads of 1,200 bytes to a target."""
        measured = Measurement("ordinary: a payload of 1,200 bytes to a target")
        for _ in range(self.options.samples):
            async with self.tunnel() as (client, stream):
                payload = varint(stream // 4) + wire.udp_payload(bytes(1200))
                frames = varint(QuicFrameType.DATAGRAM) + payload
                packets = [frames] * self.options.packets
                await self._send(client, Kind("", NOTHING), packets, measured)
            self._look_at_target(True, measured)
        measured.pieces = measured.packets
        return measured

    def _look_at_target(self, delivers: bool, measured: Measurement) -> None:
        """Empties the target's queue, which must contain payloads or be empty."""
        arrived = 0
        with suppress(BlockingIOError):
            while True:
                self.target.recv(1 << 16)
                arrived += 1
        if delivers != (arrived > 0):
            measured.faults.append(f"{arrived} payloads at the target")

    async def handshakes(self) -> Measurement:
        """Opens connections and closes them again, which takes a client five or six packets."""
        measured = Measurement("ordinary: a connection, all its packets", "connected")
        for _ in range(self.options.samples):
            before = self.process.cpu_ns()
            async with self.client() as client:
                await client.settle()
            await asyncio.sleep(AFTERMATH_S)
            measured.samples.append(self.process.cpu_ns() - before)
            measured.packets += 1
        return measured

    async def all(self) -> AsyncIterator[Measurement]:
        """Measures all kinds that the options select."""
        wanted = self.options.only
        # The first measurement absorbs one-time costs at both ends.
        await self.ordinary()
        await self.handshakes()
        if wanted in "ordinary":
            yield await self.ordinary()
            yield await self.handshakes()
        seed = self.options.seed
        kinds = hostile_packets.quic_kinds(seed) + [hostile_packets.mixed(seed)]
        kinds += hostile_packets.http_kinds() + hostile_packets.request_kinds()
        for kind in kinds:
            if wanted in kind.name:
                measured = await self.stranger(kind)
                # On busy machines, packets get lost, and then the relay's reaction is missing.
                yield await self.stranger(kind) if measured.faults else measured
        for content in hostile_packets.tunnel_contents():
            if wanted in content.name:
                yield await self.user(content)


def origin(options: argparse.Namespace) -> dict[str, object]:
    """The origin of the figures, as in all results of this repository."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpus if "model name" in line]
    return {
        "machine": f"{models[0]}, {len(models)} cores",
        "kernel": Path("/proc/sys/kernel/osrelease").read_text().strip(),
        "commit": os.environ.get("PACED_COMMIT", "unknown"),
        "trees": os.environ.get("PACED_TREES", ""),
        "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "clock": options.clock,
        "seed": options.seed,
    }


def rows(measured: list[Measurement], options: argparse.Namespace) -> Iterator[str]:
    """A line of JSON for each kind."""
    source = origin(options)
    for kind in measured:
        row = source | {
            "plan": "hostile",
            "config": kind.name,
            "metric": "relay CPU per packet",
            "value": median(kind.samples),
            "unit": "instructions" if options.clock == "instructions" else "ns",
            "samples": kind.samples,
            "packets": kind.packets,
            "pieces": kind.pieces,
            "outcome": kind.outcome,
        }
        yield json.dumps(row)


def table(measured: list[Measurement]) -> Iterator[str]:
    """The figures in Markdown, one line each."""
    yield "| packets full of | thousand a packet | least | most | what the relay makes of it |"
    yield "|---|--:|--:|--:|---|"
    for kind in measured:
        values = [median(kind.samples), min(kind.samples), max(kind.samples)]
        cells = " | ".join(f"{value / 1e3:.1f}" for value in values)
        yield f"| {kind.name} | {cells} | {'; '.join(kind.faults[:1]) or kind.outcome} |"


async def run(options: argparse.Namespace) -> int:
    """Measures all kinds; returns the exit status."""
    measured = []
    async for kind in Hostility(options).all():
        measured.append(kind)
        faults = "".join(f"  FAILED: {fault}" for fault in sorted(set(kind.faults)))
        print(f"{median(kind.samples):12.0f} ns  {kind.name}{faults}", flush=True)
    print(*table(measured), sep="\n")
    if options.json:
        Path(options.json).write_text("".join(f"{row}\n" for row in rows(measured, options)))
    missing = hostile_packets.uncovered()
    failed = [kind.name for kind in measured if kind.faults]
    print(f"{len(measured) - len(failed)} kinds did what they say, {len(failed)} did not")
    if missing:
        print(f"no kind is about {', '.join(kind.name for kind in missing)}")
    return 1 if failed or missing else 0


def main() -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_relay_options(parser)
    parser.add_argument("--pid", type=int, required=True, help="the relay's process")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    parser.add_argument("--packets", type=int, default=100, help="packets of each kind")
    parser.add_argument("--samples", type=int, default=3, help="connections of each kind")
    parser.add_argument("--seed", type=int, default=1, help="decides what is drawn")
    parser.add_argument("--json", metavar="FILE", help="where results are written")
    clocks = ["wall", "instructions"]
    parser.add_argument("--clock", choices=clocks, default="wall", help="what counts time")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
