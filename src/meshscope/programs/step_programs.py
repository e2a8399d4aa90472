"""The programs of one step, as a front end hands them to the compiler, and the files of their HLO."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

from meshscope.events.enums import Phase

MODEL, SELECT, LOGITS, SAMPLE = "", "select", "logits", "sample"
STEP_PROGRAMS = (MODEL, SELECT, LOGITS, SAMPLE)  # a serving engine's, in order


def program_file(phase: Phase, name: str = "") -> str:
    """The HLO text of a phase's program; a step of several programs has a name for each."""
    return f"{phase}.{name}.hlo.txt.gz" if name else f"{phase}.hlo.txt.gz"


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
class StepPrograms:
    """The programs of one step by name, in their order, and the devices in the order of the mesh.

    `resident_bytes` are those of a device's weights and caches, which all programs share.
    """

    programs: Mapping[str, Any]
    devices: list[Any]
    resident_bytes: int | None = None


def local_bytes(arrays: Iterable[Any]) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(
        prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays
    )
