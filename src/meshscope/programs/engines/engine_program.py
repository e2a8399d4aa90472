"""The programs of one step of a serving engine, as its front end hands them to the compiler."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgram:
    """A jitted function of the engine and its abstract arguments.

    It is traced under `mesh`, or under none, as the engine calls it.
    """

    function: Any
    arguments: tuple[Any, ...]
    mesh: Any | None

    def lower(self) -> Any:
        """Lowers the function to StableHLO."""
        import jax  # noqa: PLC0415  the engine's, in its environment

        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            return self.function.lower(*self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """The programs of one step by name, in their order, and the devices in the order of the mesh.

    `resident_bytes` are those of a device's weights and caches, which all programs share.
    """

    programs: Mapping[str, EngineProgram]
    devices: list[Any]
    resident_bytes: int | None = None


def local_bytes(arrays: Iterable[Any]) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(
        prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays
    )
