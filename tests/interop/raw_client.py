"""A client that sends any bytes on any stream and reports the relay's reaction."""

from dataclasses import dataclass, field

import asyncio

import pylsqpack
from aioquic.h3.connection import ErrorCode
from aioquic.quic.events import (
    DatagramFrameReceived,
    QuicEvent,
    StreamDataReceived,
    StreamReset,
)
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch

import wire
from relay_connection import RelayConnection
from relay_options import RelayOptions
from wire import CapsuleType, FrameType, Setting, StreamType

REACTION_S = 2.0
"""The longest that a relay may take to react."""


class UnusableTunnel(Exception):
    """A tunnel that a test needs was refused."""

    def __init__(self, outcome: "Outcome") -> None:
        self.outcome = outcome


def code_name(code: int) -> str:
    """The name of an HTTP/3 error code, or its number."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"{code:#x}"


@dataclass(frozen=True)
class Outcome:
    """A relay's reaction, made by one of the functions below."""

    kind: str
    code: int | None = None

    def satisfies(self, expected: "Outcome") -> bool:
        """Whether it is the expected one; without a code, any code is accepted."""
        return self.kind == expected.kind and expected.code in (None, self.code)

    def __str__(self) -> str:
        if self.code is None:
            return self.kind
        shown = str(self.code) if self.kind == "status" else code_name(self.code)
        return f"{self.kind} {shown}"


def closed(code: int) -> Outcome:
    """The connection was closed with an application error code."""
    return Outcome("connection", code)


def reset(code: int | None = None) -> Outcome:
    """The request stream was reset, and the connection stays open."""
    return Outcome("stream", code)


def status(code: int) -> Outcome:
    """The request was answered with this status, and the connection stays open."""
    return Outcome("status", code)


def refused_as_malformed(code: int) -> Outcome:
    """The request was answered with status 400, and then its stream was reset."""
    return Outcome("status 400, then stream", code)


TOLERATED = Outcome("tunnel works")
"""A tunnel of the same connection carries payloads."""

ENDED = Outcome("stream ends")
"""The relay ended the request stream cleanly, and the connection stays open."""

NOTHING = Outcome("no reaction")
"""The relay did none of the above in time."""


@dataclass
class Received:
    """The data received on one stream."""

    unread: bytearray = field(default_factory=bytearray)
    status: int | None = None
    capsules: bytearray = field(default_factory=bytearray)
    payloads: list[bytes] = field(default_factory=list)
    reset: int | None = None
    ended: bool = False


class RawClient(RelayConnection):
    """A QUIC connection without an HTTP/3 layer: it sends the bytes that a test writes."""

    relay: RelayOptions
    path: str
    """The :path of a tunnel to the echo."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.received: dict[int, Received] = {}
        self.settings: dict[int, int] | None = None
        self.datagrams_received = 0
        self._decoder = pylsqpack.Decoder(0, 0)

    def start(self, settings: wire.Settings = {Setting.H3_DATAGRAM: 1}) -> int:
        """Opens a correct control stream; returns its ID."""
        return self.uni(wire.varint(StreamType.CONTROL) + wire.settings(settings))

    def fields(
        self,
        changed: dict[bytes, bytes] | None = None,
        without: tuple[bytes, ...] = (),
        extra: wire.Fields | None = None,
    ) -> wire.Fields:
        """The header section of a valid request, with these differences."""
        good = dict(self.relay.request(self.path)) | (changed or {})
        kept = [(name, value) for name, value in good.items() if name not in without]
        return kept + (extra or [])

    def request(self, fields: wire.Fields | None = None) -> int:
        """Sends a request, by default a valid one."""
        return self.bidi(wire.headers(self.fields() if fields is None else fields))

    async def tunnel(self, fields: wire.Fields | None = None) -> int:
        """Opens a tunnel to the echo, by default with a valid request."""
        stream = self.request(fields)
        outcome = await self.answer(stream)
        if outcome != status(200):
            raise UnusableTunnel(outcome)
        return stream

    async def still_works(self) -> Outcome:
        """Opens a tunnel and checks whether it carries payloads."""
        return await self.echo(await self.tunnel())

    def uni(self, data: bytes, fin: bool = False) -> int:
        """Opens a unidirectional stream with these bytes."""
        stream = self._quic.get_next_available_stream_id(is_unidirectional=True)
        self.send(stream, data, fin)
        return stream

    def bidi(self, data: bytes, fin: bool = False) -> int:
        """Opens a request stream with these bytes."""
        stream = self._quic.get_next_available_stream_id()
        self.received[stream] = Received()
        self.send(stream, data, fin)
        return stream

    def send(self, stream: int, data: bytes, fin: bool = False) -> None:
        """Sends bytes on a stream."""
        self._quic.send_stream_data(stream, data, fin)
        self.transmit()

    def reset_stream(self, stream: int, code: int) -> None:
        """Resets a stream."""
        self._quic.reset_stream(stream, code)
        self.transmit()

    def packet(self, frames: bytes, damaged: bool = False) -> int:
        """Sends one packet with these QUIC frames, the first with a type of one byte; returns its number.

        A damaged packet has its last byte changed after protection.
        """
        quic = self._quic
        number = quic._packet_number
        builder = QuicPacketBuilder(
            host_cid=quic.host_cid,
            is_client=True,
            max_datagram_size=max(quic._max_datagram_size, len(frames) + 64),
            packet_number=quic._packet_number,
            peer_cid=quic._peer_cid.cid,
            version=quic._version,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, quic._cryptos[Epoch.ONE_RTT])
        kind, rest = frames[0], frames[1:]
        builder.start_frame(kind, len(frames)).push_bytes(rest)
        packets = quic._flush_builder(
            builder=builder,
            network_path=quic._network_paths[0],
            peer_cid=quic._peer_cid.cid,
            now=self._loop.time(),
        )
        for data, address in packets:
            if damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._transport.sendto(data, address)
        return number

    def datagram(self, data: bytes) -> None:
        """Sends one QUIC DATAGRAM frame."""
        self._quic.send_datagram_frame(data)
        self.transmit()

    def note(self, event: QuicEvent) -> None:
        """Reads the relay's bytes as far as outcomes depend on them."""
        match event:
            case StreamReset(stream_id=stream, error_code=code):
                self.received.setdefault(stream, Received()).reset = code
            case DatagramFrameReceived(data=data):
                self.datagrams_received += 1
                quarter, datagram = wire.split_datagram(data)
                self._note_datagram(self.received.get(4 * quarter), datagram)
            case StreamDataReceived(stream_id=stream, data=data, end_stream=fin):
                received = self.received.setdefault(stream, Received())
                received.unread += data
                if stream % 4 == 0:
                    self._note_response(stream, received)
                elif stream % 4 == 3:
                    self._note_uni(received)
                received.ended |= fin

    def _note_response(self, stream: int, received: Received) -> None:
        while record := wire.pull_record(received.unread):
            kind, payload = record
            if kind == FrameType.HEADERS:
                _, fields = self._decoder.feed_header(stream, payload)
                if received.status is None:
                    received.status = int(dict(fields)[b":status"])
            elif kind == FrameType.DATA and received.status == 200:
                received.capsules += payload
        while capsule := wire.pull_record(received.capsules):
            kind, value = capsule
            if kind == CapsuleType.DATAGRAM:
                self._note_datagram(received, value)

    def _note_datagram(self, received: Received | None, datagram: bytes) -> None:
        if received is not None:
            context, payload = wire.split_datagram(datagram)
            if context == 0:
                received.payloads.append(payload)

    def _note_uni(self, received: Received) -> None:
        """Looks for the SETTINGS that open the control stream."""
        if self.settings is None and received.unread[:1] == b"\x00":
            frames = received.unread[1:]
            record = wire.pull_record(frames)
            if record and record[0] == FrameType.SETTINGS:
                self.settings = wire.pull_settings(record[1])

    def _lost(self) -> Outcome | None:
        """How the connection ended, if it did."""
        if self.terminated is None:
            return None
        if self.terminated.frame_type is not None:
            return Outcome("transport error", self.terminated.error_code)
        return closed(self.terminated.error_code)

    async def closing(self) -> Outcome:
        """Waits for the connection to be closed; reports a reset if only that came."""
        await self.until(lambda: self.terminated is not None, REACTION_S)
        resets = [s.reset for s in self.received.values() if s.reset is not None]
        return self._lost() or (reset(resets[0]) if resets else NOTHING)

    async def _unless_lost(self, outcome: Outcome) -> Outcome:
        """The outcome, if the connection is still open; otherwise, how it ended."""
        if self.terminated is None:
            try:
                await asyncio.wait_for(self.ping(), REACTION_S)
            except ConnectionError:
                pass  # the reason for the close is also recorded
            except TimeoutError:
                return Outcome("connection falls silent")
        return self._lost() or outcome

    async def answer(self, stream: int) -> Outcome:
        """Waits for the response to a request, or for its stream's reset; for a malformed one, waits for both."""
        received = self.received[stream]
        await self.until(
            lambda: received.status or received.reset is not None or self.terminated,
            REACTION_S,
        )
        if received.status == 400:
            await self.until(
                lambda: received.ended or received.reset is not None or self.terminated,
                REACTION_S,
            )
            if received.reset is not None:
                return await self._unless_lost(refused_as_malformed(received.reset))
        if received.status:
            return await self._unless_lost(status(received.status))
        return await self.ending(stream)

    async def ending(self, stream: int) -> Outcome:
        """Waits for the relay to reset or end a request stream."""
        received = self.received[stream]
        await self.until(
            lambda: received.ended or received.reset is not None or self.terminated,
            REACTION_S,
        )
        if received.reset is not None:
            return await self._unless_lost(reset(received.reset))
        return await self._unless_lost(ENDED if received.ended else NOTHING)

    async def echo(self, stream: int, as_capsule: bool = False) -> Outcome:
        """Sends one payload through a tunnel and waits until it is back."""
        payload = b"payload of stream %d" % stream
        datagram = wire.udp_payload(payload)
        if as_capsule:
            self.send(stream, wire.data(wire.capsule(CapsuleType.DATAGRAM, datagram)))
        else:
            self.datagram(wire.varint(stream // 4) + datagram)
        received = self.received[stream]
        await self.until(
            lambda: received.payloads
            or received.reset is not None
            or received.ended
            or self.terminated,
            REACTION_S,
        )
        if not received.payloads:
            return await self.ending(stream)
        if received.payloads.pop(0) != payload:
            return Outcome("a payload that was not to be relayed came back")
        return await self._unless_lost(TOLERATED)
