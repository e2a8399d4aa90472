"""Reads the protobuf wire format in columns: many messages of one type at a time, without objects.

Source: https://protobuf.dev/programming-guides/encoding. It knows no message types and never
recurses, so a deeply nested hostile file costs nothing.
"""

import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Data = bytes | bytearray | mmap.mmap
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

VARINT, FIXED64, SPAN, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
MAX_FIELDS = 10_000  # of one message read in columns; an op event has about ten


class WireError(ValueError):
    """Malformed bytes at `position`, in bytes from the start of the file."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


@dataclass(frozen=True, slots=True)
class Field:
    """One field of one message; a length-delimited one occupies the bytes [value, end)."""

    number: int
    wire: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class WireColumn:
    """One field of many messages: `rows` [n] index the messages, `values` [n] are numbers or starts."""

    number: int
    wire: int
    rows: Ints
    values: Words
    ends: Ints  # [n] where the fields end

    @property
    def starts(self) -> Ints:
        """The values as signed integers: starts of spans, in bytes from the start of the file."""
        return self.values.view(np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges [start, start + length) of messages in the file, 8 bytes per message."""

    starts: NDArray[np.uint32]
    lengths: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.starts)

    def chunk(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Starts and ends of messages `first` to `last` - 1."""
        starts = self.starts[first:last].astype(np.int64)
        return starts, starts + self.lengths[first:last]


class SpanList:
    """Collects the byte ranges of repeated fields; 4 bytes hold a position below 2 GiB."""

    def __init__(self) -> None:
        self._starts = array("I")
        self._lengths = array("I")

    def take_run(self, data: Data, position: int, end: int, tag: int) -> int:
        """Appends consecutive fields with this one-byte tag; returns the position after them.

        This is the only Python loop over events: each length gives the start of the next message.
        """
        add_start, add_length = self._starts.append, self._lengths.append
        beyond = WireError("a message ends after the one that contains it", position)
        try:
            while position < end and data[position] == tag:
                length, position = data[position + 1], position + 2
                if length > 0x7F:
                    length, position = read_varint(data, position - 1)
                add_start(position)
                add_length(length)
                position += length
        except (IndexError, OverflowError) as error:
            raise beyond from error
        if position > end:
            raise beyond
        return position

    def spans(self) -> Spans:
        """The ranges collected so far, without a copy."""
        return Spans(_uint32(self._starts), _uint32(self._lengths))


def _uint32(numbers: "array[int]") -> NDArray[np.uint32]:
    return np.frombuffer(numbers, np.uint32) if numbers else np.empty(0, np.uint32)


def read_varint(data: Data, position: int) -> tuple[int, int]:
    """The number at `position` (0 to 2^64 - 1), and the position after it."""
    value = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
    raise WireError("a number has no end", position)


def fields(data: Data, start: int, end: int) -> Iterator[Field]:
    """The fields of one message, one at a time, for rare message types."""
    position = start
    while position < end:
        field = field_at(data, position, end)
        yield field
        position = field.end


def field_at(data: Data, position: int, end: int) -> Field:
    """The field at `position` in a message that ends at `end`."""
    tag, after = read_varint(data, position)
    number, wire = tag >> 3, tag & 7
    if not number or wire not in {VARINT, FIXED64, SPAN, FIXED32}:
        raise WireError(f"tag {tag} is invalid", position)
    if wire == VARINT:
        value, after = read_varint(data, after)
    elif wire == SPAN:
        length, value = read_varint(data, after)
        after = value + length
    else:
        width = 8 if wire == FIXED64 else 4
        value = int.from_bytes(data[after : after + width], "little")
        after += width
    if after > end:
        raise WireError("a field ends after the message that contains it", position)
    return Field(number, wire, value, after)


def columns(data: Bytes, starts: Ints, ends: Ints) -> Iterator[WireColumn]:
    """The fields of n messages in rounds: the first field of every message, then the second, ..."""
    rows = np.arange(len(starts), dtype=np.int64)
    position, limit = starts, ends
    for _ in range(MAX_FIELDS):
        active = position < limit
        if not active.all():
            rows, position, limit = rows[active], position[active], limit[active]
        if not len(rows):
            return
        tags, after = varints(data, position)
        following = np.empty_like(position)
        for tag, index in _distinct(tags):
            column = _column(data, int(tag), rows[index], after[index])
            following[index] = column.ends
            _check(column.ends, limit[index], position[index])
            yield column
        position = following
    raise WireError(f"a message has more than {MAX_FIELDS} fields", int(position[0]))


def _distinct(tags: Words) -> Iterator[tuple[int, Any]]:
    """Each tag with an index of its messages; usually all messages have the same tag."""
    if (tags == tags[0]).all():
        yield int(tags[0]), slice(None)
        return
    for tag in np.unique(tags):
        yield int(tag), np.flatnonzero(tags == tag)


def _column(data: Bytes, tag: int, rows: Ints, after: Ints) -> WireColumn:
    number, wire = tag >> 3, tag & 7
    if wire == VARINT and number:
        values, ends = varints(data, after)
    elif wire == SPAN and number:
        lengths, first = varints(data, after)
        values, ends = first.view(np.uint64), first + np.minimum(lengths, 2**32).astype(np.int64)
    elif wire in {FIXED64, FIXED32} and number:
        width = 8 if wire == FIXED64 else 4
        values, ends = _fixed(data, after, width), after + width
    else:
        raise WireError(f"tag {tag} is invalid", int(after[0]))
    return WireColumn(number, wire, rows, values, ends)


def _check(ends: Ints, limit: Ints, position: Ints) -> None:
    beyond = ends > limit
    if beyond.any():
        first = int(position[np.argmax(beyond)])
        raise WireError("a field ends after the message that contains it", first)


def _fixed(data: Bytes, position: Ints, width: int) -> Words:
    """Little-endian numbers of `width` bytes at each position."""
    value = np.zeros(len(position), np.uint64)
    for index in range(width):
        byte = data.take(position + index, mode="clip").astype(np.uint64)
        value |= byte << np.uint64(8 * index)
    return value


def varints(data: Bytes, position: Ints) -> tuple[Words, Ints]:
    """The number at each position [n] (0 to 2^64 - 1), and the position after it."""
    byte = data.take(position, mode="clip")
    value = (byte & 0x7F).astype(np.uint64)
    ends = position + 1
    more = np.flatnonzero(byte > 0x7F)
    for index in range(1, MAX_VARINT_BYTES):
        if not len(more):
            return value, ends
        byte = data.take(ends[more], mode="clip")
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * index)
        ends[more] += 1
        more = more[byte > 0x7F]
    if len(more):
        raise WireError("a number has no end", int(position[more[0]]))
    return value, ends
