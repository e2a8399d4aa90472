"""The format of a file by its content, never by its name."""

import zlib
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.files import check_regular
from meshscope.readers.traces.trace import TraceFormat

HEAD_BYTES = 1 << 20
_SQLITE = b"SQLite format 3\0"
_UTF16_STARTS = (b"\xff\xfe{\0", b"\xff\xfe[\0", b"\xfe\xff\0{", b"\xfe\xff\0[")
_TPU_MARKS = (b"/device:TPU:", b"highres-ticks", b"/device:CUSTOM:", b'"hlo_category"')


def format_of(path: Path) -> TraceFormat | None:
    """The format of the file; None if it has no format of traces. TraceError if it cannot be read."""
    try:
        head = _head(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if head.startswith(_SQLITE):
        return TraceFormat.NSYS
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith((b"{", b"[", *_UTF16_STARTS)):
        return _json_format(head)
    if b"HloModule" in head[:4096] and not _is_protobuf(head):
        return TraceFormat.HLO
    is_named = path.name.endswith((".xplane.pb", ".xplane.pb.gz"))  # its reader says what is wrong
    return TraceFormat.XPLANE if is_named or _is_protobuf(head) else None


def _json_format(head: bytes) -> TraceFormat:
    if b'"traceEvents"' not in head and (b"ttft_ms" in head or b'"ttfts"' in head):
        return TraceFormat.SERVING_BENCHMARK
    is_tpu = any(mark in head for mark in _TPU_MARKS)
    return TraceFormat.CHROME_TPU if is_tpu else TraceFormat.KINETO


def _is_protobuf(head: bytes) -> bool:
    """Whether the file starts as an XSpace: field 1 (planes), or 2 to 4 (messages), all with a length."""
    return (head[:1] in {b"\x0a", b"\x12", b"\x1a", b"\x22"} and not head[1:9].isascii()) or (
        head[:1] == b"\x0a" and b"\0" in head[:4096]
    )


def _head(path: Path) -> bytes:
    """The first bytes, inflated if the file is gzipped; empty if its gzip stream is damaged."""
    check_regular(path)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except zlib.error:
        return b""
