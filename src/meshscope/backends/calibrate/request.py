"""What is asked of the child process that measures, and the files that pass between it and its parent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.errors import SpecError
from meshscope.spec.hardware.topology import Topology, parse_topology
from meshscope.spec.plan.plan import Plan, parse_plan

SMALLEST_BYTES = 4
STEP = 8  # each size is this many times the one before
USUAL_MAX_BYTES = 1 << 30
USUAL_MAX_BYTES_CPU = 1 << 24
REPORT = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Sizes from 4 B to `max_bytes`, each axis of the plan, each measured `repeats` times.

    After `budget_s` seconds no further size is begun.
    """

    topology: Topology
    plan: Plan
    max_bytes: int
    budget_s: float
    repeats: int

    def __post_init__(self) -> None:
        """The plan has an axis to talk over, and there are sizes."""
        if self.plan.mesh.n_devices != self.topology.n_devices:
            raise SpecError(
                f"plan '{self.plan}' is for {self.plan.mesh.n_devices} devices, '{self.topology.name}' has "
                f"{self.topology.n_devices}. Let -1 fill, as in tp=-1."
            )
        if self.topology.n_devices < 2:
            raise SpecError(f"'{self.topology.name}' is one device: there is nobody to talk to.")
        if self.max_bytes < SMALLEST_BYTES:
            raise SpecError(f"--max-bytes {self.max_bytes} is less than one element of 4 bytes.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Payloads to ask for: powers, and the largest."""
        sizes: list[int] = []
        size = SMALLEST_BYTES
        while size < self.max_bytes:
            sizes.append(size)
            size *= STEP
        return (*sizes, self.max_bytes)

    def as_dict(self) -> dict[str, Any]:
        """For the child."""
        return {
            "topology": self.topology.name,
            "plan": str(self.plan),
            "max_bytes": self.max_bytes,
            "budget_s": self.budget_s,
            "repeats": self.repeats,
        }


def request_from_dict(told: Mapping[str, Any]) -> CalibrationRequest:
    """The request that the parent wrote."""
    return CalibrationRequest(
        topology=parse_topology(told["topology"]),
        plan=parse_plan(told["plan"]),
        max_bytes=told["max_bytes"],
        budget_s=told["budget_s"],
        repeats=told["repeats"],
    )
