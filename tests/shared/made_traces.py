"""What a Perfetto trace holds, read field by field."""

import struct
from collections import defaultdict
from pathlib import Path
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


def perfetto(path: Path) -> tuple[dict, list, dict]:
    """(parent and name of each track, slices (track, name, begin, end, flows), counter samples).

    Slices of a track nest: each ends before the one around it.
    """
    names, tracks, slices, counters = {}, {}, [], {}
    opened: dict[int, list[tuple]] = defaultdict(list)
    for packet in decoded(path.read_bytes())[1]:
        fields = decoded(packet)
        assert fields[10] == [1]  # one sequence, whose packets share names
        for interned in fields[12]:
            entry = decoded(decoded(interned)[2][0])
            names[entry[1][0]] = entry[2][0].decode()
        for descriptor in map(decoded, fields[60]):
            name = descriptor[2] or decoded(descriptor[3][0])[6]
            tracks[descriptor[1][0]] = ((descriptor[5] or [0])[0], name[0].decode())
        for event in map(decoded, fields[11]):
            (track,), (kind,), (time,) = event[11], event[9], fields[8]
            if kind == 1:
                assert not opened[track] or time >= opened[track][-1][1]
                opened[track].append((names[event[10][0]], time, event[47]))
            elif kind == 2:
                name, begin, flows = opened[track].pop()
                slices.append((track, name, begin, time, flows))
            else:
                value = struct.unpack("<d", event[44][0].to_bytes(8, "little"))[0]
                counters.setdefault(tracks[track][1], []).append((time, value))
    assert not any(opened.values())
    return tracks, slices, counters
