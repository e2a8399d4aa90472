"""The bytes of a profile: mapped or unpacked, within limits."""

import mmap
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshscope.readers.profile.faults import TraceError
from meshscope.readers.profile.wire import Bytes, Data

MAX_BYTES = (
    2**31
)  # no protobuf message is larger: https://protobuf.dev/programming-guides/proto-limits
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class ProfileBytes:
    """The bytes of a profile, for single values and for columns.

    `wanted` names the stats of events to keep; None keeps all.
    """

    data: Data
    view: Bytes
    wanted: Collection[str] | None

    def text(self, start: int, end: int) -> str:
        """The text in [start, end); bytes that are no UTF-8 are marked."""
        return self.data[start:end].decode(errors="replace")

    def release(self) -> None:
        """Gives mapped pages back to the system, which keeps the file in its cache for later."""
        if isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def read_bytes(path: Path, wanted: Collection[str] | None) -> ProfileBytes:
    """The profile at `path`; TraceError with the remedy where there is none."""
    try:
        data = _bytes_of(path)
    except (OSError, zlib.error, EOFError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}). Give the path of a file that ends in .xplane.pb or "
            ".xplane.pb.gz, as jax.profiler writes it; copy it again if it was copied."
        ) from error
    return ProfileBytes(data, np.frombuffer(data, np.uint8), wanted)


def _bytes_of(path: Path) -> Data:
    """The profile, mapped, so that its pages are the system's; a gzipped one is unpacked."""
    with path.open("rb") as file:
        head = file.read(2)
        n_bytes = file.seek(0, 2)
        if not n_bytes:
            raise EOFError("it is empty")
        check_limit(path, "bytes", n_bytes, MAX_BYTES)
        if head == GZIP_MAGIC:
            file.seek(0)
            return _unpacked(path, iter(lambda: file.read(1 << 20), b""))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _unpacked(path: Path, blocks: Iterator[bytes]) -> bytearray:
    """Unpacks with a limit, so that a small hostile file cannot fill the memory."""
    unpacked, stream = bytearray(), zlib.decompressobj(wbits=31)
    for block in blocks:
        rest = block
        while rest and not stream.eof:
            unpacked += stream.decompress(rest, 1 << 24)
            rest = stream.unconsumed_tail
            check_limit(path, "bytes, unpacked", len(unpacked), MAX_BYTES)
    if not stream.eof:
        raise EOFError("the gzip stream ends early")
    return unpacked


def check_limit(path: Path | str, what: str, n_found: int, n_allowed: int) -> None:
    """TraceError where there is more than is read."""
    if n_found > n_allowed:
        raise TraceError(
            f"{path}: has {n_found:,} {what}, more than the {n_allowed:,} that are read. "
            "Profile fewer steps, or fewer hosts in one file."
        )
