"""Cases about requests: frames, field sections, pseudo-headers, targets and tokens."""

from aioquic.h3.connection import ErrorCode

import wire
from cases import case
from cases_connection import HTTP2_ONLY_FRAMES
from raw_client import (
    TOLERATED,
    Outcome,
    RawClient,
    closed,
    refused_as_malformed,
    reset,
    status,
)
from wire import (
    EMPTY_SECTION_PREFIX,
    FrameType,
    Setting,
    frame,
    prefixed_integer,
    varint,
)

MALFORMED = (
    reset(ErrorCode.H3_MESSAGE_ERROR),
    refused_as_malformed(ErrorCode.H3_MESSAGE_ERROR),
)
"""A server's reaction to a malformed request (RFC 9114 §4.1.2): it may answer first."""


@case("RFC 9114 §4.1", closed(ErrorCode.H3_FRAME_UNEXPECTED))
async def data_before_headers(c: RawClient) -> Outcome:
    """Begins a request with DATA."""
    c.start()
    c.bidi(wire.data(b"early") + wire.headers(c.fields()))
    return await c.closing()


@case("RFC 9114 §4.1", reset(ErrorCode.H3_REQUEST_INCOMPLETE))
async def end_before_headers(c: RawClient) -> Outcome:
    """Ends a request stream that holds only an unknown frame."""
    c.start()
    return await c.answer(c.bidi(frame(FrameType.RESERVED, b"grease"), fin=True))


@case("RFC 9114 §7.1", closed(ErrorCode.H3_FRAME_ERROR))
async def end_within_headers(c: RawClient) -> Outcome:
    """Ends a request stream in the middle of its HEADERS frame."""
    c.start()
    c.bidi(wire.headers(c.fields())[:-1], fin=True)
    return await c.closing()


@case("RFC 9114 §9", TOLERATED)
async def unknown_frames_before_headers(c: RawClient) -> Outcome:
    """Sends reserved frames in front of HEADERS."""
    c.start()
    grease = frame(FrameType.RESERVED) + frame(FrameType.RESERVED, bytes(5000))
    stream = c.bidi(grease + wire.headers(c.fields()))
    outcome = await c.answer(stream)
    return await c.echo(stream) if outcome == status(200) else outcome


@case("RFC 9114 §7.2.4.2", TOLERATED)
async def request_before_settings(c: RawClient) -> Outcome:
    """Sends its SETTINGS behind its first request, as a reordering network may."""
    stream = c.request()
    c.start()
    outcome = await c.answer(stream)
    return await c.echo(stream) if outcome == status(200) else outcome


@case("RFC 9000 §16", TOLERATED)
async def frame_header_in_long_varints(c: RawClient) -> Outcome:
    """Writes type and length of HEADERS in eight bytes each."""
    c.start()
    section = wire.field_section(c.fields())
    kind, length = (
        (value | 3 << 62).to_bytes(8) for value in (FrameType.HEADERS, len(section))
    )
    stream = c.bidi(kind + length + section)
    outcome = await c.answer(stream)
    return await c.echo(stream) if outcome == status(200) else outcome


@case(
    "RFC 9114 §7.2",
    closed(ErrorCode.H3_FRAME_UNEXPECTED),
    each={
        "CANCEL_PUSH": frame(FrameType.CANCEL_PUSH, varint(0)),
        "SETTINGS": wire.settings({}),
        "PUSH_PROMISE": frame(FrameType.PUSH_PROMISE, varint(0) + EMPTY_SECTION_PREFIX),
        "GOAWAY": frame(FrameType.GOAWAY, varint(0)),
        "MAX_PUSH_ID": frame(FrameType.MAX_PUSH_ID, varint(0)),
        "PRIORITY_UPDATE": frame(FrameType.PRIORITY_UPDATE_REQUEST, varint(0)),
    },
)
async def control_frame_on_a_request_stream(c: RawClient, wrong: bytes) -> Outcome:
    """Sends a frame that belongs on the control stream."""
    c.start()
    c.bidi(wrong)
    return await c.closing()


@case("RFC 9114 §7.2.8", closed(ErrorCode.H3_FRAME_UNEXPECTED), each=HTTP2_ONLY_FRAMES)
async def http2_frame_on_a_request_stream(c: RawClient, kind: int) -> Outcome:
    """Sends a frame type that only HTTP/2 has."""
    c.start()
    c.bidi(frame(kind, b"\x00" * 8))
    return await c.closing()


@case(
    "RFC 9204 §2.2",
    closed(ErrorCode.QPACK_DECOMPRESSION_FAILED),
    each={
        "required insert count 1": b"\x02\x00\x80",
        "dynamic index": EMPTY_SECTION_PREFIX + b"\x80",
        "dynamic post-base index": EMPTY_SECTION_PREFIX + b"\x10",
        "dynamic name": EMPTY_SECTION_PREFIX + b"\x40\x01x",
        "static index 99": EMPTY_SECTION_PREFIX + prefixed_integer(99, 6, 0xC0),
        "no prefix": b"",
        "string beyond the end": EMPTY_SECTION_PREFIX + b"\x21a\x05b",
        "end of string in Huffman code": EMPTY_SECTION_PREFIX
        + b"\x21a\x84"
        + b"\xff" * 4,
        "Huffman padding of zeros": EMPTY_SECTION_PREFIX + b"\x21a\x81\x00",
    },
)
async def field_section_that_cannot_be_decoded(c: RawClient, section: bytes) -> Outcome:
    """Sends a HEADERS frame that cannot be decoded without a dynamic table."""
    c.start()
    c.bidi(frame(FrameType.HEADERS, section))
    return await c.closing()


@case("RFC 9204 §7.4", reset(ErrorCode.QPACK_DECOMPRESSION_FAILED))
async def integer_beyond_62_bits(c: RawClient) -> Outcome:
    """Sends an index beyond any decoder's range: a value too large to decode ends only its stream."""
    c.start()
    c.bidi(frame(FrameType.HEADERS, EMPTY_SECTION_PREFIX + b"\xff" * 11))
    return await c.closing()


@case(
    "RFC 9114 §4.2.2",
    status(431),
    reset(ErrorCode.H3_EXCESSIVE_LOAD),
    reset(ErrorCode.H3_MESSAGE_ERROR),
    reset(ErrorCode.H3_REQUEST_REJECTED),
)
async def field_section_beyond_the_limit(c: RawClient) -> Outcome:
    """Sends more fields than the relay's SETTINGS_MAX_FIELD_SECTION_SIZE."""
    c.start()
    await c.tunnel()
    limit = (c.settings or {}).get(Setting.MAX_FIELD_SECTION_SIZE, 2**18)
    return await c.answer(c.request(c.fields(extra=[(b"x-long", b"x" * limit)])))


@case("RFC 9114 §4.2.2", TOLERATED)
async def field_section_of_2000_bytes(c: RawClient) -> Outcome:
    """Sends more than one packet of fields, which every relay should take."""
    c.start()
    fields = c.fields(extra=[(b"x-long", b"x" * 2000)])
    return await c.echo(await c.tunnel(fields))


@case(
    "RFC 9114 §4.3",
    *MALFORMED,
    each={
        ":method": (b":method", b"CONNECT"),
        ":protocol": (b":protocol", b"connect-udp"),
        ":scheme": (b":scheme", b"https"),
        ":authority": (b":authority", b"localhost"),
        ":path": (b":path", b"/"),
    },
)
async def pseudo_header_twice(c: RawClient, second: tuple[bytes, bytes]) -> Outcome:
    """Sends a pseudo-header a second time."""
    c.start()
    return await c.answer(c.request([second] + c.fields()))


@case("RFC 9114 §4.3", *MALFORMED)
async def pseudo_header_after_a_field(c: RawClient) -> Outcome:
    """Puts :path after a regular field."""
    c.start()
    fields = c.fields(without=(b":path",), extra=[(b":path", c.path.encode())])
    return await c.answer(c.request(fields))


@case(
    "RFC 9114 §4.3",
    *MALFORMED,
    each={"unknown": b":target", "of responses": b":status"},
)
async def pseudo_header_that_requests_lack(c: RawClient, name: bytes) -> Outcome:
    """Sends a pseudo-header that is not defined for requests."""
    c.start()
    return await c.answer(c.request([(name, b"200")] + c.fields()))


@case(
    "RFC 9220 §3",
    *MALFORMED,
    each={
        name: (name.encode(),) for name in (":method", ":scheme", ":authority", ":path")
    },
)
async def extended_connect_without(c: RawClient, missing: tuple[bytes]) -> Outcome:
    """Leaves out a pseudo-header that extended CONNECT needs."""
    c.start()
    return await c.answer(c.request(c.fields(without=missing)))


@case(
    "RFC 9298 §3.4",
    *MALFORMED,
    each={":authority": b":authority", ":path": b":path", ":scheme": b":scheme"},
)
async def empty_pseudo_header(c: RawClient, name: bytes) -> Outcome:
    """Sends a pseudo-header without a value."""
    c.start()
    return await c.answer(c.request(c.fields({name: b""})))


@case("RFC 8441 §4", *MALFORMED)
async def protocol_without_connect(c: RawClient) -> Outcome:
    """Sends :protocol with GET."""
    c.start()
    return await c.answer(c.request(c.fields({b":method": b"GET"})))


@case("RFC 9114 §4.4", *MALFORMED)
async def classic_connect_with_a_path(c: RawClient) -> Outcome:
    """Sends CONNECT without :protocol, but with :scheme and :path."""
    c.start()
    return await c.answer(c.request(c.fields(without=(b":protocol",))))


@case("RFC 9114 §4.3.1", *MALFORMED)
async def authority_with_userinfo(c: RawClient) -> Outcome:
    """Sends a user name within :authority."""
    c.start()
    authority = b"user@" + c.relay.authority.encode()
    return await c.answer(c.request(c.fields({b":authority": authority})))


@case("RFC 9114 §4.3.1", *MALFORMED)
async def host_differs_from_authority(c: RawClient) -> Outcome:
    """Sends a Host field that contradicts :authority."""
    c.start()
    return await c.answer(c.request(c.fields(extra=[(b"host", b"other.example")])))


@case(
    "RFC 9114 §4.2",
    *MALFORMED,
    each={
        "upper case": (b"X-Upper", b"1"),
        "empty name": (b"", b"1"),
        "space in a name": (b"x y", b"1"),
        "line feed in a value": (b"x", b"a\nb"),
        "NUL in a value": (b"x", b"a\x00b"),
        "connection": (b"connection", b"close"),
        "transfer-encoding": (b"transfer-encoding", b"chunked"),
        "te: gzip": (b"te", b"gzip"),
    },
)
async def forbidden_field(c: RawClient, forbidden: tuple[bytes, bytes]) -> Outcome:
    """Sends a field that HTTP/3 messages must not contain."""
    c.start()
    return await c.answer(c.request(c.fields(extra=[forbidden])))


@case(
    "RFC 9114 §4.2",
    TOLERATED,
    each={
        "te: trailers": (b"te", b"trailers"),
        "unknown": (b"x-unknown", b"1"),
        "priority": (b"priority", b"u=1, i"),
        "broken priority": (b"priority", b"u=="),
    },
)
async def harmless_field(c: RawClient, harmless: tuple[bytes, bytes]) -> Outcome:
    """Sends a field that a relay may not know, or whose value it may not know."""
    c.start()
    return await c.echo(await c.tunnel(c.fields(extra=[harmless])))


@case(
    "RFC 9297 §3.2",
    *MALFORMED,
    each={
        "content-length": (b"content-length", b"0"),
        "content-type": (b"content-type", b"text/plain"),
    },
)
async def content_field_on_connect(c: RawClient, wrong: tuple[bytes, bytes]) -> Outcome:
    """Sends a field that conflicts with the capsule protocol."""
    c.start()
    return await c.answer(c.request(c.fields(extra=[wrong])))


@case(
    "RFC 9220 §3", status(501), each={"websocket": b"websocket", "made up": b"mqtt-9"}
)
async def unknown_protocol(c: RawClient, protocol: bytes) -> Outcome:
    """Requests another :protocol."""
    c.start()
    return await c.answer(c.request(c.fields({b":protocol": protocol})))


@case("RFC 9298 §3", status(404))
async def path_of_no_template(c: RawClient) -> Outcome:
    """Requests a path that the relay does not serve."""
    c.start()
    return await c.answer(c.request(c.fields({b":path": b"/elsewhere/127.0.0.1/9/"})))


@case(
    "RFC 9298 §3.4",
    *(status(code) for code in (404, 405, 501)),
    *MALFORMED,
)
async def get_request(c: RawClient) -> Outcome:
    """Sends GET for the path of a tunnel."""
    c.start()
    fields = c.fields({b":method": b"GET"}, (b":protocol", b"capsule-protocol"))
    return await c.answer(c.request(fields))


@case(
    "RFC 9298 §3.4",
    *MALFORMED,
    each={
        "port 0": ("192.0.2.1", "0"),
        "port 65536": ("192.0.2.1", "65536"),
        "port -1": ("192.0.2.1", "-1"),
        "port name": ("192.0.2.1", "https"),
        "empty port": ("192.0.2.1", ""),
        "empty host": ("", "443"),
        "NUL in the host": ("a%00b", "443"),
        "slash in the host": ("a%2Fb", "443"),
        "not UTF-8": ("%FF%FE", "443"),
        "scoped IPv6": ("fe80%3A%3A1%25eth0", "443"),
        "broken IPv6": ("2001%3Adb8%3A%3A1%3A%3A2", "443"),
    },
)
async def malformed_target(c: RawClient, target: tuple[str, str]) -> Outcome:
    """Requests a tunnel to an invalid host or port."""
    c.start()
    host, port = target
    template = c.relay.template
    path = template.replace("{target_host}", host).replace("{target_port}", port)
    return await c.answer(c.request(c.fields({b":path": path.encode()})))


@case("RFC 3986 §2.1", *MALFORMED, each={"not hexadecimal": "%zz", "cut": "host%4"})
async def bad_percent_encoding(c: RawClient, host: str) -> Outcome:
    """Sends a :path that is not a URI path."""
    c.start()
    path = c.relay.template.replace("{target_host}", host)
    path = path.replace("{target_port}", "443")
    return await c.answer(c.request(c.fields({b":path": path.encode()})))


@case("RFC 9298 §3.4", TOLERATED)
async def request_without_capsule_protocol(c: RawClient) -> Outcome:
    """Leaves out capsule-protocol: connect-udp implies it."""
    c.start()
    fields = c.fields(without=(b"capsule-protocol",))
    return await c.echo(await c.tunnel(fields))


@case("RFC 9110 §15.5.8", status(407), needs_token=True)
async def missing_token(c: RawClient) -> Outcome:
    """Leaves out proxy-authorization."""
    c.start()
    return await c.answer(c.request(c.fields(without=(b"proxy-authorization",))))


@case(
    "RFC 9110 §11.7",
    status(407),
    needs_token=True,
    each={
        "wrong token": b"Bearer d3Jvbmc",
        "no token": b"Bearer",
        "another scheme": b"Basic dXNlcjpwYXNz",
    },
)
async def unacceptable_authorization(c: RawClient, value: bytes) -> Outcome:
    """Sends credentials unknown to the relay."""
    c.start()
    return await c.answer(c.request(c.fields({b"proxy-authorization": value})))
