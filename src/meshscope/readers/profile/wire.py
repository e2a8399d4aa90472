"""Reads the protobuf wire format in columns, many messages of one type at a time, or one message at a time.

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

    def chunk(self, first: int = 0, last: int | None = None) -> tuple[Ints, Ints]:
        """Starts and ends of the messages in the slice [first, last)."""
        starts = self.starts[first:last].astype(np.int64)
        return starts, starts + self.lengths[first:last]


class Message:
    """The fields of the message in the bytes [start, end), by number.

    A field that it lacks is 0, an empty text or an empty message, as in proto3. WireError if the bytes are no
    message, or a field has another wire type than is asked for.
    """

    __slots__ = ("_data", "_ranges", "values")

    def __init__(self, data: Data = b"", start: int = 0, end: int | None = None) -> None:
        self.values: dict[int, list[int | bytes]] = {}  # numbers; those of a fixed width as bytes
        self._data = data
        self._ranges: dict[int, tuple[array[int], array[int]]] = {}
        position, end = start, len(data) if end is None else end
        try:
            while position < end:
                position = self._take(data, position, end)
        except (IndexError, OverflowError) as error:
            raise WireError("the message is incomplete", position) from error
        if position > end:
            raise WireError("a field ends after the message that contains it", position)

    def has(self, field: int) -> bool:
        """Whether the field occurs."""
        return field in self.values or field in self._ranges

    def spans(self, field: int) -> Spans:
        """Byte ranges of the field, without a copy; WireError if the field is a number."""
        if field in self.values:
            raise WireError(f"field {field} has the wrong wire type", 0)
        starts, lengths = self._ranges.get(field, (array("I"), array("I")))
        return Spans(_uint32(starts), _uint32(lengths))

    def number(self, field: int) -> int:
        """The last value of the field, as a signed number; 0 if it is missing."""
        value = self.values.get(field, _ZERO)[-1]
        if not isinstance(value, int) or field in self._ranges:
            raise WireError(f"field {field} has the wrong wire type", 0)
        return value - 2**64 if value >= 2**63 else value

    def numbers(self, field: int) -> list[int]:
        """All numbers of a repeated field, packed or not, signed."""
        if not self.has(field):
            return []
        unsigned = [value for value in self.values.get(field, ()) if isinstance(value, int)]
        for start, length in zip(*self._ranges.get(field, ((), ())), strict=True):
            position = start
            while position < start + length:
                value, position = read_varint(self._data, position)
                unsigned.append(value)
        return [value - 2**64 if value >= 2**63 else value for value in unsigned]

    def contents(self, field: int) -> list[bytes]:
        """The bytes of a repeated field of texts, bytes, messages or numbers of a fixed width."""
        values = self.values.get(field, ())
        fixed = [value for value in values if isinstance(value, bytes)] if values else []
        if len(fixed) < len(values):
            raise WireError(f"field {field} has the wrong wire type", 0)
        if field not in self._ranges:
            return fixed
        ranges = zip(*self._ranges[field], strict=True)
        return [*fixed, *(bytes(self._data[start : start + length]) for start, length in ranges)]

    def text(self, field: int) -> str:
        """The last text of a field; invalid UTF-8 becomes replacement characters."""
        return contents[-1].decode(errors="replace") if (contents := self.contents(field)) else ""

    def texts(self, field: int) -> list[str]:
        """All texts of a repeated field."""
        return [content.decode(errors="replace") for content in self.contents(field)]

    def message(self, field: int) -> "Message":
        """The last message of a field."""
        return messages[-1] if (messages := self.messages(field, first=-1)) else _EMPTY

    def messages(self, field: int, *, first: int = 0) -> list["Message"]:
        """All messages of a repeated field, or those from `first` on."""
        if field in self.values:
            raise WireError(f"field {field} has the wrong wire type", 0)
        if field not in self._ranges:
            return []
        ranges = zip(*(side[first:] for side in self._ranges[field]), strict=True)
        return [Message(self._data, start, start + length) for start, length in ranges]

    def _take(self, data: Data, position: int, end: int) -> int:
        """Reads one field, or consecutive spans under one tag; returns the position after them."""
        tag, after = data[position], position + 1
        if tag > 0x7F:
            tag, after = read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == SPAN and number:
            if number not in self._ranges:
                self._ranges[number] = array("I"), array("I")
            return _take_run(data, position, end, self._ranges[number])
        value: int | bytes
        if wire == VARINT and number:
            value, after = data[after], after + 1
            if value > 0x7F:
                value, after = read_varint(data, after - 1)
        elif wire in {FIXED64, FIXED32} and number:
            width = 8 if wire == FIXED64 else 4
            value = bytes(data[after : after + width])
            after += width
        else:
            raise WireError(f"tag {tag} is invalid", position)
        self.values.setdefault(number, []).append(value)
        return after


_ZERO = (0,)
_EMPTY = Message()


def _take_run(data: Data, position: int, end: int, ranges: "tuple[array[int], array[int]]") -> int:
    """Appends consecutive spans with the tag at `position`; returns the position after them.

    This is the only Python loop over events: each length gives the start of the next message.
    """
    add_start, add_length = ranges[0].append, ranges[1].append
    tag, is_wide = data[position], data[position] > 0x7F
    while position < end and data[position] == tag:
        if is_wide:
            _, position = read_varint(data, position)
            length, position = read_varint(data, position)
        else:
            length, position = data[position + 1], position + 2
            if length > 0x7F:
                length, position = read_varint(data, position - 1)
        add_start(position)
        add_length(length)
        position += length
        if is_wide:  # the first byte of a wide tag does not identify the field
            break
    return position


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
