"""Reads one protobuf message at a time, with its nested messages: the HLO protos in a profile.

`meshscope.readers.profile.wire` reads the events of a profile, of which there are millions.
"""

from collections.abc import Iterator
from typing import Any

from meshscope.readers.profile.wire import FIXED32, FIXED64, SPAN, VARINT, WireError, read_varint


class Proto:
    """A message; WireError if the bytes are none.

    A field that the message lacks is 0, an empty text or an empty message, as in proto3.
    """

    __slots__ = ("_fields",)

    def __init__(self, content: bytes = b"") -> None:
        self._fields: dict[int, list[Any]] = {}  # numbers, and bytes of everything with a length
        position = 0
        try:
            while position < len(content):
                position = self._take(content, position)
        except IndexError as error:
            raise WireError("a message is incomplete", position) from error

    def _take(self, content: bytes, position: int) -> int:
        """Reads the field at `position`; returns the position after it."""
        tag = content[position]
        at = position + 1
        if tag > 0x7F:
            tag, at = read_varint(content, position)
        wire = tag & 7
        if wire == VARINT:
            value: int | bytes = content[at]
            after = at + 1
            if content[at] > 0x7F:
                value, after = read_varint(content, at)
                value = value - 2**64 if value >= 2**63 else value
        elif wire == SPAN:
            length = content[at]
            first = at + 1
            if length > 0x7F:
                length, first = read_varint(content, at)
            after = first + length
            value = content[first:after]
        elif wire in {FIXED64, FIXED32}:
            after = at + (8 if wire == FIXED64 else 4)
            value = content[at:after]
        else:
            raise WireError(f"tag {tag} is invalid", position)
        if after > len(content):
            raise WireError("a field ends after the message that contains it", position)
        self._fields.setdefault(tag >> 3, []).append(value)
        return after

    def number(self, field: int) -> int:
        """The last number of a field, signed."""
        values = self._fields.get(field)
        if values is None:
            return 0
        if not isinstance(values[-1], int):
            raise WireError(f"field {field} has the wrong wire type", 0)
        return values[-1]

    def numbers(self, field: int) -> list[int]:
        """All numbers of a repeated field, packed or not, signed."""
        numbers: list[int] = []
        for value in self._fields.get(field, ()):
            numbers += [value] if isinstance(value, int) else _unpacked(value)
        return numbers

    def contents(self, field: int) -> list[bytes]:
        """The bytes of a repeated field of texts, bytes or messages."""
        values = self._fields.get(field, [])
        if any(isinstance(value, int) for value in values):
            raise WireError(f"field {field} has the wrong wire type", 0)
        return values

    def text(self, field: int) -> str:
        """The last text of a field; invalid UTF-8 becomes replacement characters."""
        contents = self.contents(field)
        return contents[-1].decode(errors="replace") if contents else ""

    def texts(self, field: int) -> list[str]:
        """All texts of a repeated field."""
        return [content.decode(errors="replace") for content in self.contents(field)]

    def message(self, field: int) -> "Proto":
        """The last message of a field."""
        contents = self.contents(field)
        return Proto(contents[-1]) if contents else _EMPTY

    def messages(self, field: int) -> list["Proto"]:
        """All messages of a repeated field."""
        return [Proto(content) for content in self.contents(field)]

    def has(self, field: int) -> bool:
        """Whether the field occurs."""
        return field in self._fields


def _unpacked(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        value, position = read_varint(content, position)
        yield value - 2**64 if value >= 2**63 else value


_EMPTY = Proto()
