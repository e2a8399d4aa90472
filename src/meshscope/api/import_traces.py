"""Imports traces that other tools recorded: measured rows, times and the quality of the capture."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.api.options import flag_of, refuse
from meshscope.api.records import new_record, write_record
from meshscope.api.run import Run
from meshscope.backends.trace_files import read_traces
from meshscope.cost.collectives import predict
from meshscope.errors import MeshscopeError, PlanError, SpecError, TraceError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import (
    Measured,
    ServedBenchmark,
    ServedTime,
    StepClass,
    TraceFacts,
)
from meshscope.events.timeline import DISTINCT_OPS, EXECUTIONS
from meshscope.files import write_gzip
from meshscope.hardware.chips import is_chip_named
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.mesh import parse_mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.workload import Workload
from meshscope.readers.traces.attribution import attributed
from meshscope.readers.traces.merge import MergedTrace, merged
from meshscope.readers.traces.sniff import NO_TRACE, format_of, trace_folder
from meshscope.readers.traces.trace import TraceFormat
from meshscope.reports.export.card import WorkloadCard, is_card, read_card
from meshscope.serialize import picked
from meshscope.serving.benchmarks import read_bench
from meshscope.store.folder import default_folder, new_folder, safe_name
from meshscope.store.write import HLO, write_table
from meshscope.units import counted

if TYPE_CHECKING:
    from meshscope.api.import_ import ImportRequest


Files = list[tuple[Path, TraceFormat]]
ONE_LAYOUT = (
    "the devices need one layout. Give either --plan, such as tp=8, or --mesh with axes of your own, such as "
    "data=8,model=8."
)


def laid_out(
    request: "ImportRequest",
    imported: Iterable[object],
    model: Model | None,
    card: WorkloadCard | None = None,
) -> ExperimentRecord:
    """What the options, which take precedence over the card, say about files that are imported.

    PlanError for two layouts, or one that does not fit the slice.
    """
    remedy = "--mesh, too" if request.plan is None else "--mesh instead of --plan"
    refuse(
        (request.plan is not None and request.mesh is not None, ONE_LAYOUT),
        (
            request.device_order is not None and request.mesh is None,
            f"--device-order belongs to --mesh. Give {remedy}.",
        ),
        kind=PlanError,
    )
    mesh, topology, plan = None, None if card is None else card.topology, None
    if request.topology is not None:
        topology = parse_topology(request.topology, is_imported=True)
    if request.mesh is not None:
        mesh = parse_mesh(request.mesh, order=request.device_order)
    elif request.plan is not None:
        plan = parse_plan(request.plan)
    elif card is not None:
        plan = card.plan
    if plan is not None:
        if topology is None:
            raise SpecError(
                f"--plan {plan} alone does not lay out the devices. Also give --topology."
            )
        plan = plan.filled(topology.n_devices)
        mesh = plan.mesh
    experiment = ExperimentRecord(
        imported=tuple(map(str, imported)),
        model=model,
        plan=plan,
        mesh={} if mesh is None else dict(mesh.axes),
        device_order=None if mesh is None else mesh.order,
        topology=topology,
        n_devices=None if topology is None else topology.n_devices,
        n_chips=None if topology is None else topology.n_chips,
    )
    if mesh is not None and topology is not None and mesh.n_devices != topology.n_devices:
        raise PlanError(
            f"mesh '{replace(experiment, plan=None).layout}' has {counted(mesh.n_devices, 'device')}, but "
            f"{topology.name} has {topology.n_devices}. Change the mesh or the slice."
        )
    return experiment


def imported_folder(name: str, experiment: ExperimentRecord) -> Path:
    """The folder of an imported run if the user names none."""
    topology = "" if experiment.topology is None else experiment.topology.name
    return default_folder(name, topology, (experiment.layout or "").replace("=", ""))


def import_traces(request: "ImportRequest", paths: Sequence[Path]) -> Run:
    """The measured run of the traces; MeshscopeError if one cannot be read or does not fit the plan."""
    for name in ("phase", "layers", "step_lengths"):
        if getattr(request, name) is not None:
            raise SpecError(f"{flag_of(name)} is for HLO text, and these are traces. Leave it out.")
    files, cards, findings = _listed(paths)
    card_path = request.card or next(filter(is_card, cards), None)
    card = None if card_path is None else read_card(card_path)
    model = None if request.model is None else read_model(request.model)
    if model is None and card is not None and card.model_name is not None:
        with suppress(MeshscopeError):  # a model that is not known here
            model = read_model(card.model_name)
    experiment = laid_out(request, request.paths, model, card)
    plan, topology = experiment.plan, experiment.topology
    benchmarks = [_served(path) for path, kind in files if kind is _BENCHMARK]
    trace = merged(read_traces(files))
    warnings = _checked(experiment, trace)
    crosses_slices = (lambda _: None) if topology is None else topology.crosses_slices
    mesh = experiment.device_mesh if experiment.mesh else None
    rows = attributed(trace, mesh, crosses_slices=crosses_slices)
    predicted, notes = (), list[str]()
    if model is not None and plan is not None and topology is not None:
        predicted, notes = predicted_steps(rows.steps, model=model, plan=plan, topology=topology)
    findings = [*findings, *(() if card is None else card.findings), *notes]
    if topology is None:
        experiment = replace(experiment, n_devices=trace.n_devices)
    window_ns = (trace.events["start_ns"] + trace.events["dur_ns"]).max()
    record = new_record(
        Source.MEASURED,
        experiment,
        request.command,
        phases=rows.n_profiled_steps,
        rows=(*predicted, *rows.rows),
        other_operations=rows.other_operations,
        memory={},
        measured=Measured(
            requests=(),
            findings=(*warnings, *rows.waiting, *trace.findings, *rows.findings, *findings),
            trace=TraceFacts(
                formats=tuple(dict.fromkeys(file.format.value for file in trace.files)),
                n_files=len(trace.files),
                n_events=sum(file.n_events for file in trace.files),
                n_ops=len(trace.events),
                devices=tuple(rows.executions["device"].unique().sort().to_list()),
                n_devices=trace.n_devices,
                window_s=window_ns * 1e-9 if isinstance(window_ns, int) else 0.0,
                benchmarks=tuple(benchmarks),
                **picked(rows, "steps", "transfers", "programs"),
            ),
            **picked(rows, "n_profiled_steps", "loads", "times"),
        ),
    )
    name = paths[0].resolve().name.split(".")[0]
    path = request.out or imported_folder(name, experiment)
    with new_folder(path, force=request.force) as partial:
        if trace.programs:
            (partial / HLO).mkdir()
        for name, text in trace.programs.items():  # the HLO of the trace, which `import` reads, too
            write_gzip(partial / HLO / f"{safe_name(name)}.hlo.txt.gz", text)
        if not rows.executions.is_empty():
            (partial / EXECUTIONS).parent.mkdir()
            write_table(rows.executions, partial / EXECUTIONS)
            write_table(rows.distinct_ops, partial / DISTINCT_OPS)
        write_record(record, partial)
    return Run(record=record.placed(path))


_BENCHMARK = TraceFormat.SERVING_BENCHMARK


def _served(path: Path) -> ServedBenchmark:
    bench = read_bench(path)
    figures = {f"{what}_s": what for what in ("mean", "p50", "p90", "p99")}
    times = (
        ServedTime(name=name, **{field: of_name.get(what) for field, what in figures.items()})
        for name, of_name in bench.times_s.items()
    )
    return ServedBenchmark(
        path=str(path),
        times=tuple(times),
        **picked(bench, "n_requests", "requests_per_s", "output_tokens_per_s"),
    )


def _listed(paths: Iterable[Path]) -> tuple[Files, list[Path], list[str]]:
    """The files with their formats, adjacent YAML files, and what was not read."""
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
        if kind is None or kind in NO_TRACE:
            raise SpecError(
                f"'{path}' is not a trace, but other files are. Import programs and traces separately."
            )
        files.append((path, kind))
    if all(kind is _BENCHMARK for _, kind in files):
        raise TraceError(
            f"{files[0][0]}: a serving benchmark has no operations. Also give the trace of a server."
        )
    return files, cards, findings


def _checked(experiment: ExperimentRecord, trace: MergedTrace) -> list[str]:
    """Where the trace disagrees with the slice and the plan; SpecError if it cannot be theirs."""
    topology, mesh = experiment.topology, experiment.device_mesh
    warnings: list[str] = []
    of_kind = {file.chip_kind: file.path for file in trace.files if file.chip_kind is not None}
    if len(of_kind) > 1:
        kinds = " and ".join(f"'{path}' of {kind.upper()}s" for kind, path in of_kind.items())
        raise SpecError(f"the traces are {kinds}. Import them one by one.")
    if topology is not None:
        for file in trace.files:
            of = f" ({file.device_name})" if file.device_name else ""
            if file.chip_kind not in {None, topology.chip.kind}:
                raise SpecError(
                    f"{file.path}: a trace of {str(file.chip_kind).upper()}s{of}, and '{topology.name}' is a slice of "
                    f"{topology.chip.kind.upper()}s. Name the slice that was profiled, or leave --topology out and lay "
                    "out the devices with --mesh dp=8."
                )
        names = dict.fromkeys(file.device_name for file in trace.files if file.device_name)
        others = [repr(name) for name in names if is_chip_named(topology.chip, name) is False]
        if others:
            warnings.append(
                f"the trace is of {' and '.join(others)}, and the slice is '{topology.name}': what "
                "compares with its rates is wrong. Check --topology"
            )
    if not mesh.axes:
        return warnings
    layout = experiment.layout
    named = f"the mesh {layout}" if experiment.plan is None else f"plan '{layout}'"
    if mesh.n_devices < trace.n_devices:
        raise SpecError(
            f"the trace is of {trace.n_devices} devices, and {named} lays out "
            f"{mesh.n_devices}. Give the plan and the topology of all devices."
        )
    if mesh.n_devices > trace.n_devices:
        warnings.append(
            f"the trace is of {counted(trace.n_devices, 'rank')}, as far as it says, and {named} lays out "
            f"{mesh.n_devices}: counts and times come from the trace. Check --topology and --plan, or give the files "
            "of all ranks"
        )
    return warnings


ASSUMED_DTYPE = "bf16"


def predicted_steps(
    steps: Sequence[StepClass], *, model: Model, plan: Plan, topology: Topology
) -> tuple[tuple[Collective, ...], list[str]]:
    """Predicted rows of a mean prefill and a mean decode step, and why one is missing."""
    rows: list[Collective] = []
    findings: list[str] = []
    for step in steps:
        if step.label.value not in set(Phase):
            continue
        phase = Phase(step.label.value)
        tokens = sum(n or 0.0 for n in (step.prefill_tokens, step.decode_tokens))
        if not tokens:
            findings.append(f"{phase} steps: no prediction, as the trace does not say their tokens")
            continue
        # A prompt for each replica, or a token of each sequence.
        n_replicas = plan.dp * plan.fsdp
        share = max(1, -(-round(tokens) // n_replicas))
        is_prefill = phase is Phase.PREFILL
        dtypes = dict.fromkeys(("weight_dtype", "activation_dtype", "cache_dtype"), ASSUMED_DTYPE)
        batch, prompt = (n_replicas, share) if is_prefill else (share * n_replicas, 1)
        asked: dict[str, Any] = {"model": model, "plan": plan, "topology": topology}
        asked["program"] = Program()
        try:
            workload = Workload(batch=batch, prompt=prompt, output=2, **dtypes)
            try:
                experiment = experiment_of(**asked, workload=workload, engine=Engine.VLLM)
            except MeshscopeError:
                experiment = experiment_of(**asked, workload=workload, engine=Engine.MESHSCOPE)
            predicted = predict(experiment)
        except MeshscopeError as error:
            findings.append(f"{phase} steps: no prediction: {error}")
            continue
        rows += [replace(row, n_steps=step.n_steps) for row in predicted if row.phase is phase]
    return tuple(rows), findings
