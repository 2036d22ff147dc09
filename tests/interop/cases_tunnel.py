"""Cases about open tunnels: capsules, HTTP datagrams and how a tunnel ends."""

from aioquic.h3.connection import ErrorCode

import wire
from cases import case
from raw_client import (
    ENDED,
    TOLERATED,
    Outcome,
    RawClient,
    closed,
    reset,
)
from wire import CapsuleType, FrameType, capsule, frame, udp_payload, varint

MAX_QUARTER_STREAM_ID = 2**60 - 1
MAX_UDP_PAYLOAD_BYTES = 65527
UNREGISTERED_CONTEXT = 4


@case("RFC 9297 §3.2", TOLERATED, each={"short": b"grease", "100 kB": bytes(100_000)})
async def unknown_capsule(c: RawClient, value: bytes) -> Outcome:
    """Sends a capsule of a reserved type."""
    c.start()
    stream = await c.tunnel()
    c.send(stream, wire.data(capsule(CapsuleType.RESERVED, value)))
    return await c.echo(stream, as_capsule=True)


@case("RFC 9298 §4", TOLERATED, each={"in a capsule": True, "in a datagram": False})
async def unknown_context(c: RawClient, as_capsule: bool) -> Outcome:
    """Sends a payload in an unregistered context; it must not be relayed."""
    c.start()
    stream = await c.tunnel()
    datagram = udp_payload(b"not for the target", UNREGISTERED_CONTEXT)
    if as_capsule:
        c.send(stream, wire.data(capsule(CapsuleType.DATAGRAM, datagram)))
    else:
        c.datagram(varint(stream // 4) + datagram)
    return await c.echo(stream, as_capsule)


@case("RFC 9297 §3.2", TOLERATED)
async def capsule_in_pieces(c: RawClient) -> Outcome:
    """Sends a capsule in one DATA frame for every byte, empty frames between them."""
    c.start()
    stream = await c.tunnel()
    for byte in capsule(CapsuleType.RESERVED, b"grease"):
        c.send(stream, wire.data(bytes([byte])) + wire.data(b""))
    return await c.echo(stream, as_capsule=True)


@case("RFC 9297 §2.1.1", TOLERATED)
async def client_without_http_datagrams(c: RawClient) -> Outcome:
    """Does not send H3_DATAGRAM, though QUIC would accept DATAGRAM frames."""
    c.start({})
    outcome = await c.echo(await c.tunnel(), as_capsule=True)
    return outcome if not c.datagrams_received else Outcome("QUIC datagrams come in")


@case("RFC 9221 §3", TOLERATED, quic_datagrams=False)
async def client_without_quic_datagrams(c: RawClient) -> Outcome:
    """Does not send max_datagram_frame_size either."""
    c.start({})
    return await c.echo(await c.tunnel(), as_capsule=True)


@case(
    "RFC 9297 §2.1.1",
    closed(ErrorCode.H3_SETTINGS_ERROR),
    TOLERATED,
    quic_datagrams=False,
)
async def http_datagrams_without_quic_datagrams(c: RawClient) -> Outcome:
    """Sends H3_DATAGRAM without the transport parameter; capsules still work."""
    c.start()
    return await c.echo(await c.tunnel(), as_capsule=True)


@case(
    "RFC 9297 §3.3",
    reset(ErrorCode.H3_MESSAGE_ERROR),
    reset(ErrorCode.H3_REQUEST_INCOMPLETE),
    each={
        "after its type": 1,
        "within its length": 2,
        "within its value": 9,
    },
)
async def capsule_cut_by_the_end(c: RawClient, length: int) -> Outcome:
    """Ends the stream in the middle of a capsule."""
    c.start()
    stream = await c.tunnel()
    whole = capsule(CapsuleType.DATAGRAM, udp_payload(bytes(200)))
    c.send(stream, wire.data(whole[:length]), fin=True)
    return await c.ending(stream)


@case("RFC 9298 §5", reset())
async def payload_longer_than_udp_has(c: RawClient) -> Outcome:
    """Sends a capsule with one byte more than a UDP payload can have."""
    c.start()
    stream = await c.tunnel()
    datagram = udp_payload(bytes(MAX_UDP_PAYLOAD_BYTES + 1))
    c.send(stream, wire.data(capsule(CapsuleType.DATAGRAM, datagram)))
    return await c.ending(stream)


@case("RFC 9114 §7.1", closed(ErrorCode.H3_FRAME_ERROR))
async def data_frame_cut_by_the_end(c: RawClient) -> Outcome:
    """Ends the stream in the middle of a DATA frame that so far contains one whole capsule."""
    c.start()
    unknown_capsule = b"\x17\x02ab"
    c.send(await c.tunnel(), wire.data(unknown_capsule + b"\x17")[:-1], fin=True)
    return await c.closing()


@case("RFC 9114 §4.4", closed(ErrorCode.H3_FRAME_UNEXPECTED))
async def headers_within_a_tunnel(c: RawClient) -> Outcome:
    """Sends a second HEADERS frame after CONNECT."""
    c.start()
    c.send(await c.tunnel(), wire.headers([(b"x", b"y")]))
    return await c.closing()


@case("RFC 9114 §9", TOLERATED)
async def unknown_frame_within_a_tunnel(c: RawClient) -> Outcome:
    """Sends a reserved frame between the DATA frames."""
    c.start()
    stream = await c.tunnel()
    c.send(stream, frame(FrameType.RESERVED, bytes(5000)))
    return await c.echo(stream, as_capsule=True)


@case(
    "RFC 9297 §2.1",
    closed(ErrorCode.H3_DATAGRAM_ERROR),
    each={
        "beyond the limit": varint(MAX_QUARTER_STREAM_ID + 1) + b"\x00payload",
        "missing": b"",
        "cut": b"\x40",
    },
)
async def quarter_stream_id(c: RawClient, datagram: bytes) -> Outcome:
    """Sends a QUIC datagram that names no stream."""
    c.start()
    await c.tunnel()
    c.datagram(datagram)
    return await c.closing()


@case("RFC 9297 §2.1", TOLERATED)
async def datagram_for_a_stream_to_come(c: RawClient) -> Outcome:
    """Sends a QUIC datagram for a stream that it has not opened yet."""
    c.start()
    c.datagram(varint(5) + udp_payload(b"early"))
    return await c.still_works()


@case("RFC 9297 §2.1", TOLERATED)
async def datagram_for_a_closed_stream(c: RawClient) -> Outcome:
    """Sends a QUIC datagram for a tunnel that has ended."""
    c.start()
    stream = await c.tunnel()
    c.send(stream, b"", fin=True)
    await c.ending(stream)
    c.datagram(varint(stream // 4) + udp_payload(b"late"))
    return await c.still_works()


@case("RFC 9297 §2.1", TOLERATED, reset())
async def datagram_without_a_context(c: RawClient) -> Outcome:
    """Sends an empty HTTP datagram, which may end its tunnel but nothing else."""
    c.start()
    stream = await c.tunnel()
    c.datagram(varint(stream // 4))
    return await c.echo(stream)


@case("RFC 9298 §3.1", ENDED)
async def client_ends_a_tunnel(c: RawClient) -> Outcome:
    """Ends its side of a tunnel; the relay must end the other."""
    c.start()
    stream = await c.tunnel()
    c.send(stream, b"", fin=True)
    return await c.ending(stream)


@case("RFC 9114 §4.1.1", TOLERATED)
async def client_resets_a_tunnel(c: RawClient) -> Outcome:
    """Resets one tunnel; another one on the connection continues."""
    c.start()
    first, second = await c.tunnel(), await c.tunnel()
    c.reset_stream(first, ErrorCode.H3_REQUEST_CANCELLED)
    return await c.echo(second)
