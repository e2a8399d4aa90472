"""The request to the measuring worker process: topology, plan, sizes and budget."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.plan import Plan, parse_plan
from meshscope.serialize import picked
from meshscope.units import DTYPE_BITS

SMALLEST_BYTES = 4
STEP = 8  # ratio of consecutive sizes
USUAL_MAX_BYTES = 1 << 30
USUAL_MAX_BYTES_CPU = 1 << 24
REPORT = "report.json"
_COUNTS = ("max_bytes", "budget_s", "repeats")  # stored as they are


# Rows from a decode step of one sequence to a prompt of 8,192 tokens, with the matrices of Qwen3-8B's
# attention and MLP.
PRODUCT_ROWS = (1, 8, 64, 256, 1024, 4096, 8192)
PRODUCT_ROWS_8_BIT = (1, 8, 64)
PRODUCT_SIZES = ((4096, 4096), (4096, 12288), (12288, 4096))
CPU_PRODUCT_ROWS = (1, 16, 256)
CPU_PRODUCT_SIZES = (512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """[rows, depth] of `dtype` times [depth, columns] of `weight_dtype`; the product has `dtype`."""

    rows: int
    depth: int
    columns: int
    dtype: str
    weight_dtype: str

    @property
    def flops(self) -> float:
        """Two for each element that is multiplied and added."""
        return 2.0 * self.rows * self.depth * self.columns

    @property
    def n_bytes(self) -> float:
        """Both operands read once and the product written once."""
        wide, weight = (DTYPE_BITS[dtype] / 8 for dtype in (self.dtype, self.weight_dtype))
        return wide * self.rows * (self.depth + self.columns) + weight * self.depth * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Sizes from 4 B to `max_bytes` on each axis of the plan, each measured `repeats` times.

    No measurement starts after `budget_s` seconds.
    """

    topology: Topology
    plan: Plan
    max_bytes: int
    budget_s: float
    repeats: int

    def __post_init__(self) -> None:
        """Checks that the plan fits the topology and that --max-bytes allows a payload."""
        if self.plan.mesh.n_devices != self.topology.n_devices:
            raise SpecError(
                f"plan '{self.plan}' is for {self.plan.mesh.n_devices} devices, but "
                f"'{self.topology.name}' has {self.topology.n_devices}. Use -1 to fill, as in tp=-1."
            )
        if self.max_bytes < SMALLEST_BYTES:
            raise SpecError(
                f"--max-bytes {self.max_bytes} is less than one element. Use 4 or more."
            )

    @property
    def product_shapes(self) -> tuple["ProductShape", ...]:
        """The products that one device times: few rows as in decode, many as in prefill."""
        if self.topology.chip.kind is ChipKind.CPU:
            return tuple(
                ProductShape(rows=rows, depth=n, columns=n, dtype="f32", weight_dtype="f32")
                for n in CPU_PRODUCT_SIZES
                for rows in CPU_PRODUCT_ROWS
            )
        square = ProductShape(
            rows=8192, depth=8192, columns=8192, dtype="bf16", weight_dtype="bf16"
        )
        weights = [(rows, "bf16") for rows in PRODUCT_ROWS]
        weights += [(rows, "f8e4m3fn") for rows in PRODUCT_ROWS_8_BIT]
        shapes = (
            ProductShape(
                rows=rows, depth=depth, columns=columns, dtype="bf16", weight_dtype=weight_dtype
            )
            for rows, weight_dtype in weights
            for depth, columns in PRODUCT_SIZES
        )
        return (*shapes, square)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Target payloads in bytes: powers of STEP, and the largest."""
        sizes: list[int] = []
        size = SMALLEST_BYTES
        while size < self.max_bytes:
            sizes.append(size)
            size *= STEP
        return (*sizes, self.max_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The request as JSON for the worker."""
        return {
            "topology": self.topology.name,
            "plan": str(self.plan),
            **picked(self, *_COUNTS),
        }


def request_from_dict(document: Mapping[str, Any]) -> CalibrationRequest:
    """Reads the request that the parent wrote."""
    return CalibrationRequest(
        topology=parse_topology(document["topology"]),
        plan=parse_plan(document["plan"]),
        **{name: document[name] for name in _COUNTS},
    )
