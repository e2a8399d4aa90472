"""What a run measured on a TPU says about collectives and steps, as the JSON file that users contribute."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshscope.analysis.request import request_latency
from meshscope.analysis.samples import KINDS, TimedCollective
from meshscope.errors import ParseError, RunError, SpecError
from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import REQUEST_PHASES, Kind, Phase, Source
from meshscope.events.measured import Measured
from meshscope.files import read_json
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect import collective_lines, geometry_of
from meshscope.hardware.interconnect.constants import spec_constants
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import parse_plan
from meshscope.serialize import from_plain, to_plain
from meshscope.store.folder import safe_name
from meshscope.store.run import RunRecord

SCHEMA = 1
FOLDER = Path("tools") / "contributed"  # in the repository
_MIN_STEPS = 3  # profiled, so that one disturbed step shows
_ABOVE_PEAK = 1.05  # rates up to this times the published peak are taken for rounding


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
            if unknown := set(point.axis.split("+")) - set(mesh.names):
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
        """The points as calibration points."""
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


def captured_run(record: RunRecord) -> tuple[ContributedRun, dict[str, int]]:
    """The conditions and times of a run, without paths or words of its command, and rows without a point by reason.

    RunError if none is from a TPU slice.
    """
    experiment, measured = record.manifest.experiment, record.measured
    manifest, source, topology = record.manifest, record.manifest.source, experiment.topology
    if source is not Source.MEASURED or measured is None:
        raise RunError(
            f"'{record.path}' is {source}. Only a measured run says how fast a chip is: make one with "
            "'meshscope run', or import a profile."
        )
    if topology is None or topology.chip.kind is not ChipKind.TPU:
        name = "an unknown machine" if topology is None else f"'{topology.name}'"
        raise RunError(f"'{record.path}' was measured on {name}. Contribute a run on a TPU slice.")
    if experiment.plan is None:
        raise RunError(
            f"'{record.path}' has no plan, so the groups of its collectives are unknown. "
            "Import the profile again with --plan."
        )
    reasons: Counter[str] = Counter()
    timed: dict[tuple[object, ...], list[ContributedPoint]] = {}
    for row in record.rows_of(Source.MEASURED):
        point = _point(row, experiment.device_mesh, topology, measured)
        if isinstance(point, str):
            reasons[point] += 1
        else:
            timed.setdefault((point.axis, point.kind, point.payload_bytes), []).append(point)
    workload, program, model = experiment.workload, experiment.program, experiment.model_name
    parts = (model or "program", topology.name, str(experiment.plan), manifest.created[:10])
    try:
        run = ContributedRun(
            name=safe_name("-".join(part.rpartition("/")[2] for part in parts)),
            model=model,
            topology=topology.name,
            plan=str(experiment.plan),
            batch=None if workload is None else workload.batch,
            prompt=None if workload is None else workload.prompt,
            output=None if workload is None else workload.output,
            frontend=None if program is None else program.frontend.value,
            created=manifest.created,
            versions=dict(manifest.versions),
            points=tuple(map(_middle, timed.values())),
            steps=tuple(_steps(record, measured)),
            findings=(*measured.findings, *_faults(record, topology, measured)),
        )
    except SpecError as error:
        raise RunError(f"'{record.path}': {error} Remeasure the run.") from error
    return run, dict(sorted(reasons.items()))


def _faults(record: RunRecord, topology: Topology, measured: Measured) -> Iterator[str]:
    """What the profile itself does not report."""
    for phase, n_steps in measured.n_profiled_steps.items():
        if n_steps < _MIN_STEPS:
            yield f"{n_steps} profiled steps of {phase}, fewer than {_MIN_STEPS}"
    devices = {load.device for load in measured.loads}
    if devices and len(devices) < topology.n_devices:
        yield f"{len(devices)} of {topology.n_devices} devices in the profile"
    if "libtpu" not in record.manifest.versions:
        yield "no version of libtpu"


def _point(  # noqa: PLR0911  one return for each reason
    row: Collective, mesh: Mesh, topology: Topology, measured: Measured
) -> ContributedPoint | str:
    """The timed collective of a row, or the reason why it has no usable time."""
    if row.kind not in KINDS:
        return f"{row.kind} has no model to fit"
    if row.axis is None:
        return "unknown axis"
    if not row.payload_bytes:
        return "unknown payload"
    if row.is_async:
        return "asynchronous, so its time includes what hides it"
    if row.dur_s is None or not row.dur_s > 0:
        return "no duration"
    groups = mesh.groups(*row.axis.split("+"))
    if {*map(frozenset, groups)} != {*map(frozenset, row.groups)}:
        return "groups of a part of the axis"  # such as one pipeline stage
    # The fastest participant does not wait, if the profile has it for this row alone.
    key = (row.phase, row.part, row.kind, row.axis)
    same = [t.wire_s for t in measured.times if (t.phase, t.part, t.kind, t.axis) == key]
    seconds = min(row.dur_s, same[0]) if len(same) == 1 and same[0] else row.dur_s
    geometry, peaks = geometry_of(topology, row.groups), spec_constants(topology.chip)
    lines = collective_lines(row.kind, geometry, peaks)
    least_s = min((line.s_per_byte for line in lines), default=0.0) * row.payload_bytes
    if least_s > seconds * _ABOVE_PEAK:
        return "faster than the published peak allows"
    size = row.payload_bytes
    return ContributedPoint(axis=row.axis, kind=row.kind, payload_bytes=size, seconds=seconds)


def _middle(points: list[ContributedPoint]) -> ContributedPoint:
    middle_s = median(point.seconds for point in points)
    return min(points, key=lambda point: abs(point.seconds - middle_s))


def _steps(record: RunRecord, measured: Measured) -> Iterator[ContributedStep]:
    latency = request_latency(record)
    timed = {} if latency is None else latency.step_s
    n_steps = {
        Phase.PREFILL: len(measured.requests),
        Phase.DECODE: sum(len(request.decode_s) for request in measured.requests),
    }
    predicted = {time.phase: time.step for time in record.times_of(Source.PREDICTED)}
    for phase in REQUEST_PHASES:
        if timed.get(phase, 0.0) > 0:
            step = predicted.get(phase)
            yield ContributedStep(
                phase=phase,
                seconds=timed[phase],
                n_steps=n_steps[phase],
                predicted_s=None if step is None else step.value_s,
                predicted_low_s=None if step is None else step.low_s,
                predicted_high_s=None if step is None else step.high_s,
            )
