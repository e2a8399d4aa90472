"""`meshscope.import_`: HLO text and traces of other tools become a run."""

import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.import_traces import are_traces, check_options_of_traces, import_traces
from meshscope.api.progress import ReportedProgress
from meshscope.api.records import new_manifest, write_record
from meshscope.api.request import option_words
from meshscope.api.run import Run
from meshscope.backends.compile.import_hlo import ImportedProgram, ImportedPrograms, read_imported
from meshscope.backends.compile.saved_graph import compile_graph
from meshscope.cost.timeline import write_timeline
from meshscope.errors import PlanError, SpecError, public
from meshscope.events.enums import Phase, Source
from meshscope.files import path_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import DEFAULT_FRONTEND, Frontend
from meshscope.plans.sequence_lengths import parse_lengths
from meshscope.readers.hlo.attribution import MAX_LAYERS
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scope_rules import RULES, EngineRules, read_rules
from meshscope.readers.traces.sniff import check_kind, format_of
from meshscope.reports.plain import plain
from meshscope.store.folder import default_folder, new_folder, safe_name, scratch_folder
from meshscope.store.run import Manifest, RunRecord
from meshscope.store.write import HLO
from meshscope.units import counted
from meshscope.workers import Progress

# Options of HLO text, in the order of the recorded command.
_OPTIONS = (
    *("topology", "plan", "mesh", "device_order", "model", "phase", "layers", "lengths", "rules"),
    *("frontend", "partial"),
)
_ENDINGS = re.compile(r"(\.(gz|txt|hlo|pb|hlo_module))+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """A request to import; `inputs` as the caller gave them, `phases` those of the same paths, if stated."""

    inputs: tuple[str, ...]
    paths: tuple[Path, ...]
    phases: tuple[Phase | None, ...]
    topology: Topology
    mesh: Mesh
    plan: Plan | None
    phase: Phase | None
    is_partial: bool
    command: tuple[str, ...]
    rules: tuple[EngineRules, ...] = ()
    rules_path: Path | None = None
    model: Model | None = None
    layers: int | None = None
    lengths: str | None = None

    @property
    def n_layers(self) -> int | None:
        """Layers of the whole model, if they are known."""
        return self.layers if self.layers or self.model is None else self.model.n_layers


@public
def import_(  # noqa: PLR0913  the options of the command
    paths: str | Path | Iterable[str | Path],
    *,
    topology: str | None = None,
    plan: str | None = None,
    mesh: str | None = None,
    device_order: str | None = None,
    card: str | Path | None = None,
    model: str | None = None,
    phase: Phase | str | None = None,
    layers: int | None = None,
    lengths: str | None = None,
    rules: str | Path | None = None,
    frontend: Frontend | str | None = None,
    partial: bool = False,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Reads optimized HLO text or traces of another tool, and saves a run.

    Collectives get phase, layer and part from the names in the text: op_names, functions, arguments. A
    scheduled TPU program that is one whole phase gets modeled times, too; so does a step of several
    programs, given as `decode=model.txt`, `decode=sampler.txt` in the order of execution.
    docs/traces.md lists the traces.

    Example:
        >>> meshscope.import_("module.txt", topology="v6e-8", plan="tp=8").collectives

    Args:
        paths: HLO text, plain or gzipped; with `frontend="torchxla"` HLO protos. `decode=PATH` and
            `prefill=PATH` state the step that runs a program. Or traces: a file for each rank or
            host, a folder of them, results of `vllm bench serve`.
        topology: The slice that the program ran on or was compiled for, such as `v6e-8`. Traces need
            neither slice nor plan: without a plan, collectives have the axes that their process
            groups name.
        plan: Axis sizes that lay out its devices, such as `tp=8`.
        mesh: Instead of a plan, the program's own axes, outermost first, such as `data=8,model=8`.
        device_order: With `mesh`, the devices of the slice in the order of the mesh, such as
            `0,2,4,6,7,5,3,1`; by default in the order of their ids.
        card: CCL-Bench workload card of the traces, with their plan and slice.
        model: Model of the traces: its predicted collectives appear beside the measured ones. For HLO
            text: the model whose layers it has, or a few of them.
        phase: Phase of a program whose names state none: `prefill` or `decode`.
        layers: Layers of the whole model, if the program has only a few and `model` is not given: its
            last layers stand for the others.
        lengths: Sequences of a step on one device, for attention kernels that read the present tokens:
            `64x1:1024` for 64 that decode at a context of 1024, and `,1x2048:8192` for a chunk of 2048
            tokens at 8192; `prefill=...,decode=...` by phase; by default assumed from the operands.
        rules: TOML file with rules that assign names to phases, layers and parts, before the built-in ones.
        frontend: `torchxla` compiles graphs that torch_xla saved, then reads them.
        partial: Read truncated text up to its last whole instruction.
        out: Folder of the run; by default `runs/<file>-<slice>-<plan>`.
        force: Replace the run in this folder.
        progress: Called with a part of the work, its step, and the seconds left or None.

    Returns:
        A run with the source `compiled`, whose `warnings` say where truncated text ends; of traces
        with the source `measured`, whose `record.measured.findings` say what the capture lacks.

    Raises:
        MeshscopeError: A file cannot be read or does not fit the plan, or the folder exists.
    """
    inputs = (paths,) if isinstance(paths, str | Path) else tuple(paths)
    stated = tuple(_stated(one) for one in inputs)
    files = tuple(path for _, path in stated)
    if not files:
        raise SpecError("there is no file to import. Give the path of HLO text.")
    if frontend == DEFAULT_FRONTEND:
        raise SpecError("--frontend jax: `compiled.as_text()` is text; leave the option out.")
    home = None if out is None else path_of(out)
    if frontend is None:
        for path in files:
            check_kind(path)
    if frontend is None and are_traces(files):
        check_options_of_traces(phase=phase, layers=layers, lengths=lengths, rules=rules)
        return import_traces(
            files,
            topology=topology,
            plan=plan,
            mesh=mesh,
            device_order=device_order,
            card=card,
            model=model,
            out=home,
            force=force,
        )
    if topology is None or card is not None:
        for path in () if frontend else files:  # a file that is no HLO text needs another answer
            if format_of(path) is None:
                read_hlo(path, is_partial=partial)
        raise SpecError("HLO text needs --topology, and --plan or --mesh; --card is for traces.")
    values = locals()
    words = option_words({**{name: values[name] for name in _OPTIONS}, "out": home})
    slice_ = parse_topology(topology, is_imported=True)
    filled, devices = _layout(slice_, plan, mesh, device_order)
    request = _Import(
        inputs=tuple(map(str, inputs)),
        paths=files,
        phases=tuple(step for step, _ in stated),
        topology=slice_,
        mesh=devices,
        plan=filled,
        phase=None if phase is None else _phase(phase),
        is_partial=partial,
        command=("meshscope", "import", *map(str, inputs), *words),
        rules=() if rules is None else (read_rules(rules),),
        rules_path=None if rules is None else path_of(rules),
        model=None if model is None else read_model(model),
        layers=_layers(layers),
        lengths=lengths,
    )
    with scratch_folder() as scratch:
        texts, versions = list(files), dict[str, str]()
        if frontend is not None:
            _check_frontend(frontend)
            report = ReportedProgress(progress)
            texts, versions = _compiled(files, slice_, scratch, report)
        return _imported_run(request, texts, versions, out=home, force=force)


def _stated(path: str | Path) -> tuple[Phase | None, Path]:
    """Phase and path of `decode=model.txt`; no phase for any other path."""
    name, separator, rest = str(path).partition("=")
    if separator and name in set(Phase) and not Path(path).exists():
        return Phase(name), path_of(rest)
    return None, path_of(path)


def _layout(
    topology: Topology, plan: str | None, mesh: str | None, device_order: str | None
) -> tuple[Plan | None, Mesh]:
    """The plan, if there is one, and the mesh that lays out the devices of the slice."""
    if (plan is None) == (mesh is None):
        raise PlanError(
            "the devices of the dump need one layout. Give either --plan, such as tp=8, or --mesh with "
            "axes of your own, such as data=8,model=8."
        )
    if plan is not None:
        if device_order is not None:
            raise PlanError("--device-order belongs to --mesh. Give --mesh instead of --plan.")
        filled = parse_plan(plan).filled(topology.n_devices)
        return filled, filled.mesh
    layout = parse_mesh(mesh or "", order=device_order)
    if layout.n_devices != topology.n_devices:
        sizes = " x ".join(map(str, layout.sizes))
        raise PlanError(
            f"mesh '{mesh}' has {sizes} = {counted(layout.n_devices, 'device')}, but {topology.name} has "
            f"{topology.n_devices}. Change the mesh or the slice."
        )
    return None, layout


def _layers(n_layers: int | None) -> int | None:
    if n_layers is not None and not 1 <= n_layers < MAX_LAYERS:
        raise SpecError(
            f"--layers {n_layers}: expected 1 to {MAX_LAYERS - 1}. Give all layers of the model."
        )
    return n_layers


def _phase(text: str) -> Phase:
    if text not in set(Phase):
        raise SpecError(f"phase: '{text}' is not one of {', '.join(Phase)}.")
    return Phase(text)


def _check_frontend(frontend: str) -> None:
    traced = [known.value for known in Frontend if known.is_traced]
    if frontend not in traced:
        raise SpecError(f"frontend: '{frontend}' is not {traced[0]}. Leave the option out.")


def _imported_run(
    request: _Import,
    texts: Sequence[Path],
    versions: Mapping[str, str],
    *,
    out: Path | None,
    force: bool,
) -> Run:
    names = _kept_names(texts)
    modules = [read_hlo(text, is_partial=request.is_partial) for text in texts]
    programs = [
        ImportedProgram(module=module, phase=phase, default_phase=request.phase)
        for module, phase in zip(modules, request.phases, strict=True)
    ]
    read = read_imported(
        programs,
        topology=request.topology,
        mesh=request.mesh,
        rules=request.rules,
        n_layers=request.n_layers,
        lengths={} if request.lengths is None else parse_lengths(request.lengths),
    )
    record = RunRecord(
        path=None,
        manifest=_manifest(request, names, read, versions),
        rows=tuple(read.rows),
        memory={},
        times=read.times,
    )
    path = out or _default_folder(request, texts[0])
    with new_folder(path, force=force) as partial:
        (partial / HLO).mkdir()
        for text, name in zip(texts, names, strict=True):
            shutil.copyfile(text, partial / HLO / name)
        if request.rules_path is not None:
            shutil.copyfile(request.rules_path, partial / RULES)
        if read.steps:
            write_timeline(partial, read.steps)
        write_record(record, partial)
    return Run(record=replace(record, path=path), warnings=tuple(_cut_warnings(texts, modules)))


def _manifest(
    request: _Import, names: Sequence[str], read: ImportedPrograms, versions: Mapping[str, str]
) -> Manifest:
    present = {row.phase for row in (*read.rows, *read.others)} | {request.phase, *request.phases}
    stated = dict(zip(names, request.phases, strict=True))
    experiment = ExperimentRecord(
        imported=request.inputs,
        model=request.model,
        plan=request.plan,
        mesh=dict(request.mesh.axes),
        device_order=request.mesh.order,
        extended_layers=request.n_layers,
        lengths=request.lengths,
        program_phases=stated if any(stated.values()) else None,
        topology=request.topology,
        n_devices=request.topology.n_devices,
        n_chips=request.topology.n_chips,
        phase=request.phase,
    )
    phases = [phase for phase in Phase if phase in present]
    return new_manifest(
        Source.COMPILED,
        experiment,
        request.command,
        phases=phases,
        versions=versions,
        others=read.others,
    )


def _default_folder(request: _Import, text: Path) -> Path:
    axes = (f"{name}{size}" for name, size in request.mesh.axes)
    layout = "-".join(axes) if request.plan is None else str(request.plan).replace("=", "")
    name = _ENDINGS.sub("", text.name)
    return default_folder(name, request.topology.name, layout)


def _compiled(
    protos: Sequence[Path], topology: Topology, scratch: Path, progress: ReportedProgress
) -> tuple[list[Path], Mapping[str, str]]:
    """The texts of graphs that torch_xla saved, compiled for the slice, and the compiler's versions."""
    texts: list[Path] = []
    versions: Mapping[str, str] = {}
    began_s = time.monotonic()
    for name, proto in zip(_kept_names(protos), protos, strict=True):
        text = scratch / f"{name.removesuffix('.pb')}.hlo.txt.gz"
        n_done, n_left = len(texts), len(protos) - len(texts)
        left_s = n_left * (time.monotonic() - began_s) / n_done if n_done else None
        step = f"compiling for {topology.name}, {n_done + 1} of {len(protos)}"
        progress(plain(proto.name), step, left_s)
        versions = compile_graph(proto, topology, text)
        texts.append(text)
        progress(plain(proto.name), "done")
    return texts, versions


def _kept_names(paths: Sequence[Path]) -> list[str]:
    """Safe names of the files in the run; SpecError for two files of one name."""
    names = [safe_name(path.name) for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"two files are named '{name}'. Rename one, or import them one by one.")
    return names


def _cut_warnings(texts: Sequence[Path], modules: Sequence[HloModule]) -> Iterable[str]:
    for text, module in zip(texts, modules, strict=True):
        if module.cut_off_at is not None:
            *_, last = module.computations.values()
            entry = "" if last.is_entry else " The entry computation is among it."
            yield (
                f"{text}:{module.cut_off_at}: the text is cut off after {len(last.instructions):,} "
                f"instructions of '{last.name}'. The run lacks what followed.{entry}"
            )
