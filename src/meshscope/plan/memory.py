"""How much memory one device needs, against what it has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device; None is unknown.

    `total_bytes` holds everything that lives at the peak of a step; `fits` compares it with the HBM
    of one device.
    """

    weights_bytes: int
    kv_cache_bytes: int
    temp_bytes: int | None
    total_bytes: int | None
    hbm_bytes: int | None
    fits: bool | None
