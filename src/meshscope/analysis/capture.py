"""What a measured run says about collectives and steps, and the reasons not to trust it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from meshscope.analysis.request import request_latency
from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Phase, Source
from meshscope.events.measured import Measured
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.constants import spec_constants
from meshscope.interconnect.contributed import ContributedPoint, ContributedStep
from meshscope.interconnect.geometry import geometry_of
from meshscope.interconnect.lines import collective_lines
from meshscope.interconnect.samples import KINDS
from meshscope.plans.mesh import Mesh
from meshscope.store.run import RunRecord

MIN_STEPS = 3  # profiled, so that one disturbed step shows
ABOVE_PEAK = 1.05  # rates up to this times the published peak are taken for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The usable points and steps of a measured run; `left_out` counts the rows without one, by reason."""

    topology: Topology
    points: tuple[ContributedPoint, ...]
    steps: tuple[ContributedStep, ...]
    findings: tuple[str, ...]
    left_out: tuple[tuple[str, int], ...]


def capture_of(record: RunRecord) -> Capture:
    """The measurements of a run; RunError if it holds none of a TPU slice."""
    topology, mesh, measured = _measured_on_tpu(record)
    reasons: Counter[str] = Counter()
    timed: dict[tuple[object, ...], list[ContributedPoint]] = {}
    for row in record.rows_of(Source.MEASURED):
        point = _point(row, mesh, topology, measured, reasons)
        if point is not None:
            timed.setdefault((point.axis, point.kind, point.payload_bytes), []).append(point)
    return Capture(
        topology=topology,
        points=tuple(_middle(points) for points in timed.values()),
        steps=tuple(_steps(record, measured)),
        findings=(*measured.findings, *_faults(record, topology, measured)),
        left_out=tuple(sorted(reasons.items())),
    )


def _measured_on_tpu(record: RunRecord) -> tuple[Topology, Mesh, Measured]:
    source, topology = record.manifest.source, record.manifest.experiment.topology
    if source is not Source.MEASURED or record.measured is None:
        raise RunError(
            f"'{record.path}' is {source}. Only a measured run says how fast a chip is: make one with "
            "'meshscope run', or import a profile."
        )
    if topology is None or topology.chip.kind is not ChipKind.TPU:
        name = "an unknown machine" if topology is None else f"'{topology.name}'"
        raise RunError(f"'{record.path}' was measured on {name}. Contribute a run on a TPU slice.")
    experiment = record.manifest.experiment
    if experiment.plan is None:
        raise RunError(
            f"'{record.path}' has no plan, so the groups of its collectives are unknown. "
            "Import the profile again with --plan."
        )
    return topology, experiment.device_mesh, record.measured


def _faults(record: RunRecord, topology: Topology, measured: Measured) -> Iterator[str]:
    """What the profile itself does not report."""
    for phase, n_steps in measured.n_profiled_steps.items():
        if n_steps < MIN_STEPS:
            yield f"{n_steps} profiled steps of {phase}, fewer than {MIN_STEPS}"
    devices = {load.device for load in measured.loads}
    if devices and len(devices) < topology.n_devices:
        yield f"{len(devices)} of {topology.n_devices} devices in the profile"
    if "libtpu" not in record.manifest.versions:
        yield "no version of libtpu"


def _point(
    row: Collective, mesh: Mesh, topology: Topology, measured: Measured, reasons: Counter[str]
) -> ContributedPoint | None:
    """The timed collective of a row; None, with the reason counted, if it has no usable time."""
    reason = _unusable(row) or _other_groups(row, mesh)
    if reason is None:
        assert row.axis is not None
        assert row.payload_bytes is not None
        point = ContributedPoint(
            axis=row.axis,
            kind=row.kind,
            payload_bytes=row.payload_bytes,
            seconds=_seconds(row, measured),
        )
        if not _exceeds_peak(point, row, topology):
            return point
        reason = "faster than the published peak allows"
    reasons[reason] += 1
    return None


def _unusable(row: Collective) -> str | None:
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
    return None


def _other_groups(row: Collective, mesh: Mesh) -> str | None:
    """The reason to leave out a row of a part of its axis, such as one pipeline stage."""
    assert row.axis is not None
    groups = mesh.groups(*row.axis.split("+"))
    same = {frozenset(group) for group in groups} == {frozenset(group) for group in row.groups}
    return None if same else "groups of a part of the axis"


def _seconds(row: Collective, measured: Measured) -> float:
    """The time of the fastest participant, which does not wait, if the profile has it for this row alone."""
    assert row.dur_s is not None
    key = (row.phase, row.part, row.kind, row.axis)
    same = [t for t in measured.times if (t.phase, t.part, t.kind, t.axis) == key]
    if len(same) == 1 and same[0].wire_s is not None and same[0].wire_s > 0:
        return min(row.dur_s, same[0].wire_s)
    return row.dur_s


def _exceeds_peak(point: ContributedPoint, row: Collective, topology: Topology) -> bool:
    """Whether the bytes would take longer on links at the published peak."""
    lines = collective_lines(
        point.kind, geometry_of(topology, row.groups), spec_constants(topology.chip)
    )
    least_s = min((line.s_per_byte for line in lines), default=0.0) * point.payload_bytes
    return least_s > point.seconds * ABOVE_PEAK


def _middle(points: list[ContributedPoint]) -> ContributedPoint:
    """The point with the median time."""
    middle_s = median(point.seconds for point in points)
    return min(points, key=lambda point: abs(point.seconds - middle_s))


def _steps(record: RunRecord, measured: Measured) -> Iterator[ContributedStep]:
    latency = request_latency(record)
    timed = {} if latency is None else latency.step_s
    n_steps: dict[Phase, int] = {
        Phase.PREFILL: len(measured.requests),
        Phase.DECODE: sum(len(request.decode_s) for request in measured.requests),
    }
    for phase in REQUEST_PHASES:
        if phase in timed and timed[phase] > 0:
            times = record.times_of(Source.PREDICTED)
            step = next((time.step for time in times if time.phase is phase), None)
            yield ContributedStep(
                phase=phase,
                seconds=timed[phase],
                n_steps=n_steps[phase],
                predicted_s=None if step is None else step.value_s,
                predicted_low_s=None if step is None else step.low_s,
                predicted_high_s=None if step is None else step.high_s,
            )
