"""Measurements that users contribute: timed collectives and steps of one run on a TPU, as a JSON file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import ParseError, SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Phase
from meshscope.files import read_json
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.interconnect.samples import KINDS, TimedCollective
from meshscope.plans.plan import parse_plan
from meshscope.serialize import from_plain, to_plain

SCHEMA = 1
FOLDER = Path("tools") / "contributed"  # in the repository


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributedPoint:
    """The mean seconds of one collective over a plan axis, as in `TimedCollective`."""

    axis: str
    kind: Kind
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributedStep:
    """The mean seconds of one step of a phase over `n_steps`, with the modeled ones at that time."""

    phase: Phase
    seconds: float
    n_steps: int
    predicted_s: float | None
    predicted_low_s: float | None
    predicted_high_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributedRun:
    """The conditions of a run, what was timed, and the faults of its capture that its author accepted."""

    name: str
    model: str | None
    topology: str
    plan: str
    batch: int | None
    prompt: int | None
    output: int | None
    frontend: str | None
    created: str
    versions: Mapping[str, str]
    points: tuple[ContributedPoint, ...]
    steps: tuple[ContributedStep, ...]
    findings: tuple[str, ...]

    def __post_init__(self) -> None:
        """SpecError for a slice without TPUs, or a point that no collective on it can have."""
        if self.slice.chip.kind is not ChipKind.TPU:
            raise SpecError(f"'{self.topology}' is no TPU slice.")
        mesh = parse_plan(self.plan).mesh
        if mesh.n_devices != self.slice.n_devices:
            raise SpecError(
                f"plan '{self.plan}' has {mesh.n_devices} devices, '{self.topology}' {self.slice.n_devices}."
            )
        for point in self.points:
            unknown = set(point.axis.split("+")) - set(mesh.names)
            if unknown:
                raise SpecError(f"plan '{self.plan}' has no axis '{min(unknown)}'.")
            if point.kind not in KINDS or point.payload_bytes <= 0 or not point.seconds > 0:
                raise SpecError(
                    f"a point of {point.kind} with {point.payload_bytes} B in {point.seconds} s is impossible."
                )

    @property
    def slice(self) -> Topology:
        """The slice it ran on."""
        return parse_topology(self.topology)

    def groups(self, point: ContributedPoint) -> Groups:
        """The groups of device ids of a point."""
        return parse_plan(self.plan).mesh.groups(*point.axis.split("+"))

    @property
    def timed(self) -> tuple[TimedCollective, ...]:
        """The points as those of a calibration."""
        return tuple(
            TimedCollective(
                axis=point.axis,
                groups=self.groups(point),
                kind=point.kind,
                payload_bytes=point.payload_bytes,
                seconds=point.seconds,
            )
            for point in self.points
        )


def contributed_text(run: ContributedRun) -> str:
    """The JSON file of the run."""
    document = {"schema": SCHEMA, **to_plain(run)}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_contributed(path: Path) -> ContributedRun:
    """The run in the file; ParseError for any other file."""
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ParseError(f"{path}: not a contributed run of schema {SCHEMA}.")
        return from_plain(ContributedRun, document)
    except (OSError, ValueError, SpecError) as error:
        raise ParseError(
            f"{path}: not a contributed run ({error}). Make it again with 'meshscope contribute'."
        ) from error
