"""The shares of its peaks that a chip reaches in one part of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the peaks that a part reaches, and cycles that it takes each time it runs, however small.

    `vector` is of the matrix units' peak; `matvec` stands for `weight` where a device has a single
    token, which the vector units multiply. A share below the HBM's own tells that arrays are read
    several times, or laid out anew. `tile_cycles` are those in which the vector unit moves a tile.
    """

    matmul: float
    vector: float
    weight: float
    matvec: float
    cache: float
    act: float
    wide: float
    tile_cycles: float = 0.0
    run_cycles: float = 0.0
