"""Reads the protobuf wire format in columns, many messages of one type at a time, or one message at a time.

Source: https://protobuf.dev/programming-guides/encoding. It knows no message types and never
recurses, so a deeply nested hostile file costs nothing.
"""

import mmap
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Data = bytes | bytearray | mmap.mmap
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

VARINT, FIXED64, SPAN, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BYTES = 10
MAX_FIELDS = 10_000  # of one message read in columns; an op event has about ten


class WireError(ValueError):
    """Malformed bytes at `position`, in bytes from the start of the file."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


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

    `values` are the numbers of fields. A field that the message lacks is 0, an empty text or an
    empty message, as in proto3. WireError if the bytes are no message, or a field has another wire
    type than is asked for.
    """

    __slots__ = ("_data", "_ranges", "values")

    def __init__(self, data: Data = b"", start: int = 0, end: int | None = None) -> None:
        self.values: dict[int, list[int]] = {}
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
            raise WireError(f"field {field} has the wrong wire type")
        if field not in self._ranges:
            return Spans(np.empty(0, np.uint32), np.empty(0, np.uint32))
        starts, lengths = self._ranges[field]
        return Spans(np.frombuffer(starts, np.uint32), np.frombuffer(lengths, np.uint32))

    def number(self, field: int) -> int:
        """The last value of the field, as a signed number; 0 if it is missing."""
        if field in self._ranges:
            raise WireError(f"field {field} has the wrong wire type")
        return _signed(self.values.get(field, _ZERO)[-1])

    def numbers(self, field: int) -> list[int]:
        """All numbers of a repeated field, packed or not, signed."""
        unsigned = list(self.values.get(field, ()))
        for start, length in zip(*self._ranges.get(field, ((), ())), strict=True):
            position = start
            while position < start + length:
                value, position = read_varint(self._data, position)
                unsigned.append(value)
        return [_signed(value) for value in unsigned]

    def contents(self, field: int) -> list[bytes]:
        """The bytes of a repeated field of texts, bytes, messages or packed numbers."""
        return [bytes(self._data[start:end]) for start, end in self._bounds(field)]

    def text(self, field: int) -> str:
        """The last text of a field; invalid UTF-8 becomes replacement characters."""
        return next(reversed(self.texts(field)), "")

    def texts(self, field: int) -> list[str]:
        """All texts of a repeated field."""
        return [content.decode(errors="replace") for content in self.contents(field)]

    def message(self, field: int) -> "Message":
        """The last message of a field."""
        bounds = self._bounds(field)
        return Message(self._data, *bounds[-1]) if bounds else _EMPTY

    def messages(self, field: int) -> list["Message"]:
        """All messages of a repeated field."""
        return [Message(self._data, start, end) for start, end in self._bounds(field)]

    def _bounds(self, field: int) -> list[tuple[int, int]]:
        if field in self.values:
            raise WireError(f"field {field} has the wrong wire type")
        ranges = self._ranges.get(field)
        return [(s, s + n) for s, n in zip(*ranges, strict=True)] if ranges else []

    def _take(self, data: Data, position: int, end: int) -> int:
        """Reads one field, or consecutive spans under one tag; returns the position after them."""
        tag, after = data[position], position + 1
        if tag > 0x7F:
            tag, after = read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if not number or wire not in {VARINT, SPAN, *WIDTHS}:
            raise WireError(f"tag {tag} is invalid", position)
        if wire == SPAN:
            if number not in self._ranges:
                self._ranges[number] = array("I"), array("I")
            return _take_run(data, position, end, self._ranges[number])
        if wire == VARINT:
            value, after = data[after], after + 1
            if value > 0x7F:
                value, after = read_varint(data, after - 1)
        else:
            value = int.from_bytes(data[after : after + WIDTHS[wire]], "little")
            after += WIDTHS[wire]
        self.values.setdefault(number, []).append(value)
        return after


_ZERO = (0,)
_EMPTY = Message()


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


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


def read_varint(data: Data, position: int) -> tuple[int, int]:
    """The number at `position` (0 to 2^64 - 1), and the position after it."""
    value = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
    raise WireError("a number has no end", position)


@dataclass(frozen=True, slots=True)
class WireColumn:
    """One field of many messages: `rows` [n] index the messages, `values` [n] are numbers or starts."""

    number: int
    rows: Ints
    values: Ints  # the bits of numbers; starts of spans, in bytes from the start of the file
    ends: Ints  # [n] where the fields end


def columns(
    data: Bytes, starts: Ints, ends: Ints, wires: Mapping[int, int]
) -> Iterator[WireColumn]:
    """The fields of n messages in rounds: the first field of every message, then the second, ...

    `wires` are the wire types of the known fields. WireError if a field has another one or is malformed.
    """
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
        for tag, index in alike(tags):
            number, wire = tag >> 3, tag & 7
            values, following[index] = _values(data, tag, after[index])
            beyond = following[index] > limit[index]
            if beyond.any():
                first = int(position[index][np.argmax(beyond)])
                raise WireError("a field ends after the message that contains it", first)
            if wires.get(number, wire) != wire:
                raise WireError(f"field {number} has the wrong wire type", int(after[index][0]))
            if number in wires:
                yield WireColumn(number, rows[index], values, following[index])
        position = following
    raise WireError(f"a message has more than {MAX_FIELDS} fields", int(position[0]))


def alike(numbers: NDArray[Any]) -> Iterator[tuple[int, Any]]:
    """Each distinct number with an index of its rows; usually all are the same."""
    if len(numbers) and (numbers == numbers[0]).all():
        yield int(numbers[0]), slice(None)
        return
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


def _values(data: Bytes, tag: int, after: Ints) -> tuple[Ints, Ints]:
    """The values of fields under one tag, and where the fields end."""
    number, wire = tag >> 3, tag & 7
    if wire == VARINT and number:
        return varints(data, after)
    if wire == SPAN and number:
        lengths, first = varints(data, after)
        is_absurd = (lengths < 0) | (lengths > 2**32)  # from 2^63 on, they are negative
        return first, first + np.where(is_absurd, 2**32, lengths)
    if wire not in WIDTHS or not number:
        raise WireError(f"tag {tag} is invalid", int(after[0]))
    value = np.zeros(len(after), np.int64)
    for index in range(WIDTHS[wire]):
        value |= data.take(after + index, mode="clip").astype(np.int64) << np.int64(8 * index)
    return value, after + WIDTHS[wire]


def varints(data: Bytes, position: Ints) -> tuple[Ints, Ints]:
    """The bits of the number at each position [n], and the position after it."""
    byte = data.take(position, mode="clip")
    value = (byte & 0x7F).astype(np.int64)
    ends = position + 1
    more = np.flatnonzero(byte > 0x7F)
    for index in range(1, MAX_VARINT_BYTES):
        if not len(more):
            return value, ends
        byte = data.take(ends[more], mode="clip")
        value[more] |= (byte & 0x7F).astype(np.int64) << np.int64(7 * index)
        ends[more] += 1
        more = more[byte > 0x7F]
    if len(more):
        raise WireError("a number has no end", int(position[more[0]]))
    return value, ends
