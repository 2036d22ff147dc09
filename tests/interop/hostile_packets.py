"""The contents of a hostile client's packets: every QUIC frame, and the contents of streams."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aioquic.h3.connection import ErrorCode
from aioquic.quic.connection import QuicConnectionId
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.tls import Epoch

import wire
from raw_client import Outcome, RawClient, closed
from wire import CapsuleType, FrameType, StreamType, varint

PACKET_BYTES = 1300
"""Bytes of frames in a packet of about 1,340."""

CONTROL_STREAM, OTHER_STREAM = 2, 6
"""The unidirectional streams of a client."""

ACKNOWLEDGED = Outcome("all packets acknowledged")
"""The relay acknowledged each packet, so it has processed all of its frames (RFC 9000 §13.1)."""

DISCARDED = Outcome("no packet acknowledged")
"""The relay acknowledged none of the packets, and the connection stays open."""

SILENT = Outcome("connection falls silent")
"""The relay considers the connection ended, and no longer answers."""


def refused(code: QuicErrorCode) -> Outcome:
    """The connection was closed with a transport error."""
    return Outcome("transport error", code)


EXCESSIVE = closed(ErrorCode.H3_EXCESSIVE_LOAD)
"""The client used up the resources that the relay grants to strangers."""

Fill = Callable[[RawClient, int], bytes]
"""Makes the n-th piece, counted from 0 on each connection; a packet holds as many pieces as fit."""


NOTHING: Fill = lambda _client, _number: b""
"""For packets that are filled by other means."""


async def _nothing(client: RawClient) -> None:
    """Leaves a connection as it is."""


@dataclass(frozen=True)
class Kind:
    """One way to fill packets."""

    name: str
    fill: Fill
    outcome: Outcome = ACKNOWLEDGED
    """The required outcome."""
    or_else: Outcome | None = None
    """Another permitted outcome."""
    answer: QuicFrameType | None = None
    """A frame that the relay must send in answer."""
    frame: QuicFrameType | None = None
    """The type of its frames, if the kind is about one type."""
    packets: int | None = None
    """The number of packets per connection; None: the number in the options."""
    streams: int = 0
    """The number of request streams after the first one; its frames may name all of them."""
    at_once: int = 10
    """The most unacknowledged packets at once."""
    prepare: Callable[[RawClient], Awaitable[object]] = _nothing
    """Prepares a connection for the packets."""
    damaged: bool = False
    """Whether packets are changed after protection, so that none can be decrypted."""

    def packet(self, client: RawClient, number: int) -> tuple[bytes, int]:
        """The frames of a packet whose first piece has this number, and its number of pieces."""
        frames, pieces = bytearray(), 0
        while True:
            piece = self.fill(client, number + pieces)
            if pieces and len(frames) + len(piece) > PACKET_BYTES:
                return bytes(frames), pieces
            frames += piece
            pieces += 1


F, E = QuicFrameType, QuicErrorCode
OFFSET, LENGTH, FIN = 4, 2, 1
"""Bits of a STREAM frame's type (RFC 9000 §19.8)."""


def frame(
    kind: QuicFrameType, how: str, content: Fill | bytes, flags: int = 0, **rest
) -> Kind:
    """Packets full of frames of one type, after which the kind is named."""
    fill = content if callable(content) else lambda _client, _number: content
    name = "STREAM" if kind == F.STREAM_BASE else kind.name
    head = varint(kind | flags)
    return Kind(
        f"{name}, {how}" if how else name,
        lambda client, n: head + fill(client, n),
        frame=kind,
        **rest,
    )


def stream(
    how: str, content: Fill | bytes, flags: int = OFFSET | LENGTH, **rest
) -> Kind:
    """Packets full of STREAM frames with offset and length, unless flags are given."""
    return frame(F.STREAM_BASE, how, content, flags, **rest)


def part(stream_id: int, offset: int, data: bytes) -> bytes:
    """The fields of a STREAM frame that has an offset and a length."""
    return varint(stream_id) + varint(offset) + varint(len(data)) + data


def request_bytes(first: int, count: int) -> bytes:
    """A part of an endless request with frames of unknown types and no HEADERS."""
    return b"".join(b"\x21" if n == 0 else b"\x40" for n in range(first, first + count))


def once(piece: bytes) -> Fill:
    """One piece; the rest of the packet is PADDING."""
    return lambda _client, n: piece if n == 0 else b"\0"


async def hear_packets(client: RawClient) -> None:
    """Makes the relay send packets that a client can acknowledge in ranges."""
    for _ in range(64):
        await client.ping()


def ranges(client: RawClient, _number: int) -> bytes:
    """The fields of an ACK frame: every second received packet, at most 32."""
    heard = [n for run in client._quic._spaces[Epoch.ONE_RTT].ack_queue for n in run]
    told = [n for n in reversed(heard) if (heard[-1] - n) % 2 == 0][:32]
    pairs = zip(told, told[1:])
    gaps = b"".join(varint(high - low - 2) + b"\0" for high, low in pairs)
    return varint(told[0]) + b"\0" + varint(len(told) - 1) + b"\0" + gaps


def connection_id(client: RawClient, sequence: int) -> bytes:
    """The fields of a NEW_CONNECTION_ID frame that retires all IDs before its own."""
    quic, cid = client._quic, b"hostil" + sequence.to_bytes(2)
    if all(known.cid != cid for known in quic._host_cids):
        quic._host_cids.append(QuicConnectionId(cid, sequence, bytes(16), True))
        quic._host_cid_seq = max(quic._host_cid_seq, sequence + 1)
    return 2 * varint(sequence) + bytes([len(cid)]) + cid + cid + cid


def spare_connection_id(client: RawClient, _number: int) -> bytes:
    """The sequence number of an ID of the relay that the client does not use."""
    return varint(client._quic._peer_cid_available[0].sequence_number)


def quic_kinds(seed: int) -> list[Kind]:
    """All frame types of RFC 9000 table 3 and RFC 9221, from a stranger.

    Its stream 0 is a request without an end, stream 2 its control stream.
    """
    drawn = random.Random(seed)
    excessive = {"outcome": EXCESSIVE, "packets": 1}
    # The relay rejects requests while too many wait, and ends the connection if they arrive faster than it rejects them.
    another = excessive | {"packets": 4, "streams": 1500, "or_else": ACKNOWLEDGED}
    fatal = {"outcome": refused(E.PROTOCOL_VIOLATION), "packets": 1}
    return [
        frame(F.PADDING, "", b""),
        frame(F.PING, "", b""),
        frame(F.ACK, "of one packet", b"\0\0\0\0"),
        frame(F.ACK, "of 32 ranges", ranges, prepare=hear_packets),
        frame(F.ACK_ECN, "", b"\0\0\0\0\0\0\0"),
        frame(F.RESET_STREAM, "of one stream", varint(4) + b"\0\0", streams=1),
        frame(
            F.RESET_STREAM,
            "each of another stream",
            lambda _, n: varint(4 * n + 4) + b"\0\0",
            **another,
        ),
        frame(
            F.STOP_SENDING, "of one stream", varint(0) + b"\0", answer=F.RESET_STREAM
        ),
        frame(
            F.STOP_SENDING,
            "each of another stream",
            lambda _, n: varint(4 * n + 4) + b"\0",
            **another,
        ),
        frame(
            F.CRYPTO,
            "a byte each",
            lambda _, n: varint(n + 1) + b"\1x",
            **excessive,
        ),
        frame(F.NEW_TOKEN, "", b"\1x", **fatal),
        stream("whole", lambda _, n: part(0, n * 1280, request_bytes(n * 1280, 1280))),
        stream("a byte each", lambda _, n: part(0, n, request_bytes(n, 1))),
        stream(
            "a byte each, backwards",
            lambda _, n: part(0, 60_000 - n, b"\x40"),
            **excessive,
        ),
        stream(
            "a byte each, anywhere",
            lambda _, n: part(0, drawn.randrange(1, 60_000), b"\x40"),
            **excessive,
        ),
        stream("the same byte", part(0, 0, b"\x21")),
        stream(
            "the same byte, before 30 gaps",
            lambda _, n: part(0, 60 - 2 * n, b"\x40") if n < 30 else part(0, 0, b"\x21"),
        ),
        stream("empty", part(0, 0, b"")),
        stream(
            "whole, without a length",
            lambda _, n: varint(0) + varint(n * 1280) + request_bytes(n * 1280, 1280),
            flags=OFFSET,
        ),
        stream(
            "a byte in each block",
            lambda _, n: part(0, n * 4096 + 1, b"\x40"),
            **excessive,
        ),
        stream(
            "each of another stream",
            lambda _, n: varint(4 * n + 4) + b"\0",
            LENGTH,
            **another,
        ),
        Kind(
            "STREAM, one that opens 400 streams",
            once(wire.stream_frame(4 * 400, 0, b"")),
            packets=1,
            streams=400,
        ),
        Kind(
            "STREAM, one that opens all streams",
            once(wire.stream_frame(4 * 2100, 0, b"")),
            outcome=EXCESSIVE,
            packets=1,
            streams=2100,
        ),
        stream(
            "of the relay's own",
            part(1, 0, b"x"),
            outcome=refused(E.STREAM_STATE_ERROR),
            packets=1,
        ),
        frame(F.MAX_DATA, "growing", lambda _, n: varint(1 << 30 | n)),
        frame(
            F.MAX_STREAM_DATA,
            "growing",
            lambda _, n: varint(0) + varint(1 << 20 | n),
        ),
        frame(
            F.MAX_STREAM_DATA,
            "each of another stream",
            lambda _, n: varint(4 * n + 4) + varint(1 << 20),
            **another,
        ),
        frame(F.MAX_STREAMS_BIDI, "growing", lambda _, n: varint(1000 + n)),
        frame(F.MAX_STREAMS_UNI, "growing", lambda _, n: varint(1000 + n)),
        frame(F.DATA_BLOCKED, "", lambda _, n: varint(n)),
        frame(F.STREAM_DATA_BLOCKED, "", lambda _, n: varint(0) + varint(n)),
        frame(
            F.STREAM_DATA_BLOCKED,
            "each of another stream",
            lambda _, n: varint(4 * n + 4) + b"\0",
            **another,
        ),
        frame(F.STREAMS_BLOCKED_BIDI, "", lambda _, n: varint(n)),
        frame(F.STREAMS_BLOCKED_UNI, "", lambda _, n: varint(n)),
        frame(
            F.NEW_CONNECTION_ID,
            "one",
            lambda client, _: connection_id(client, 100),
            answer=F.RETIRE_CONNECTION_ID,
        ),
        frame(
            F.NEW_CONNECTION_ID,
            "each retires the one before",
            lambda client, n: connection_id(client, 100 + n),
            outcome=refused(E.CONNECTION_ID_LIMIT_ERROR),
            packets=1,
        ),
        frame(
            F.RETIRE_CONNECTION_ID,
            "of one ID",
            spare_connection_id,
            answer=F.NEW_CONNECTION_ID,
        ),
        frame(F.RETIRE_CONNECTION_ID, "of no ID", varint(1000), **fatal),
        frame(
            F.PATH_CHALLENGE,
            "",
            lambda _, n: n.to_bytes(8),
            answer=F.PATH_RESPONSE,
        ),
        frame(F.PATH_RESPONSE, "", lambda _, n: n.to_bytes(8)),
        frame(F.TRANSPORT_CLOSE, "", b"\0\0\0", outcome=SILENT, packets=1),
        frame(
            F.APPLICATION_CLOSE, "", varint(0x100) + b"\0", outcome=SILENT, packets=1
        ),
        frame(F.HANDSHAKE_DONE, "", b"", **fatal),
        frame(F.DATAGRAM, "whole", b"\0\0" + bytes(PACKET_BYTES - 3)),
        frame(F.DATAGRAM_WITH_LENGTH, "a byte each", b"\3\0\0x"),
        frame(F.DATAGRAM_WITH_LENGTH, "empty payloads", b"\2\0\0"),
        frame(F.DATAGRAM_WITH_LENGTH, "of no stream yet", b"\4\x40\xff\0x"),
        frame(F.DATAGRAM_WITH_LENGTH, "of no context", b"\2\0\7"),
        frame(
            F.DATAGRAM_WITH_LENGTH,
            "of no stream at all",
            b"\0",
            outcome=closed(ErrorCode.H3_DATAGRAM_ERROR),
            packets=1,
        ),
        Kind(
            "QUIC frames of an unknown type",
            lambda _client, _number: b"\x21",
            # s2n-quic sends PROTOCOL_VIOLATION; RFC 9000 §12.4 requires FRAME_ENCODING_ERROR.
            outcome=Outcome("transport error"),
            packets=1,
        ),
        Kind(
            "a packet that cannot be read",
            lambda _client, _number: b"\1",
            outcome=DISCARDED,
            damaged=True,
        ),
    ]


def mixed(seed: int) -> Kind:
    """All frames that a connection survives, in an order given by the seed."""
    drawn = random.Random(seed)
    kinds = [
        kind
        for kind in quic_kinds(seed)
        if kind.packets is None
        and kind.prepare is _nothing
        and not kind.damaged
        # Frames with an offset that depends on their number would leave gaps.
        and not kind.name.endswith(("whole", "a length", "gaps", "STREAM, a byte each"))
    ]
    return Kind(
        "frames of all types", lambda c, n: drawn.choice(kinds).fill(c, n), streams=1
    )


def carried(name: str, stream_id: int, start: bytes, piece: bytes, **rest) -> Kind:
    """Packets of one STREAM frame full of pieces, on a unidirectional stream of the client."""
    pieces = piece * (1280 // len(piece))

    def fill(client: RawClient, n: int) -> bytes:
        known = client._quic._streams.get(stream_id)
        begin = known.sender._buffer_stop if known else 0
        if n == 0:
            return wire.stream_frame(stream_id, begin, start + pieces)
        return wire.stream_frame(
            stream_id, begin + len(start) + n * len(pieces), pieces
        )

    # Such a stream has a window of 8 KiB.
    return Kind(name, fill, at_once=3, **rest)


def http_kinds() -> list[Kind]:
    """The contents of a stranger's HTTP/3 streams."""
    def fatal(code: ErrorCode) -> dict:
        return {"outcome": closed(code), "packets": 1}

    def on_control(name: str, piece: bytes, **rest) -> Kind:
        return carried(f"control stream: {name}", CONTROL_STREAM, b"", piece, **rest)

    def on_stream(name: str, kind: int, piece: bytes, **rest) -> Kind:
        return carried(name, OTHER_STREAM, varint(kind), piece, **rest)

    update = FrameType.PRIORITY_UPDATE_REQUEST
    return [
        on_control("frames of an unknown type", wire.frame(FrameType.RESERVED)),
        on_control("MAX_PUSH_ID", wire.frame(FrameType.MAX_PUSH_ID, b"\0")),
        on_control("GOAWAY", wire.frame(FrameType.GOAWAY, b"\0")),
        on_control("PRIORITY_UPDATE", wire.frame(update, b"\0u=3")),
        on_control("PRIORITY_UPDATE, long", wire.frame(update, b"\0" + b"a," * 300)),
        on_control(
            "CANCEL_PUSH",
            wire.frame(FrameType.CANCEL_PUSH, b"\0"),
            **fatal(ErrorCode.H3_ID_ERROR),
        ),
        on_control(
            "SETTINGS", wire.settings({}), **fatal(ErrorCode.H3_FRAME_UNEXPECTED)
        ),
        on_control("DATA", wire.data(b""), **fatal(ErrorCode.H3_FRAME_UNEXPECTED)),
        on_stream("QPACK: capacity of 0", StreamType.QPACK_ENCODER, b"\x20"),
        on_stream(
            "QPACK: insertions",
            StreamType.QPACK_ENCODER,
            b"\x41x\1y",
            **fatal(ErrorCode.QPACK_ENCODER_STREAM_ERROR),
        ),
        on_stream("QPACK: cancellations", StreamType.QPACK_DECODER, b"\x40"),
        on_stream(
            "QPACK: acknowledgements",
            StreamType.QPACK_DECODER,
            b"\x80",
            **fatal(ErrorCode.QPACK_DECODER_STREAM_ERROR),
        ),
        on_stream("a stream of an unknown type", StreamType.RESERVED, b"x"),
        on_stream(
            "a push stream",
            StreamType.PUSH,
            b"\0",
            **fatal(ErrorCode.H3_STREAM_CREATION_ERROR),
        ),
    ]


HUFFMAN_A = b"\x18\xc6\x31\x8c\x63"
"""Eight times the letter a (RFC 7541 appendix B)."""


def request(how: str, content: Callable[[RawClient], bytes], **rest) -> Kind:
    """Packets full of requests, each complete and on its own stream."""
    end = F.STREAM_BASE | LENGTH | FIN

    def fill(client: RawClient, n: int) -> bytes:
        data = content(client)
        return varint(end) + varint(4 * n + 4) + varint(len(data)) + data

    return Kind(f"requests, {how}", fill, **rest)


def request_kinds() -> list[Kind]:
    """Requests that are refused to every client."""

    def section(lines: bytes) -> bytes:
        return wire.frame(FrameType.HEADERS, wire.EMPTY_SECTION_PREFIX + lines)

    def forbidden(client: RawClient) -> bytes:
        path = client.relay.path("169.254.169.254", 80)
        return wire.headers(list(client.relay.request(path)))

    capsules = wire.data(
        20 * wire.capsule(CapsuleType.DATAGRAM, wire.udp_payload(b"x"))
    )
    literal = b"\x21x" + wire.prefixed_integer(1250, 7, 0x80) + 250 * HUFFMAN_A
    few = {"packets": 4, "at_once": 1, "streams": 100}
    many = {"outcome": EXCESSIVE, "packets": 3, "streams": 400}
    return [
        request("without fields", lambda _: section(b""), **many),
        request("of 1,260 indexed fields", lambda _: section(b"\xdd" * 1260), **few),
        request("of a long string in Huffman's code", lambda _: section(literal), **few),
        request("for what is forbidden", forbidden, **few),
        request(
            "for what is forbidden, with capsules",
            lambda client: forbidden(client) + capsules,
            **few,
        ),
    ]


@dataclass(frozen=True)
class Content:
    """The contents of a user's tunnel stream, as repeated pieces."""

    name: str
    piece: bytes
    delivers: bool = False
    """Whether the target receives payloads."""


def tunnel_contents() -> list[Content]:
    """Capsules, and frames of HTTP/3 with and without them."""

    def datagrams(payload: bytes, context: int = 0) -> bytes:
        datagram = wire.udp_payload(payload, context)
        return several(CapsuleType.DATAGRAM, datagram)

    def several(kind: int, value: bytes = b"") -> bytes:
        piece = wire.capsule(kind, value)
        return wire.data(piece * (1270 // len(piece)))

    one = wire.capsule(CapsuleType.DATAGRAM, wire.udp_payload(b"x"))
    return [
        Content("capsules DATAGRAM, whole", datagrams(bytes(1200)), True),
        Content("capsules DATAGRAM, a byte each", datagrams(b"x"), True),
        Content("capsules DATAGRAM, empty payloads", datagrams(b""), True),
        Content("capsules DATAGRAM, of no context", datagrams(b"x", 2)),
        # RFC 9484 §4.7, for another protocol.
        Content("capsules ADDRESS_ASSIGN", several(1)),
        Content("capsules ADDRESS_REQUEST", several(2)),
        Content("capsules ROUTE_ADVERTISEMENT", several(3)),
        Content("capsules of an unknown type", several(CapsuleType.RESERVED)),
        Content("DATA frames of a capsule each", wire.data(one), True),
        Content(
            "DATA frames of a byte each",
            b"".join(wire.data(bytes([byte])) for byte in one),
            True,
        ),
        Content("DATA frames of no content", wire.data(b"")),
        Content("frames of an unknown type", wire.frame(FrameType.RESERVED)),
    ]


def uncovered() -> set[QuicFrameType]:
    """The frame types without a kind."""
    return set(QuicFrameType) - {kind.frame for kind in quic_kinds(0)}
