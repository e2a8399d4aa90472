"""Bytes that an operation reads and writes, by memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTraffic:
    """Bytes moved, by memory; `hbm_written_bytes` are those of `hbm_bytes` that are written."""

    hbm_bytes: int = 0
    vmem_bytes: int = 0
    hbm_written_bytes: int = 0

    def __add__(self, other: "ArrayTraffic") -> "ArrayTraffic":
        return ArrayTraffic(
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            vmem_bytes=self.vmem_bytes + other.vmem_bytes,
            hbm_written_bytes=self.hbm_written_bytes + other.hbm_written_bytes,
        )

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM."""
        return self.hbm_bytes - self.hbm_written_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes in both memories."""
        return self.hbm_bytes + self.vmem_bytes


NO_TRAFFIC = ArrayTraffic()
