"""Cases about control streams, SETTINGS, QPACK streams and other unidirectional streams."""

from aioquic.h3.connection import ErrorCode

import wire
from cases import case
from raw_client import TOLERATED, Outcome, RawClient, closed
from wire import FrameType, Setting, StreamType, frame, prefixed_integer, varint

HTTP2_ONLY_FRAMES = {f"{kind:#x}": kind for kind in (0x02, 0x06, 0x08, 0x09)}
HTTP2_ONLY_SETTINGS = {f"{key:#x}": key for key in (0x02, 0x03, 0x04, 0x05)}
QPACK_STREAMS = {
    "encoder": StreamType.QPACK_ENCODER,
    "decoder": StreamType.QPACK_DECODER,
}


@case("RFC 9220 §3", TOLERATED)
async def extended_connect_and_datagrams_are_offered(c: RawClient) -> Outcome:
    """Reads the relay's SETTINGS."""
    c.start()
    outcome = await c.still_works()
    offered = c.settings or {}
    if any(
        offered.get(setting) != 1
        for setting in (Setting.ENABLE_CONNECT_PROTOCOL, Setting.H3_DATAGRAM)
    ):
        return Outcome(f"settings {offered}")
    return outcome


@case("RFC 9114 §6.2.1", closed(ErrorCode.H3_STREAM_CREATION_ERROR))
async def second_control_stream(c: RawClient) -> Outcome:
    """Opens two control streams."""
    c.start()
    c.start()
    return await c.closing()


@case(
    "RFC 9114 §6.2.1",
    closed(ErrorCode.H3_CLOSED_CRITICAL_STREAM),
    each={"FIN": True, "reset": False},
)
async def control_stream_is_closed(c: RawClient, by_fin: bool) -> Outcome:
    """Ends its control stream after SETTINGS."""
    control = c.start()
    await c.tunnel()
    if by_fin:
        c.send(control, b"", fin=True)
    else:
        c.reset_stream(control, ErrorCode.H3_NO_ERROR)
    return await c.closing()


@case(
    "RFC 9114 §6.2.1",
    closed(ErrorCode.H3_MISSING_SETTINGS),
    each={
        "GOAWAY": frame(FrameType.GOAWAY, varint(0)),
        "MAX_PUSH_ID": frame(FrameType.MAX_PUSH_ID, varint(0)),
        "reserved type": frame(FrameType.RESERVED, b"grease"),
    },
)
async def first_frame_is_not_settings(c: RawClient, first: bytes) -> Outcome:
    """Begins its control stream with another frame."""
    c.uni(varint(StreamType.CONTROL) + first + wire.settings({}))
    return await c.closing()


@case("RFC 9114 §7.2.4", closed(ErrorCode.H3_FRAME_UNEXPECTED))
async def settings_twice(c: RawClient) -> Outcome:
    """Sends a second SETTINGS frame."""
    c.send(c.start(), wire.settings({}))
    return await c.closing()


@case("RFC 9114 §7.2.4", closed(ErrorCode.H3_SETTINGS_ERROR), TOLERATED)
async def setting_twice(c: RawClient) -> Outcome:
    """Sends the same identifier twice, which a relay may refuse."""
    c.start([(Setting.H3_DATAGRAM, 1), (Setting.H3_DATAGRAM, 1)])
    return await c.still_works()


@case(
    "RFC 9114 §7.2.4.1", closed(ErrorCode.H3_SETTINGS_ERROR), each=HTTP2_ONLY_SETTINGS
)
async def setting_of_http2(c: RawClient, setting: int) -> Outcome:
    """Sends a setting that only HTTP/2 has."""
    c.start({Setting.H3_DATAGRAM: 1, setting: 1})
    return await c.closing()


@case("RFC 9114 §7.2.4.1", TOLERATED)
async def unknown_setting(c: RawClient) -> Outcome:
    """Sends a reserved setting with a large value."""
    c.start({Setting.RESERVED: 2**62 - 1, Setting.H3_DATAGRAM: 1})
    return await c.still_works()


@case(
    "RFC 9297 §2.1.1",
    closed(ErrorCode.H3_SETTINGS_ERROR),
    each={"2": 2, "2^62-1": 2**62 - 1},
)
async def datagram_setting_out_of_range(c: RawClient, value: int) -> Outcome:
    """Sends H3_DATAGRAM with a value other than 0 and 1."""
    c.start({Setting.H3_DATAGRAM: value})
    return await c.closing()


@case(
    "RFC 9114 §7.1",
    closed(ErrorCode.H3_FRAME_ERROR),
    each={
        "SETTINGS cut in a value": frame(FrameType.SETTINGS, b"\x06"),
        "GOAWAY with more bytes": frame(FrameType.GOAWAY, varint(0) + b"\x00"),
        "GOAWAY without an ID": frame(FrameType.GOAWAY),
        "MAX_PUSH_ID with more bytes": frame(FrameType.MAX_PUSH_ID, b"\x00\x00"),
        "CANCEL_PUSH without an ID": frame(FrameType.CANCEL_PUSH),
    },
)
async def control_frame_of_wrong_length(c: RawClient, wrong: bytes) -> Outcome:
    """Sends a frame whose length and content disagree."""
    preamble = varint(StreamType.CONTROL)
    if not wrong.startswith(varint(FrameType.SETTINGS)):
        preamble += wire.settings({})
    c.uni(preamble + wrong)
    return await c.closing()


@case(
    "RFC 9114 §7.2",
    closed(ErrorCode.H3_FRAME_UNEXPECTED),
    each={
        "DATA": FrameType.DATA,
        "HEADERS": FrameType.HEADERS,
        "PUSH_PROMISE": FrameType.PUSH_PROMISE,
    },
)
async def request_frame_on_the_control_stream(c: RawClient, kind: int) -> Outcome:
    """Sends a frame that belongs on request streams."""
    c.send(c.start(), frame(kind, b"\x00"))
    return await c.closing()


@case("RFC 9114 §7.2.8", closed(ErrorCode.H3_FRAME_UNEXPECTED), each=HTTP2_ONLY_FRAMES)
async def http2_frame_on_the_control_stream(c: RawClient, kind: int) -> Outcome:
    """Sends a frame type that only HTTP/2 has."""
    c.send(c.start(), frame(kind, b"\x00" * 8))
    return await c.closing()


@case("RFC 9114 §9", TOLERATED)
async def unknown_frame_on_the_control_stream(c: RawClient) -> Outcome:
    """Sends reserved frames, empty and large."""
    control = c.start()
    c.send(control, frame(FrameType.RESERVED) + frame(FrameType.RESERVED, bytes(20000)))
    return await c.still_works()


@case("RFC 9114 §7.2.7", closed(ErrorCode.H3_ID_ERROR))
async def max_push_id_goes_down(c: RawClient) -> Outcome:
    """Lowers MAX_PUSH_ID."""
    larger, smaller = (frame(FrameType.MAX_PUSH_ID, varint(limit)) for limit in (8, 7))
    c.send(c.start(), larger + smaller)
    return await c.closing()


@case("RFC 9114 §5.2", closed(ErrorCode.H3_ID_ERROR))
async def goaway_goes_up(c: RawClient) -> Outcome:
    """Raises the push ID of GOAWAY."""
    smaller, larger = (frame(FrameType.GOAWAY, varint(push)) for push in (4, 8))
    c.send(c.start(), smaller + larger)
    return await c.closing()


@case("RFC 9114 §7.2.3", closed(ErrorCode.H3_ID_ERROR))
async def cancel_of_a_push_that_was_not_promised(c: RawClient) -> Outcome:
    """Cancels a push, though a relay never promises one."""
    c.send(c.start(), frame(FrameType.CANCEL_PUSH, varint(0)))
    return await c.closing()


@case("RFC 9218 §7.2", TOLERATED)
async def priority_update_before_its_request(c: RawClient) -> Outcome:
    """Sends a priority for the stream that it opens next."""
    update = frame(FrameType.PRIORITY_UPDATE_REQUEST, varint(0) + b"u=1, i")
    c.send(c.start(), update)
    return await c.still_works()


@case(
    "RFC 9218 §7.2",
    closed(ErrorCode.H3_ID_ERROR),
    each={
        "a unidirectional stream": (FrameType.PRIORITY_UPDATE_REQUEST, 2),
        "a push that was not promised": (FrameType.PRIORITY_UPDATE_PUSH, 0),
    },
)
async def priority_update_for_what_cannot_be(
    c: RawClient, update: tuple[int, int]
) -> Outcome:
    """Sends a priority for something that is not a request."""
    kind, element = update
    c.send(c.start(), frame(kind, varint(element) + b"u=1"))
    return await c.closing()


@case("RFC 9114 §6.2.2", closed(ErrorCode.H3_STREAM_CREATION_ERROR))
async def push_stream_of_a_client(c: RawClient) -> Outcome:
    """Opens a push stream, which only servers may."""
    c.start()
    c.uni(varint(StreamType.PUSH) + varint(0))
    return await c.closing()


@case("RFC 9114 §6.2.3", TOLERATED)
async def unknown_unidirectional_stream(c: RawClient) -> Outcome:
    """Opens streams of a reserved type, ended and open ones."""
    c.start()
    c.uni(varint(StreamType.RESERVED) + bytes(5000), fin=True)
    c.uni(varint(StreamType.RESERVED) + bytes(5000))
    return await c.still_works()


@case("RFC 9114 §6.2", TOLERATED)
async def unidirectional_stream_without_a_type(c: RawClient) -> Outcome:
    """Ends streams before, and in the middle of, their type."""
    c.start()
    c.uni(b"", fin=True)
    c.uni(varint(StreamType.RESERVED)[:1], fin=True)
    return await c.still_works()


@case("RFC 9204 §4.2", closed(ErrorCode.H3_STREAM_CREATION_ERROR), each=QPACK_STREAMS)
async def second_qpack_stream(c: RawClient, kind: int) -> Outcome:
    """Opens two QPACK streams of the same type."""
    c.start()
    c.uni(varint(kind))
    c.uni(varint(kind))
    return await c.closing()


@case("RFC 9204 §4.2", closed(ErrorCode.H3_CLOSED_CRITICAL_STREAM), each=QPACK_STREAMS)
async def qpack_stream_is_closed(c: RawClient, kind: int) -> Outcome:
    """Ends a QPACK stream."""
    c.start()
    c.uni(varint(kind), fin=True)
    return await c.closing()


@case(
    "RFC 9204 §3.2",
    closed(ErrorCode.QPACK_ENCODER_STREAM_ERROR),
    each={
        "insert": b"\x41a\x01b",
        "insert by static name": b"\xc1\x01b",
        "duplicate": b"\x00",
        "capacity beyond the limit": prefixed_integer(2**30, 5, 0x20),
    },
)
async def encoder_instruction_without_a_table(c: RawClient, wrong: bytes) -> Outcome:
    """Uses a dynamic table that the relay did not offer."""
    c.start()
    await c.tunnel()
    if (c.settings or {}).get(Setting.QPACK_MAX_TABLE_CAPACITY, 0) > 0:
        return Outcome("a dynamic table is offered")
    c.uni(varint(StreamType.QPACK_ENCODER) + wrong)
    return await c.closing()


@case("RFC 9204 §4.3.1", TOLERATED)
async def encoder_sets_capacity_0(c: RawClient) -> Outcome:
    """Sets the capacity that is the relay's limit."""
    c.start()
    c.uni(varint(StreamType.QPACK_ENCODER) + prefixed_integer(0, 5, 0x20))
    return await c.still_works()


@case(
    "RFC 9204 §4.4",
    closed(ErrorCode.QPACK_DECODER_STREAM_ERROR),
    each={
        "acknowledged section without references": b"\x80",
        "insert count increment 0": b"\x00",
        "insert count that was never sent": b"\x05",
    },
)
async def decoder_instruction_without_a_table(c: RawClient, wrong: bytes) -> Outcome:
    """Acknowledges instructions that the relay's encoder cannot have sent."""
    c.start()
    await c.tunnel()
    c.uni(varint(StreamType.QPACK_DECODER) + wrong)
    return await c.closing()


@case("RFC 9000 §21.7", closed(ErrorCode.H3_EXCESSIVE_LOAD))
async def one_byte_in_each_block_of_memory(c: RawClient) -> Outcome:
    """Sends bytes far apart, before any request."""
    c.start()
    await c.ping()
    for stream in range(0, 16, 4):
        offsets = range(4097, 64 * 4096, 4096)
        c.packet(b"".join(wire.stream_frame(stream, at, b"x") for at in offsets))
    return await c.closing()


@case("RFC 9000 §21.8", closed(ErrorCode.H3_EXCESSIVE_LOAD))
async def a_thousand_streams_opened_by_one_frame(c: RawClient) -> Outcome:
    """Names a stream that opens all lower ones, before any request."""
    c.start()
    await c.ping()
    c.packet(wire.stream_frame(4 * 1000, 0, b""))
    return await c.closing()
