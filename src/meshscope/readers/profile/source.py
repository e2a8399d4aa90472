"""Opens a profile: maps a plain file, unpacks a gzipped one, enforces size limits."""

import mmap
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshscope.errors import TraceError
from meshscope.readers.profile.wire import Bytes, Data, Message

# The largest protobuf message: https://protobuf.dev/programming-guides/proto-limits
MAX_BYTES = 2**31
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class ProfileBytes:
    """The bytes of a profile, and a NumPy view of them.

    `wanted` lists the stats of events to keep; None keeps all.
    """

    data: Data
    view: Bytes
    wanted: Collection[str] | None

    def text(self, start: int, end: int) -> str:
        """The text in [start, end); invalid UTF-8 becomes replacement characters."""
        return self.data[start:end].decode(errors="replace")

    def last_text(self, message: Message, number: int) -> str:
        """The last text of a field; empty if it is missing."""
        starts, ends = message.spans(number).chunk(-1, None)
        return self.text(int(starts[0]), int(ends[0])) if len(starts) else ""

    def release(self) -> None:
        """Drops mapped pages from this process; the operating system may keep them cached."""
        if isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def read_bytes(path: Path, wanted: Collection[str] | None) -> ProfileBytes:
    """Opens the profile at `path`; TraceError if it cannot be read."""
    try:
        data = _bytes_of(path)
    except (OSError, zlib.error, EOFError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}). Give the path of a file that ends in .xplane.pb or "
            ".xplane.pb.gz, as jax.profiler writes it; copy it again if it was copied."
        ) from error
    return ProfileBytes(data, np.frombuffer(data, np.uint8), wanted)


def _bytes_of(path: Path) -> Data:
    """Maps the file into memory; unpacks it if it is gzipped."""
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
    """Unpacks up to a limit, so that a small hostile file cannot fill the memory."""
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


def check_limit(path: Path | str, unit: str, n: int, limit: int) -> None:
    """TraceError if a count in the profile exceeds its limit."""
    if n > limit:
        raise TraceError(
            f"{path}: has {n:,} {unit}, more than the limit of {limit:,}. "
            "Profile fewer steps, or fewer hosts in one file."
        )
