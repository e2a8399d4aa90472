"""The format of a file by its content, what a file of another kind is, and the traces of a folder."""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshscope.errors import TraceError
from meshscope.files import check_regular
from meshscope.readers.profile.wire import WireError, read_varint
from meshscope.readers.traces import names
from meshscope.readers.traces.trace import TraceFormat

HEAD_BYTES = 1 << 20
_SQLITE = b"SQLite format 3\0"
_UTF16_STARTS = (b"\xff\xfe{\0", b"\xff\xfe[\0", b"\xfe\xff\0{", b"\xfe\xff\0[")
_READ = "meshscope reads Kineto JSON of the PyTorch profiler, XPlane, and SQLite of nsys."
_UNPACK = "Unpack it, and give the files in it, or their folder."
_AS_HLO = "Give optimized HLO text, such as `jax.jit(f).lower(...).compile().as_text()` returns."
_CHAKRA = f"It has operators and no times of a device. {_READ}"
_XPLANES = (".xplane.pb", ".xplane.pb.gz")
_CHAKRA_NAME = re.compile(r"\.et(\.gz)?$")
_MLIR_BYTECODE = b"ML\xefR"
# Comments, aliases of attributes and types, and locations come before the module.
_MLIR = re.compile(
    rb"\s*(?://[^\n]*\n\s*|[#!][a-z_0-9]+ = [^\n]*\n\s*|#loc[^\n]*\n\s*)*module\b[^\n]*\{"
)
_TPU_MARKS = (
    b"/device:TPU:",
    b"/device:GPU:",
    b"highres-ticks",
    b"/device:CUSTOM:",
    b'"hlo_category"',
)


NO_TRACE = {None, TraceFormat.HLO, TraceFormat.STABLEHLO}


def format_of(path: Path) -> TraceFormat | None:
    """The format of the file; None if it has no format of traces. TraceError if it cannot be read."""
    head = _head(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    is_chakra = _CHAKRA_NAME.search(path.name) and not text.startswith((b"{", b"["))
    if is_chakra or head.startswith(_MLIR_BYTECODE) or _MLIR.match(head):
        return TraceFormat.CHAKRA if is_chakra else TraceFormat.STABLEHLO
    if _other(path, head) is not None:
        return None
    if head.startswith(_SQLITE):
        return TraceFormat.NSYS
    if text.startswith((b"{", b"[", *_UTF16_STARTS)):
        if b'"traceEvents"' not in head and (b"ttft_ms" in head or b'"ttfts"' in head):
            return TraceFormat.SERVING_BENCHMARK
        is_tpu = b'"schemaVersion"' not in head and any(mark in head for mark in _TPU_MARKS)
        return TraceFormat.CHROME_TPU if is_tpu else TraceFormat.KINETO
    # An XSpace starts with field 1 (planes), or 2 to 4 (messages), all with a length.
    is_message = head[:1] in {b"\x0a", b"\x12", b"\x1a", b"\x22"} and not head[1:9].isascii()
    is_message |= head[:1] == b"\x0a" and b"\0" in head[:4096]
    is_text = b"HloModule" in head[:4096] and not is_message
    # The reader of files of this name says what is wrong with them.
    is_xplane = is_message or path.name.endswith(_XPLANES)
    return TraceFormat.HLO if is_text else TraceFormat.XPLANE if is_xplane else None


def check_kind(path: Path) -> None:
    """TraceError with what the file is and what to give instead, if it is a known kind of another."""
    other = None
    if not path.is_dir() and format_of(path) not in {TraceFormat.STABLEHLO, TraceFormat.CHAKRA}:
        other = _other(path, _head(path))
    if other is not None:
        raise TraceError(f"{path}: this is {other[0]}. {other[1]}")


def _other(path: Path, head: bytes) -> tuple[str, str] | None:
    """What a file of another kind is, and what to do instead; None for traces, HLO, and the unknown."""
    if path.name.endswith(_XPLANES) and not _is_tar(head):
        return None
    return next(_others(path.name.removesuffix(".gz").lower(), head), None)


def _others(name: str, head: bytes) -> Iterator[tuple[str, str]]:
    text = head[:4096].lstrip()
    is_json = text[:1] in {b"{", b"["} and b'"traceEvents"' not in head
    known = names("files")
    for rows, is_of_kind in (
        (known["names"], lambda endings: name.endswith(tuple(endings))),
        (known["starts"], lambda start: head.startswith(start.encode("latin-1"))),
        (known["keys"], lambda key: is_json and key.encode() in text),
    ):
        for mark, what, remedy in rows:
            if is_of_kind(mark):
                yield what, remedy.format(read=_READ, unpack=_UNPACK, hlo=_AS_HLO, chakra=_CHAKRA)
    if _is_tar(head):
        yield "a tar archive", _UNPACK
    if re.match(rb"\x80[\x02-\x05]", head):
        yield "a pickle", f"Reading it would run its code. {_READ}"
    if _is_hlo_proto(head):
        yield (
            "a proto of an HLO module",
            _AS_HLO,
        )


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_hlo_proto(head: bytes) -> bool:
    """Whether field 1 is a module or its name; the field 1 of an XSpace is a plane, which starts with a number."""
    try:
        length, at = read_varint(head, 1)
    except WireError:
        return False
    inner = head[at : at + length]
    is_name = inner.isascii() and inner.decode("ascii").isprintable() and len(inner) == length
    is_named = is_name and inner and head[at + length : at + length + 1] == b"\x12"
    is_binary = re.search(rb"[\x00-\x08\x0e-\x1f]", head[:4096]) is not None
    return is_binary and head[:1] == b"\x0a" and (inner[:1] == b"\x0a" or bool(is_named))


def _head(path: Path) -> bytes:
    """The first bytes, inflated if the file is gzipped; empty if its gzip stream is damaged."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read: {error.strerror or error}. Give a profile or HLO text."
        ) from error
    try:
        is_packed = head.startswith(b"\x1f\x8b")
        return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES) if is_packed else head
    except zlib.error:
        return b""


MAX_FILES = 10_000
GROUPS = "comm_groups.json"  # process groups, which the reader of Chakra traces reads
MAX_NAMED = 4
# The profile folder that TensorBoard and XProf expect below a log folder.
_SESSIONS = "plugins/profile/*"


class TraceFolder(NamedTuple):
    """Traces with their formats, YAML files in the order of their names, and what was not read."""

    files: tuple[tuple[Path, TraceFormat], ...]
    cards: tuple[Path, ...]
    findings: tuple[str, ...]


def trace_folder(folder: Path) -> TraceFolder:
    """The traces at the top of the folder, else of its latest profile session.

    TraceError if there are none. An XPlane takes precedence over the Chrome trace exported from it.
    """
    others: list[str] = []
    for place in (folder, *sorted(folder.glob(_SESSIONS), reverse=True)):
        traces = _folder(place)
        if traces.files:
            return traces
        others += traces.findings
    unread = f" ({others[0]})" if others else ""
    raise TraceError(
        f"{folder}: contains no trace{unread}. Give a folder with *.json, *.json.gz, *.sqlite or *.xplane.pb."
    )


def _folder(folder: Path) -> TraceFolder:
    files: list[tuple[Path, TraceFormat]] = []
    cards, outside, other = list[Path](), list[str](), list[str]()
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    if len(paths) > MAX_FILES:
        raise TraceError(f"{folder}: has more than {MAX_FILES:,} files. Give the traces by name.")
    for path in (path for path in paths if not path.name.startswith((".", GROUPS))):
        if not path.resolve().is_relative_to(folder.resolve()):
            outside.append(path.name)
        elif path.suffix in {".yaml", ".yml"}:
            cards.append(path)
        elif (kind := format_of(path)) is not None and kind not in NO_TRACE:
            files.append((path, kind))
        else:
            known = _other(path, _head(path))
            other.append(f"{path.name} ({known[0]})" if known else path.name)
    if any(kind is TraceFormat.XPLANE for _, kind in files):
        files = [(path, kind) for path, kind in files if kind is not TraceFormat.CHROME_TPU]
    findings: list[str] = []
    for listed, what in ((outside, "links lead out of the folder"), (other, "files are no traces")):
        if listed:
            more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
            shown = ", ".join(listed[:MAX_NAMED]) + more
            findings.append(f"{len(listed):,} {what}, and were not read: {shown}")
    return TraceFolder(tuple(files), tuple(cards), tuple(findings))
