"""Damaged versions of a file: bytes changed at random, and its structure changed on purpose."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence

from meshscope.reports.export.chakra import varint

Mutation = Callable[[random.Random, bytes], bytes]

MAX_BYTES = 1 << 20  # mutations may double a file again and again
TOKENS = (
    *(b"{", b"}", b"[", b"]", b"(", b")", b'"', b",", b"=", b"%", b"\\", b"\n", b"\x00", b"\xff"),
    *(b"NaN", b"Infinity", b"-1", b"0", b"1e309", b"9" * 400, b"null", b"true", b"\xef\xbf\xbd"),
)
NUMBERS = (0, 1, -1, 2**31, 2**53, 2**61, 2**63 - 1, -(2**63), 2**64, 10**30, 1.5, float("nan"))
VALUES = (*NUMBERS, float("inf"), -1e308, None, True, "", "x" * 5_000, "\ud800", [], {}, [[[[]]]])


def _at(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + rng.randbytes(rng.choice((1, 1, 1, 2, 8))) + data[at + 1 :]


def _insert_token(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _delete(rng: random.Random, data: bytes) -> bytes:
    at = _at(rng, data)
    return data[:at] + data[at + rng.choice((1, 2, 16, 1_000)) :]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    first, last = sorted((_at(rng, data), _at(rng, data)))
    return data[:last] + data[first:last] * rng.choice((1, 1, 20)) + data[last:]


def _swap(rng: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(_at(rng, data) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: _at(rng, data)]


def _as_text(_: random.Random, data: bytes) -> bytes:
    """What an editor writes that takes the bytes for UTF-8."""
    return data.decode(errors="replace").encode()


def _as_dos_text(_: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


BYTEWISE: tuple[Mutation, ...] = (
    *(_overwrite, _insert_token, _delete, _repeat, _swap, _truncate, _as_text, _as_dos_text),
)


def protobuf_field(rng: random.Random, data: bytes, depth: int = 0) -> bytes:
    """Changes a field of a protobuf message or of one inside it; lengths stay right."""
    fields = _fields(data)
    if not fields:
        return data
    index = rng.randrange(len(fields))
    tag, value = fields[index]
    if isinstance(value, bytes) and depth < 8 and rng.random() < 0.8:
        fields[index] = (tag, protobuf_field(rng, value, depth + 1))
    else:
        _change_field(rng, fields, index)
    return b"".join(_field(tag, value) for tag, value in fields)


def _change_field(rng: random.Random, fields: list[tuple[int, int | bytes]], index: int) -> None:
    tag, value = fields[index]
    match rng.randrange(5):
        case 0:
            del fields[index]
        case 1:
            fields[index:index] = [(tag, value)] * rng.choice((1, 3, 50))
        case 2:
            fields[index] = (rng.choice((tag + 8, tag ^ 2, rng.randrange(1, 128) * 8)), value)
        case 3:
            number = rng.choice(NUMBERS)
            changed = int(number) % 2**64 if number == number else 0  # noqa: PLR0124  not NaN
            fields[index] = (tag, rng.choice(TOKENS) if isinstance(value, bytes) else changed)
        case _:
            other = rng.randrange(len(fields))
            fields[index], fields[other] = fields[other], fields[index]


def _field(tag: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(tag & ~7 | 2) + varint(len(value)) + value
    return varint(tag & ~7) + varint(value)


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Varints and spans of a message by tag; empty if the bytes are none."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = _read(data, at)
        if tag & 7 == 0 and tag > 7:
            value, at = _read(data, at)
            fields.append((tag, value))
        elif tag & 7 == 2 and tag > 7:
            length, at = _read(data, at)
            fields.append((tag, data[at : at + length]))
            at += length
        elif tag & 7 == 1 and tag > 7:
            at += 8
        else:
            return []
    return fields if at == len(data) else []


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            break
    return value, at


def text_line(rng: random.Random, data: bytes) -> bytes:
    """Changes the lines of a text."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = _insert_token(rng, lines[at])
        case _:
            lines[at] = _delete(rng, lines[at])
    return b"\n".join(lines)


def json_value(rng: random.Random, data: bytes) -> bytes:
    """Changes a value of a JSON document, or adds one that is nested deeply."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):  # nested too deeply by an earlier mutation
        return data
    holders: list[tuple[object, object]] = []
    _collect(document, holders)
    if not holders:
        return data
    holder, key = rng.choice(holders)
    match rng.randrange(4):
        case 0:
            del holder[key]  # type: ignore[attr-defined]
        case 1 if isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice((1, 20)))  # type: ignore[call-overload]
        case 2:
            nested: object = 1
            for _ in range(rng.choice((10, 100, 400))):
                nested = [nested]
            holder[key] = nested  # type: ignore[index]
        case _:
            holder[key] = rng.choice(VALUES)  # type: ignore[index]
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _collect(value: object, holders: list[tuple[object, object]]) -> None:
    keys = range(len(value)) if isinstance(value, list) else ()
    for key in list(value) if isinstance(value, dict) else keys:
        holders.append((value, key))
        _collect(value[key], holders)  # type: ignore[index]


def gzipped(mutation: Mutation) -> Mutation:
    """The mutation of the content of a gzip file; of its bytes if they are damaged already."""

    def of_content(rng: random.Random, data: bytes) -> bytes:
        try:
            content = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return _overwrite(rng, data)
        return gzip.compress(mutation(rng, content), 1, mtime=0)

    return of_content


def damaged(
    seeds: Sequence[bytes], structural: Sequence[Mutation], rng: random.Random, n_mutations: int
) -> bytes:
    """One of the files with mutations, most of which keep the syntax if they can."""
    data = rng.choice(seeds)
    for _ in range(n_mutations):
        keeps_syntax = structural and rng.random() < 0.7
        data = rng.choice(structural if keeps_syntax else BYTEWISE)(rng, data)[:MAX_BYTES]
    return data
