"""A protobuf message, read field by field."""

from collections import defaultdict
from typing import Any

from meshscope.readers.profile.wire import Message


def decoded(data: bytes) -> dict[int, list[Any]]:
    """Fields of a protobuf message by number: numbers, or the bytes of texts and messages."""
    read = Message(data, 0, len(data))
    numbers = {
        number: [int.from_bytes(v, "little") if isinstance(v, bytes) else v for v in values]
        for number, values in read.values.items()
    }
    by_number = defaultdict(list, numbers)
    for number in range(1, 100):
        for at in zip(*read.spans(number).chunk(), strict=True) if number not in by_number else ():
            by_number[number].append(data[at[0] : at[1]])
    return by_number
