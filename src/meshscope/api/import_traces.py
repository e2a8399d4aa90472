"""Imports traces that other tools recorded: measured rows, times and the quality of the capture."""

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.api.options import flag_of
from meshscope.api.records import new_manifest, write_record
from meshscope.api.run import Run
from meshscope.backends.trace_files import read_traces
from meshscope.errors import MeshscopeError, PlanError, SpecError, TraceError
from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured, ServedBenchmark, StepClass, TraceFacts
from meshscope.events.timeline import DISTINCT_OPS, EXECUTIONS
from meshscope.hardware.chips import is_chip_named
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.workload import Workload
from meshscope.prediction import predict
from meshscope.readers.traces.attribution import TraceRows, attributed
from meshscope.readers.traces.merge import MergedTrace, merged
from meshscope.readers.traces.servers import read_served
from meshscope.readers.traces.sniff import format_of, trace_folder
from meshscope.readers.traces.trace import TraceFormat
from meshscope.reports.export.card import WorkloadCard, is_card, read_card
from meshscope.store.folder import default_folder, new_folder, safe_name
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO, write_table

if TYPE_CHECKING:
    from meshscope.api.import_ import ImportRequest


Files = list[tuple[Path, TraceFormat]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What the caller or the card says about the run; None is unknown."""

    plan: Plan | None
    mesh: Mesh | None  # that of the plan, or one with other axes
    topology: Topology | None
    model: Model | None
    findings: tuple[str, ...] = ()

    def crosses_slices(self, groups: Groups) -> bool | None:
        """Whether a group spans slices; None on a single slice, or if the slices are unknown."""
        return None if self.topology is None else self.topology.crosses_slices(groups)


def are_traces(paths: Sequence[Path]) -> bool:
    """Whether one of the paths is a folder or a trace, by its content."""
    return any(path.is_dir() or format_of(path) not in {TraceFormat.HLO, None} for path in paths)


def import_traces(request: "ImportRequest", paths: Sequence[Path]) -> Run:
    """The measured run of the traces; MeshscopeError if one cannot be read or does not fit the plan."""
    for name in ("phase", "layers", "lengths", "rules"):
        if getattr(request, name) is not None:
            raise SpecError(f"{flag_of(name)} is for HLO text, and these are traces. Leave it out.")
    files, cards, findings = _listed(paths)
    card_path = request.card or next(filter(is_card, cards), None)
    read = None if card_path is None else read_card(card_path)
    devices = _mesh(request.mesh, request.device_order, plan=request.plan)
    layout = _layout(read, request, devices)
    benchmarks = [read_served(path) for path, kind in files if kind is _BENCHMARK]
    trace = merged(read_traces(files))
    warnings = _checked(layout, trace)
    rows = attributed(trace, layout.mesh, crosses_slices=layout.crosses_slices)
    predicted, notes = _predicted(layout, rows)
    measured = _measured(trace, rows, benchmarks, warnings, (*findings, *layout.findings, *notes))
    record = RunRecord(
        path=None,
        manifest=new_manifest(
            Source.MEASURED,
            _experiment(paths, layout, trace),
            request.command,
            phases=tuple(rows.n_profiled_steps),
        ),
        rows=(*predicted, *rows.rows),
        memory={},
        measured=measured,
    )
    path = request.out or _default_folder(paths[0], layout)
    with new_folder(path, force=request.force) as partial:
        _write_programs(trace.programs, partial)
        _write_timeline(rows, partial)
        write_record(record, partial)
    return Run(record=replace(record, path=path))


def _write_timeline(rows: TraceRows, folder: Path) -> None:
    """Keeps every execution, unless the trace has none."""
    if rows.executions.is_empty():
        return
    (folder / EXECUTIONS).parent.mkdir()
    write_table(rows.executions, folder / EXECUTIONS)
    write_table(rows.distinct_ops, folder / DISTINCT_OPS)


def _write_programs(programs: Mapping[str, str], folder: Path) -> None:
    """Keeps the HLO of the trace, which `import` reads, too."""
    if programs:
        (folder / HLO).mkdir()
    for name, text in programs.items():
        with gzip.open(folder / HLO / f"{safe_name(name)}.hlo.txt.gz", "wt", 1) as file:
            file.write(text)


_BENCHMARK = TraceFormat.SERVING_BENCHMARK


def _listed(paths: Iterable[Path]) -> tuple[Files, list[Path], list[str]]:
    """The files with their formats, the YAML files beside them, and what was not read."""
    files: Files = []
    cards: list[Path] = []
    findings: list[str] = []
    for path in paths:
        if path.is_dir():
            folder = trace_folder(path)
            files += folder.files
            cards += folder.cards
            findings += folder.findings
            continue
        kind = format_of(path)
        if kind is None or kind is TraceFormat.HLO:
            raise SpecError(
                f"'{path}' is not a trace, but other files are. Import HLO text and traces separately."
            )
        files.append((path, kind))
    if all(kind is _BENCHMARK for _, kind in files):
        raise TraceError(
            f"{files[0][0]}: a serving benchmark has no operations. Also give the trace of a server."
        )
    return files, cards, findings


def _layout(card: WorkloadCard | None, request: "ImportRequest", mesh: Mesh | None) -> _Layout:
    """Options take precedence over the card."""
    topology, plan, model = request.topology, request.plan, request.model
    slice_ = None if topology is None else parse_topology(topology, is_imported=True)
    findings = () if card is None else card.findings
    if card is not None:
        slice_ = slice_ or card.topology
    laid_out = None if plan is None else parse_plan(plan)
    if laid_out is None and mesh is None and card is not None:
        laid_out = card.plan
    if laid_out is not None and slice_ is None:
        raise SpecError(
            f"--plan {laid_out} alone does not lay out the devices. Also give --topology."
        )
    if mesh is not None and slice_ is not None and mesh.n_devices != slice_.n_devices:
        raise PlanError(
            f"the mesh {_axes(mesh)} has {mesh.n_devices} devices, but {slice_.name} has {slice_.n_devices}. "
            "Change the mesh or the slice."
        )
    filled = None if laid_out is None or slice_ is None else laid_out.filled(slice_.n_devices)
    return _Layout(
        plan=filled,
        mesh=mesh if filled is None else filled.mesh,
        topology=slice_,
        model=read_model(model) if model is not None else _model_of(card),
        findings=findings,
    )


def _mesh(mesh: str | None, device_order: str | None, *, plan: str | None) -> Mesh | None:
    """The axes of --mesh; PlanError for a plan beside it, or an order of devices without it."""
    if mesh is None:
        if device_order is not None:
            raise PlanError("--device-order belongs to --mesh. Give --mesh, too.")
        return None
    if plan is not None:
        raise PlanError("--plan and --mesh both lay out the devices. Give one of them.")
    return parse_mesh(mesh, order=device_order)


def _axes(mesh: Mesh) -> str:
    """`data=2,model=4`."""
    return ",".join(f"{name}={size}" for name, size in mesh.axes)


def _model_of(card: WorkloadCard | None) -> Model | None:
    """The model that a card names; None if it is not known here."""
    if card is None or card.model_name is None:
        return None
    try:
        return read_model(card.model_name)
    except MeshscopeError:
        return None


def _checked(layout: _Layout, trace: MergedTrace) -> list[str]:
    """Where the trace disagrees with the slice and the plan; SpecError if it cannot be of them."""
    topology, mesh = layout.topology, layout.mesh
    warnings: list[str] = []
    of_kind = {file.chip_kind: file.path for file in trace.files if file.chip_kind is not None}
    if len(of_kind) > 1:
        kinds = " and ".join(f"'{path}' of {kind.upper()}s" for kind, path in of_kind.items())
        raise SpecError(f"the traces are {kinds}. Import them one by one.")
    if topology is not None:
        warnings += _other_chip(topology, trace)
    if mesh is None:
        return warnings
    named = f"the mesh {_axes(mesh)}" if layout.plan is None else f"plan '{layout.plan}'"
    if mesh.n_devices < trace.n_devices:
        raise SpecError(
            f"the trace is of {trace.n_devices} devices, and {named} lays out "
            f"{mesh.n_devices}. Give the plan and the topology of all devices."
        )
    if mesh.n_devices > trace.n_devices:
        ranks = "1 rank" if trace.n_devices == 1 else f"{trace.n_devices} ranks"
        warnings.append(
            f"the trace is of {ranks}, as far as it says, and {named} lays out {mesh.n_devices}: counts and "
            "times are those of the trace. Check --topology and --plan, or give the files of all ranks"
        )
    return warnings


def _other_chip(topology: Topology, trace: MergedTrace) -> Iterator[str]:
    """Chips in the trace that are not those of the slice; SpecError for another kind of chip."""
    for file in trace.files:
        of = f" ({file.device_name})" if file.device_name else ""
        if file.chip_kind not in {None, topology.chip.kind}:
            raise SpecError(
                f"{file.path}: a trace of {str(file.chip_kind).upper()}s{of}, and '{topology.name}' is a slice of "
                f"{topology.chip.kind.upper()}s. Name the slice that was profiled, or leave --topology out and lay "
                "out the devices with --mesh dp=8."
            )
    names = dict.fromkeys(file.device_name for file in trace.files if file.device_name)
    others = [name for name in names if is_chip_named(topology.chip, name) is False]
    if others:
        yield (
            f"the trace is of {' and '.join(map(repr, others))}, and the slice is '{topology.name}': what "
            "compares with its rates is wrong. Check --topology"
        )


def _predicted(layout: _Layout, rows: TraceRows) -> tuple[Sequence[Any], Sequence[str]]:
    if layout.model is None or layout.plan is None or layout.topology is None:
        return (), ()
    return predicted_steps(
        rows.steps, model=layout.model, plan=layout.plan, topology=layout.topology
    )


def _experiment(paths: Sequence[Path], layout: _Layout, trace: MergedTrace) -> ExperimentRecord:
    topology, plan = layout.topology, layout.plan
    mesh: Mapping[str, int] = {} if layout.mesh is None else dict(layout.mesh.axes)
    return ExperimentRecord(
        imported=tuple(map(str, paths)),
        model=layout.model,
        plan=plan,
        mesh=mesh,
        device_order=None if layout.mesh is None else layout.mesh.order,
        topology=topology,
        n_devices=trace.n_devices if topology is None else topology.n_devices,
        n_chips=None if topology is None else topology.n_chips,
    )


def _measured(
    trace: MergedTrace,
    read: TraceRows,
    benchmarks: Sequence[ServedBenchmark],
    warnings: Sequence[str],
    findings: Sequence[str],
) -> Measured:
    ends = trace.events["start_ns"] + trace.events["dur_ns"]
    window_ns = ends.max()
    return Measured(
        requests=(),
        n_profiled_steps=read.n_profiled_steps,
        loads=read.loads,
        times=read.times,
        findings=(*warnings, *read.waiting, *trace.findings, *read.findings, *findings),
        trace=TraceFacts(
            formats=tuple(dict.fromkeys(file.format.value for file in trace.files)),
            n_files=len(trace.files),
            n_events=sum(file.n_events for file in trace.files),
            n_ops=len(trace.events),
            devices=tuple(read.executions["device"].unique().sort().to_list()),
            n_devices=trace.n_devices,
            window_s=window_ns * 1e-9 if isinstance(window_ns, int) else 0.0,
            steps=read.steps,
            transfers=read.transfers,
            programs=read.programs,
            benchmarks=tuple(benchmarks),
        ),
    )


def _default_folder(path: Path, layout: _Layout) -> Path:
    axes = "" if layout.mesh is None else _axes(layout.mesh)
    plan = (axes if layout.plan is None else str(layout.plan)).replace("=", "")
    name = path.resolve().name.split(".")[0]
    return default_folder(name, "" if layout.topology is None else layout.topology.name, plan)


ASSUMED_DTYPE = "bf16"


def predicted_steps(
    steps: Sequence[StepClass], *, model: Model, plan: Plan, topology: Topology
) -> tuple[tuple[Collective, ...], list[str]]:
    """Predicted rows of a mean prefill and a mean decode step, and why one is missing."""
    rows: list[Collective] = []
    findings: list[str] = []
    for step in steps:
        phase = Phase(step.label.value) if step.label.value in set(Phase) else None
        if phase is None:
            continue
        tokens = sum(n or 0.0 for n in (step.prefill_tokens, step.decode_tokens))
        if not tokens:
            findings.append(f"{phase} steps: no prediction, as the trace does not say their tokens")
            continue
        try:
            experiment = _step_experiment(
                phase, round(tokens), model=model, plan=plan, topology=topology
            )
            predicted = predict(experiment)
        except MeshscopeError as error:
            findings.append(f"{phase} steps: no prediction: {error}")
            continue
        rows += [replace(row, n_steps=step.n_steps) for row in predicted if row.phase is phase]
    return tuple(rows), findings


def _step_experiment(
    phase: Phase, tokens: int, *, model: Model, plan: Plan, topology: Topology
) -> Experiment:
    """One step with these tokens: a prompt for each replica, or a token of each sequence."""
    n_replicas = plan.dp * plan.fsdp
    share = max(1, -(-tokens // n_replicas))
    is_prefill = phase is Phase.PREFILL
    workload = Workload(
        batch=n_replicas if is_prefill else share * n_replicas,
        prompt=share if is_prefill else 1,
        output=2,
        weight_dtype=ASSUMED_DTYPE,
        activation_dtype=ASSUMED_DTYPE,
        cache_dtype=ASSUMED_DTYPE,
    )
    for engine in (Engine.VLLM, Engine.MESHSCOPE):
        try:
            return experiment_of(
                model=model,
                plan=plan,
                topology=topology,
                workload=workload,
                program=Program(),
                engine=engine,
            )
        except MeshscopeError:
            if engine is Engine.MESHSCOPE:
                raise
    raise AssertionError
