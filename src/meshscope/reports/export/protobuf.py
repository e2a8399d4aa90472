"""Writes the protobuf wire format: varint, length-delimited and double fields.

Source: https://protobuf.dev/programming-guides/encoding. `meshscope.readers.profile.wire` reads it.
"""

import struct

VARINT, FIXED64, SPAN = 0, 1, 2


def number(field: int, value: int) -> bytes:
    """A varint field; a negative number is written as its 64-bit complement."""
    return varint(field << 3 | VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def span(field: int, content: bytes | str) -> bytes:
    """A length-delimited field: bytes, text or a message."""
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | SPAN) + varint(len(content)) + content


def fixed64(field: int, value: int) -> bytes:
    """A field of eight bytes."""
    return varint(field << 3 | FIXED64) + value.to_bytes(8, "little")


def double(field: int, value: float) -> bytes:
    """A field of a double."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def varint(value: int) -> bytes:
    """A non-negative number, seven bits per byte."""
    if value < 0x80:
        return _ONE_BYTE[value]
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]
