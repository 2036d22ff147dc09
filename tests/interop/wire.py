"""The bytes of HTTP/3, QPACK and capsules, encoded by hand so that they can be wrong on purpose."""

from enum import IntEnum

from aioquic.buffer import Buffer, BufferReadError, encode_uint_var

varint = encode_uint_var


class StreamType(IntEnum):
    """Unidirectional stream types (RFC 9114 §6.2, RFC 9204 §4.2)."""

    CONTROL = 0x00
    PUSH = 0x01
    QPACK_ENCODER = 0x02
    QPACK_DECODER = 0x03
    RESERVED = 0x21 + 0x1F * 7


class FrameType(IntEnum):
    """HTTP/3 frame types (RFC 9114 §7.2, RFC 9218 §7.2)."""

    DATA = 0x00
    HEADERS = 0x01
    CANCEL_PUSH = 0x03
    SETTINGS = 0x04
    PUSH_PROMISE = 0x05
    GOAWAY = 0x07
    MAX_PUSH_ID = 0x0D
    PRIORITY_UPDATE_REQUEST = 0xF0700
    PRIORITY_UPDATE_PUSH = 0xF0701
    RESERVED = 0x21 + 0x1F * 11


class Setting(IntEnum):
    """Settings (RFC 9114 §7.2.4.1, RFC 9204 §5, RFC 9220 §5, RFC 9297 §2.1.1)."""

    QPACK_MAX_TABLE_CAPACITY = 0x01
    MAX_FIELD_SECTION_SIZE = 0x06
    QPACK_BLOCKED_STREAMS = 0x07
    ENABLE_CONNECT_PROTOCOL = 0x08
    H3_DATAGRAM = 0x33
    RESERVED = 0x21 + 0x1F * 13


class CapsuleType(IntEnum):
    """Capsule types (RFC 9297 §5.4)."""

    DATAGRAM = 0x00
    RESERVED = 0x17 + 0x29 * 5


Fields = list[tuple[bytes, bytes]]
"""A field section, in order and unchecked."""


def frame(kind: int, payload: bytes = b"") -> bytes:
    """One HTTP/3 frame (RFC 9114 §7.1)."""
    return varint(kind) + varint(len(payload)) + payload


Settings = dict[int, int] | list[tuple[int, int]]
"""Settings to send; a list may contain an identifier twice."""


def settings(values: Settings) -> bytes:
    """One SETTINGS frame."""
    pairs = values.items() if isinstance(values, dict) else values
    return frame(
        FrameType.SETTINGS,
        b"".join(varint(key) + varint(value) for key, value in pairs),
    )


def prefixed_integer(value: int, prefix_bits: int, first_byte: int = 0) -> bytes:
    """An integer after the flags in first_byte (RFC 7541 §5.1, RFC 9204 §4.1.1)."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes([first_byte | value])
    encoded = bytearray([first_byte | limit])
    value -= limit
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


EMPTY_SECTION_PREFIX = b"\x00\x00"
"""Required Insert Count 0 and Base 0: no dynamic table (RFC 9204 §4.5.1)."""


def field_section(fields: Fields) -> bytes:
    """A field section of literals with literal names, no Huffman (RFC 9204 §4.5.6)."""
    lines = (
        prefixed_integer(len(name), 3, 0x20)
        + name
        + prefixed_integer(len(value), 7)
        + value
        for name, value in fields
    )
    return EMPTY_SECTION_PREFIX + b"".join(lines)


def headers(fields: Fields) -> bytes:
    """One HEADERS frame."""
    return frame(FrameType.HEADERS, field_section(fields))


def data(payload: bytes) -> bytes:
    """One DATA frame."""
    return frame(FrameType.DATA, payload)


def capsule(kind: int, value: bytes) -> bytes:
    """One capsule (RFC 9297 §3.2)."""
    return varint(kind) + varint(len(value)) + value


def udp_payload(payload: bytes, context: int = 0) -> bytes:
    """The payload of an HTTP datagram: context ID and UDP payload (RFC 9298 §5)."""
    return varint(context) + payload


def pull_record(buffered: bytearray) -> tuple[int, bytes] | None:
    """Removes one complete type-length-value (a frame or a capsule) from the front, or returns None."""
    reader = Buffer(data=bytes(buffered))
    try:
        kind = reader.pull_uint_var()
        value = reader.pull_bytes(reader.pull_uint_var())
    except BufferReadError:
        return None
    del buffered[: reader.tell()]
    return kind, value


def split_datagram(datagram: bytes) -> tuple[int, bytes]:
    """Splits a varint (quarter stream ID or context ID) from the bytes after it."""
    reader = Buffer(data=datagram)
    return reader.pull_uint_var(), datagram[reader.tell() :]


def pull_settings(payload: bytes) -> dict[int, int]:
    """Reads the payload of a SETTINGS frame."""
    values = {}
    reader = Buffer(data=payload)
    while not reader.eof():
        key = reader.pull_uint_var()
        values[key] = reader.pull_uint_var()
    return values


def stream_frame(stream: int, offset: int, data: bytes) -> bytes:
    """A QUIC STREAM frame with offset and length (RFC 9000 §19.8)."""
    return b"\x0e" + varint(stream) + varint(offset) + varint(len(data)) + data
