"""Streams the events of a JSON trace in typed batches, whatever the size of the file.

A file is an object with `traceEvents`, or an array of events. It is inflated and decoded piece by
piece: a piece ends between two events, which is checked by decoding it. Events that are not valid
JSON, or do not have the form of an event, are counted and left out. A file that ends too early
yields the events before its end.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from meshscope.errors import TraceError

E = TypeVar("E")
A = TypeVar("A")

PIECE_BYTES = 256 << 10  # a batch of events that fits into the cache of a core
MAX_HEAD_BYTES = 64 << 20
MAX_EVENT_BYTES = 64 << 20
# Traces inflate 10 to 30 times. Deflate cannot exceed 1032; a file near that has no events.
MAX_INFLATION = 300
MIN_BOMB_BYTES = 256 << 20
# What msgspec raises for invalid JSON or UTF-8, another form, or too deep nesting.
FAULTS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_GZIP = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_NOT_A_NUMBER = re.compile(rb"(?<=[:,\[])\s*-?(?:NaN|nan|Infinity|inf)(?=\s*[,}\]])")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_SPACE = b" \t\r\n,"
_N_TRIES = 4


Scalar = int | str | float | None


class TraceEvent(msgspec.Struct, Generic[A], gc=False):
    """An event of any kind, with arguments of this type."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Scalar = None
    tid: Scalar = None
    ts: float | None = None
    dur: float | None = None
    args: A | None = None


class JsonTrace(Generic[E]):
    """Batches of the events of one file, of the type `event`.

    After the iteration, `head` has the other top-level keys, `n_unreadable` counts the events that
    are no valid JSON or have another form, `cut_off` says why the file ends too early, and `has_long_tail` whether
    the keys after the events exceed MAX_HEAD_BYTES and were not read.
    """

    def __init__(self, path: Path, event: type[E]) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.n_unreadable = 0
        self.cut_off: str | None = None
        self.has_long_tail = False
        self._one = msgspec.json.Decoder(event, strict=False)  # numbers may be text
        self._many = msgspec.json.Decoder(list[event], strict=False)

    @property
    def findings(self) -> tuple[str, ...]:
        """That the file ends too early, or that its end was not read."""
        cut_off = self.cut_off
        truncated = f"truncated: {cut_off}; everything before that was read"
        long_tail = (
            f"the metadata after the events is longer than {MAX_HEAD_BYTES >> 20} MiB and was not read: its process "
            "groups and ranks are missing"
        )
        return (*([truncated] if cut_off else []), *([long_tail] if self.has_long_tail else []))

    def __iter__(self) -> Iterator[list[E]]:
        """Yields the batches; TraceError if the file is no trace."""
        with self.path.open("rb") as file:
            pieces = _Pieces(self.path, file)
            buffer, is_array = self._opened(pieces)
            while True:
                if (cut := _last_cut(buffer)) is not None:
                    batch, n_read, is_end = self._decoded(buffer, cut)
                    buffer = buffer[n_read:].lstrip(_SPACE)
                    yield batch
                    if is_end:
                        break
                # A long event is read in doubling pieces: its bytes are copied a few times at most.
                if (piece := pieces.next(at_least=len(buffer))) is None:
                    batch, n_read, is_end = self._one_by_one(buffer)
                    if not is_end and (not is_array or buffer[n_read:].strip(_SPACE)):
                        self.cut_off = pieces.fault or "the file ends inside the list of events"
                    buffer = buffer[n_read:] if is_end else b""
                    yield batch
                    break
                if len(buffer) > MAX_EVENT_BYTES:
                    batch, n_read, is_end = self._one_by_one(buffer)  # or what follows the events
                    if not is_end:
                        raise TraceError(
                            f"{self.path}: an event is longer than {MAX_EVENT_BYTES >> 20} MiB. "
                            "The file is no trace, or is damaged."
                        )
                    buffer = buffer[n_read:]
                    yield batch
                    break
                buffer += piece
            self._read_tail(buffer, pieces, is_array=is_array)

    def _opened(self, pieces: "_Pieces") -> tuple[bytes, bool]:
        """The bytes after the bracket that opens the events, and whether the file is an array."""
        buffer = b""
        while (piece := pieces.next(at_least=len(buffer))) is not None:
            buffer = (buffer + piece).removeprefix(_UTF8_BOM)
            if buffer.startswith(_UTF16_BOMS):
                raise TraceError(f"{self.path}: the text is UTF-16. Convert it to UTF-8.")
            start = buffer.lstrip()[:1]
            if start == b"[":
                return buffer[buffer.index(b"[") + 1 :], True
            if start not in {b"", b"{"}:
                break
            for match in _EVENTS_KEY.finditer(buffer):
                head = _document(buffer[: match.end()] + b"]}")
                if head is not None:
                    self.head = {k: v for k, v in head.items() if k != "traceEvents"}
                    return buffer[match.end() :], False
            if len(buffer) > MAX_HEAD_BYTES:
                raise TraceError(
                    f"{self.path}: {len(buffer):,} bytes of metadata, and no 'traceEvents' yet; up to "
                    f"{MAX_HEAD_BYTES >> 20} MiB are read before the first event. Remove the large keys, such as with "
                    "jq '{traceEvents}'."
                )
        why = f": {pieces.fault}" if pieces.fault else ""
        raise TraceError(
            f"{self.path}: has no 'traceEvents'{why}. Give a trace as the profiler exported it."
        )

    def _decoded(self, buffer: bytes, cut: int) -> tuple[list[E], int, bool]:
        """The events before the cut, the bytes read, and whether the array of events ended."""
        for _ in range(_N_TRIES):
            text = b"[" + buffer[:cut] + b"]"
            for variant in (text, _NOT_A_NUMBER.sub(b"null", text)):
                with suppress(*FAULTS):
                    return self._many.decode(variant), cut, False
            try:
                self._many.decode(text)
            except FAULTS as error:
                if trailing := _TRAILING.search(str(error)):
                    end = text.rindex(b"]", 0, int(trailing[1])) + 1
                    with suppress(*FAULTS):
                        return self._many.decode(text[:end]), end - 1, True
            earlier = _last_cut(buffer[:cut])
            if earlier is None or earlier == cut:
                break
            cut = earlier
        return self._one_by_one(buffer)

    def _one_by_one(self, buffer: bytes) -> tuple[list[E], int, bool]:
        """The valid events of a piece with an invalid one, the bytes read, and whether they ended."""
        batch: list[E] = []
        depth = begin = n_read = 0
        for token in _TOKENS.finditer(buffer):
            mark = token[0]
            if mark in b"{[":
                begin = begin if depth else token.start()
                depth += 1
            elif mark in b"}]":
                depth -= 1
                if depth < 0:
                    return batch, token.end(), True
                if depth == 0:
                    n_read = token.end()
                    batch += self._repaired(buffer[begin:n_read])
        return batch, n_read, False

    def _repaired(self, text: bytes) -> list[E]:
        """The event in the text, without invalid numbers and characters; counted if it is no event."""
        as_text = text.decode("utf-8", errors="replace").encode()
        for variant in (text, _NOT_A_NUMBER.sub(b"null", text), as_text):
            with suppress(*FAULTS):
                return [self._one.decode(variant)]
        self.n_unreadable += 1
        return []

    def _read_tail(self, buffer: bytes, pieces: "_Pieces", *, is_array: bool) -> None:
        while len(buffer) <= MAX_HEAD_BYTES:
            if (piece := pieces.next(at_least=len(buffer))) is None:
                break
            buffer += piece
        else:
            self.has_long_tail = True
            return
        self.cut_off = self.cut_off or pieces.fault
        tail = buffer.strip().removeprefix(b",").strip()
        if not is_array and tail not in {b"", b"}"}:
            document = _document(b"{" + tail)
            if document is None:
                self.cut_off = self.cut_off or "the file ends before the end of its JSON"
            self.head |= document or {}


class _Pieces:
    """The bytes of a file, inflated if it is gzipped; `fault` says why they end too early."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.fault: str | None = None
        self._file = file
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        self._stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        self._n_inflated = 0

    def next(self, *, at_least: int = 0) -> bytes | None:
        """The next piece of at most PIECE_BYTES or `at_least` bytes; None at the end."""
        pieces, n_left = list[bytes](), max(PIECE_BYTES, at_least)
        while n_left and (piece := self._read(n_left)):
            pieces.append(piece)
            n_left -= len(piece)
        return b"".join(pieces) or None

    def _read(self, n_bytes: int) -> bytes:
        try:
            piece: bytes = b"" if self.fault else self._stream.read1(n_bytes)
        except EOFError:
            self.fault = "the gzip stream is truncated"
            return b""
        except (zlib.error, gzip.BadGzipFile) as error:
            if "Not a gzipped file" in str(error):
                self._stream = BytesIO()  # without what follows the stream, as gzip
            else:
                self.fault = "the gzip stream is damaged"
            return b""
        self._n_inflated += len(piece)
        if self._n_inflated > max(MIN_BOMB_BYTES, self._file.tell() * MAX_INFLATION):
            raise TraceError(
                f"{self.path}: inflates to more than {MAX_INFLATION} times its size, which no trace "
                "does. Inflate it yourself if you trust it, and give the plain file."
            )
        return piece


def _last_cut(buffer: bytes) -> int | None:
    """The end of the last object that another one follows; it may still be inside of an event."""
    window = 1 << 16
    while True:
        start = max(0, len(buffer) - window)
        last = None
        for match in _BETWEEN.finditer(buffer, start):
            last = match
        if last is not None:
            return last.start() + 1
        if start == 0:
            return None
        window *= 8


def _document(text: bytes) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(_NOT_A_NUMBER.sub(b"null", text))
    except FAULTS:
        return None
    return document if isinstance(document, dict) else None
