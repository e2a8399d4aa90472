"""Streams the events of a JSON trace in typed batches, whatever the size of the file.

A file is an object with `traceEvents`, or an array of events. It is inflated and decoded piece by
piece: a piece ends between two events, which is checked by decoding it. Events that are not valid
JSON, or do not have the form of an event, are counted and left out. A file that ends too early
yields the events before its end.
"""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from meshscope.errors import TraceError

E = TypeVar("E")

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
_N_TRIES = 4


class JsonTrace(Generic[E]):
    """Batches of the events of one file, of the type `event`.

    After the iteration, `head` has the other top-level keys, `n_unreadable` counts the events that
    are no valid JSON or have another form, and `cut_off` says why the file ends too early.
    """

    def __init__(self, path: Path, event: type[E]) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.n_unreadable = 0
        self.cut_off: str | None = None
        self._one = msgspec.json.Decoder(event)
        self._many = msgspec.json.Decoder(list[event])
        self._is_array = False

    @property
    def findings(self) -> tuple[str, ...]:
        """That the file ends too early, if it does."""
        if self.cut_off is None:
            return ()
        return (f"truncated: {self.cut_off}; everything before that was read",)

    def __iter__(self) -> Iterator[list[E]]:
        """Yields the batches; TraceError if the file is no trace."""
        with self.path.open("rb") as file:
            pieces = _Pieces(self.path, file)
            buffer, is_end = self._opened(pieces), False
            while not is_end:
                batch, buffer, is_end = self._next(buffer, pieces)
                if batch:
                    yield batch
            self._read_tail(buffer, pieces)

    def _next(self, buffer: bytes, pieces: "_Pieces") -> tuple[list[E], bytes, bool]:
        """A batch, the bytes after it, and whether it is the last one."""
        batch: list[E] = []
        cut = _last_cut(buffer)
        if cut is not None:
            batch, n_read, is_end = self._decoded(buffer, cut)
            buffer = buffer[n_read:].lstrip(b" \t\r\n,")
            if is_end:
                return batch, buffer, True
        # A long event is read in doubling pieces, so that its bytes are copied a few times at most.
        piece = pieces.next(at_least=len(buffer))
        if piece is None:  # the end of a file whose array may lack its end
            last, n_read, is_end = self._one_by_one(buffer)
            rest = buffer[n_read:].strip(b" \t\r\n,")
            if not is_end and (not self._is_array or rest):
                self.cut_off = pieces.fault or "the file ends inside the list of events"
            return [*batch, *last], buffer[n_read:] if is_end else b"", True
        if len(buffer) > MAX_EVENT_BYTES:
            raise TraceError(
                f"{self.path}: an event is longer than {MAX_EVENT_BYTES >> 20} MiB. "
                "The file is no trace, or is damaged."
            )
        return batch, buffer + piece, False

    def _opened(self, pieces: "_Pieces") -> bytes:
        """Reads up to the first event; the bytes after the opening bracket."""
        buffer = b""
        while (piece := pieces.next(at_least=len(buffer))) is not None:
            buffer = (buffer + piece).removeprefix(_UTF8_BOM)
            if buffer.startswith(_UTF16_BOMS):
                raise TraceError(f"{self.path}: the text is UTF-16. Convert it to UTF-8.")
            start = buffer.lstrip()[:1]
            if start == b"[":
                self._is_array = True
                return buffer[buffer.index(b"[") + 1 :]
            if start not in {b"", b"{"} or len(buffer) > MAX_HEAD_BYTES:
                break
            for match in _EVENTS_KEY.finditer(buffer):
                head = _document(buffer[: match.end()] + b"]}")
                if head is not None:
                    self.head = {k: v for k, v in head.items() if k != "traceEvents"}
                    return buffer[match.end() :]
        why = f": {pieces.fault}" if pieces.fault else ""
        raise TraceError(
            f"{self.path}: has no 'traceEvents'{why}. Give a trace as the profiler exported it."
        )

    def _decoded(self, buffer: bytes, cut: int) -> tuple[list[E], int, bool]:
        """The events before the cut, the bytes read, and whether the array of events ended."""
        for _ in range(_N_TRIES):
            text = b"[" + buffer[:cut] + b"]"
            batch, end = self._whole(text)
            if batch is not None:
                return batch, end - 1 if end else cut, bool(end)
            batch, end = self._whole(_NOT_A_NUMBER.sub(b"null", text))
            if batch is not None and not end:
                return batch, cut, False
            earlier = _last_cut(buffer[:cut])
            if earlier is None or earlier == cut:
                break
            cut = earlier
        return self._one_by_one(buffer)

    def _whole(self, text: bytes) -> tuple[list[E] | None, int]:
        """All events of an array, and where it ended if text follows it; None if one is invalid."""
        end = 0
        try:
            return self._many.decode(text), end
        except FAULTS as error:
            if trailing := _TRAILING.search(str(error)):
                end = text.rindex(b"]", 0, int(trailing[1])) + 1
        try:
            return (self._many.decode(text[:end]), end) if end else (None, 0)
        except FAULTS:
            return None, 0

    def _one_by_one(self, buffer: bytes) -> tuple[list[E], int, bool]:
        """The valid events of a piece with an invalid one."""
        batch: list[E] = []
        depth = begin = n_read = 0
        for token in _TOKENS.finditer(buffer):
            mark = token[0]
            if mark in b"{[" and depth == 0:
                begin = token.start()
            if mark in b"{[":
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
            try:
                return [self._one.decode(variant)]
            except FAULTS:
                continue
        self.n_unreadable += 1
        return []

    def _read_tail(self, buffer: bytes, pieces: "_Pieces") -> None:
        """Adds the keys after the events to `head`."""
        while (piece := pieces.next(at_least=len(buffer))) is not None:
            buffer += piece
            if len(buffer) > MAX_HEAD_BYTES:
                return
        self.cut_off = self.cut_off or pieces.fault
        tail = buffer.strip().removeprefix(b",").strip()
        if self._is_array or tail in {b"", b"}"}:
            return
        document = _document(b"{" + tail)
        if document is None:
            self.cut_off = self.cut_off or "the file ends before the end of its JSON"
        self.head |= document or {}


class _Pieces:
    """The bytes of a file, inflated if it is gzipped; `fault` says why they end too early."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.fault: str | None = None
        self._is_at_end = False
        self._file = file
        start = self._file.read(2)
        self._file.seek(0)
        self._inflate = zlib.decompressobj(wbits=31) if start == _GZIP else None
        self._n_read = self._n_inflated = 0
        self._waiting = b""

    def next(self, *, at_least: int = 0) -> bytes | None:
        """The next piece of at most PIECE_BYTES or `at_least` bytes; None at the end."""
        n_left = max(PIECE_BYTES, at_least)
        pieces: list[bytes] = []
        while n_left > 0 and not self._is_at_end:
            piece = self._file.read(n_left) if self._inflate is None else self._inflated(n_left)
            pieces.append(piece)
            n_left -= len(piece)
            self._is_at_end = not piece
        return b"".join(pieces) or None

    def _inflated(self, n_bytes: int) -> bytes:
        while True:
            raw = self._waiting or self._file.read(1 << 20)
            self._n_read += 0 if self._waiting else len(raw)
            inflate = self._inflate
            assert inflate is not None
            if not raw:
                if not inflate.eof:
                    self.fault = "the gzip stream is truncated"
                return b""
            if inflate.eof:
                if not raw.startswith(_GZIP):
                    return b""
                inflate = self._inflate = zlib.decompressobj(wbits=31)
            try:
                piece = inflate.decompress(raw, n_bytes)
            except zlib.error:
                self.fault = "the gzip stream is damaged"
                return b""
            self._waiting = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            self._n_inflated += len(piece)
            if self._n_inflated > max(MIN_BOMB_BYTES, self._n_read * MAX_INFLATION):
                raise TraceError(
                    f"{self.path}: inflates to more than {MAX_INFLATION} times its size, which no trace "
                    "does. Inflate it yourself if you trust it, and give the plain file."
                )
            if piece:
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
