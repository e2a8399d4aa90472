"""`meshscope.import_`: HLO text and traces of other tools become a run."""

import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.import_traces import are_traces, import_traces
from meshscope.api.options import (
    changed_options,
    option,
    option_words,
    optional_choice,
    optional_path,
    request,
    takes,
    texts,
)
from meshscope.api.progress import ReportedProgress
from meshscope.api.records import new_manifest, write_record
from meshscope.api.request import FORCE, OUT, PLAN, PROGRESS, TOPOLOGY
from meshscope.api.run import Run
from meshscope.backends.compile.import_hlo import (
    ImportedProgram,
    ImportedPrograms,
    compile_graph,
    read_imported,
)
from meshscope.cost.timeline import write_timeline
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase, Source
from meshscope.files import path_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import DEFAULT_FRONTEND, Frontend
from meshscope.plans.workload import parse_lengths
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

_ENDINGS = re.compile(r"(\.(gz|txt|hlo|pb|hlo_module))+$")


@request
class ImportRequest:
    """The options of `import`, by the names of the command line."""

    paths: list[str] = option(
        "Optimized HLO text, plain or gzipped; with --frontend torchxla, HLO protos. "
        "decode=FILE or prefill=FILE: the step that runs it, after those before it. Or traces: a file "
        "for each rank or host, or a folder.",
        metavar="FILE...",
        converter=texts,
        kw_only=False,
    )
    topology: str | None = option(TOPOLOGY, default=None)
    plan: str | None = option(PLAN, default=None)
    mesh: str | None = option(
        "Other axes, instead of --plan: data=8,model=8.", default=None, metavar="AXES"
    )
    device_order: str | None = option(
        "Devices in the order of the mesh: 0,2,4,6,7,5,3,1.", default=None, metavar="IDS"
    )
    card: Path | None = option(
        "CCL-Bench card of the traces: their plan and slice.",
        default=None,
        metavar="FILE",
        converter=optional_path,
    )
    model: str | None = option(
        "Model behind traces, to predict its collectives, or behind a dump of a few layers.",
        default=None,
        metavar="MODEL",
    )
    phase: Phase | None = option(
        "Phase of a dump whose names do not state it.",
        default=None,
        converter=optional_choice(Phase),
    )
    layers: int | None = option(
        "Layers of the whole model, if the dump has only a few.", default=None, metavar="N"
    )
    lengths: str | None = option(
        "Sequences of a step on a device: N with Q new tokens at a context of K, for attention "
        "kernels. 64x1:1024, or mixed 63x1:1024,1x2048:8192.",
        default=None,
        metavar="NxQ:K",
    )
    rules: Path | None = option(
        "TOML rules from names to phase, layer and part.",
        default=None,
        metavar="FILE",
        converter=optional_path,
    )
    frontend: Frontend | None = option(
        "torchxla: compile the graphs that torch_xla saved, then read them.",
        default=None,
        converter=optional_choice(Frontend),
    )
    partial: bool = option("Read the complete part of truncated text.", default=False)
    out: Path | None = option(OUT, default=None, converter=optional_path)
    force: bool = option(FORCE, default=False)
    progress: Progress | None = option(PROGRESS, default=None)

    @property
    def command(self) -> tuple[str, ...]:
        """The command that imports these files."""
        words = option_words({**changed_options(self), "paths": None, "out": self.out}, argument="")
        return ("meshscope", "import", *self.paths, *words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """A checked request; `paths` without the phases that the caller stated for them."""

    asked: ImportRequest
    paths: tuple[Path, ...]
    phases: tuple[Phase | None, ...]
    topology: Topology
    mesh: Mesh
    plan: Plan | None
    rules: tuple[EngineRules, ...]
    model: Model | None

    @property
    def n_layers(self) -> int | None:
        """Layers of the whole model, if they are known."""
        layers = self.asked.layers
        return layers if layers or self.model is None else self.model.n_layers


@takes(ImportRequest)
def import_(request: ImportRequest) -> Run:
    """Reads optimized HLO text or traces of another tool, and saves a run.

    Collectives get phase, layer and part from the names in the text: op_names, functions, arguments. A
    scheduled TPU program that is one whole phase gets modeled times, too; so does a step of several
    programs, given as `decode=model.txt`, `decode=sampler.txt` in the order of execution.
    docs/traces.md lists the traces.

    Example:
        >>> meshscope.import_("module.txt", topology="v6e-8", plan="tp=8").collectives

    Returns:
        A run with the source `compiled`, whose `warnings` say where truncated text ends; of traces
        with the source `measured`, whose `record.measured.findings` say what the capture lacks.

    Raises:
        MeshscopeError: A file cannot be read or does not fit the plan, or the folder exists.
    """
    return import_request(request)


def import_request(request: ImportRequest) -> Run:
    """The run of the files of the request."""
    stated = tuple(map(_stated, request.paths))
    files = tuple(path for _, path in stated)
    if not files:
        raise SpecError("there is no file to import. Give the path of HLO text.")
    frontend = _checked_frontend(request)
    if frontend is None:
        for path in files:
            check_kind(path)
        if are_traces(files):
            return import_traces(request, files)
    if request.topology is None or request.card is not None:
        for path in () if frontend else files:  # a file that is no HLO text needs another answer
            if format_of(path) is None:
                read_hlo(path, is_partial=request.partial)
        raise SpecError("HLO text needs --topology, and --plan or --mesh; --card is for traces.")
    slice_ = parse_topology(request.topology, is_imported=True)
    filled, devices = _layout(slice_, request)
    _check_layers(request.layers)
    importing = _Import(
        asked=request,
        paths=files,
        phases=tuple(step for step, _ in stated),
        topology=slice_,
        mesh=devices,
        plan=filled,
        rules=() if request.rules is None else (read_rules(request.rules),),
        model=None if request.model is None else read_model(request.model),
    )
    with scratch_folder() as scratch:
        texts, versions = list(files), dict[str, str]()
        if frontend is not None:
            report = ReportedProgress(request.progress)
            texts, versions = _compiled(files, slice_, scratch, report)
        return _imported_run(importing, texts, versions)


def _checked_frontend(request: ImportRequest) -> Frontend | None:
    """The front end whose graphs are compiled; SpecError for one whose programs are text."""
    frontend = request.frontend
    if frontend is DEFAULT_FRONTEND:
        raise SpecError("--frontend jax: `compiled.as_text()` is text; leave the option out.")
    if frontend is not None and not frontend.is_traced:
        traced = next(known.value for known in Frontend if known.is_traced)
        raise SpecError(f"frontend: '{frontend}' is not {traced}. Leave the option out.")
    return frontend


def _stated(path: str | Path) -> tuple[Phase | None, Path]:
    """Phase and path of `decode=model.txt`; no phase for any other path."""
    name, separator, rest = str(path).partition("=")
    if separator and name in set(Phase) and not Path(path).exists():
        return Phase(name), path_of(rest)
    return None, path_of(path)


def _layout(topology: Topology, request: ImportRequest) -> tuple[Plan | None, Mesh]:
    """The plan, if there is one, and the mesh that lays out the devices of the slice."""
    plan, mesh, device_order = request.plan, request.mesh, request.device_order
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


def _check_layers(n_layers: int | None) -> None:
    if n_layers is not None and not 1 <= n_layers < MAX_LAYERS:
        raise SpecError(
            f"--layers {n_layers}: expected 1 to {MAX_LAYERS - 1}. Give all layers of the model."
        )


def _imported_run(request: _Import, texts: Sequence[Path], versions: Mapping[str, str]) -> Run:
    asked = request.asked
    names = _kept_names(texts)
    modules = [read_hlo(text, is_partial=asked.partial) for text in texts]
    programs = [
        ImportedProgram(module=module, phase=phase, default_phase=asked.phase)
        for module, phase in zip(modules, request.phases, strict=True)
    ]
    read = read_imported(
        programs,
        topology=request.topology,
        mesh=request.mesh,
        rules=request.rules,
        n_layers=request.n_layers,
        lengths={} if asked.lengths is None else parse_lengths(asked.lengths),
    )
    record = RunRecord(
        path=None,
        manifest=_manifest(request, names, read, versions),
        rows=tuple(read.rows),
        memory={},
        times=read.times,
    )
    path = asked.out or _default_folder(request, texts[0])
    with new_folder(path, force=asked.force) as partial:
        (partial / HLO).mkdir()
        for text, name in zip(texts, names, strict=True):
            shutil.copyfile(text, partial / HLO / name)
        if asked.rules is not None:
            shutil.copyfile(asked.rules, partial / RULES)
        if read.steps:
            write_timeline(partial, read.steps)
        write_record(record, partial)
    return Run(record=replace(record, path=path), warnings=tuple(_cut_warnings(texts, modules)))


def _manifest(
    request: _Import, names: Sequence[str], read: ImportedPrograms, versions: Mapping[str, str]
) -> Manifest:
    asked = request.asked
    present = {row.phase for row in (*read.rows, *read.others)} | {asked.phase, *request.phases}
    stated = dict(zip(names, request.phases, strict=True))
    experiment = ExperimentRecord(
        imported=tuple(asked.paths),
        model=request.model,
        plan=request.plan,
        mesh=dict(request.mesh.axes),
        device_order=request.mesh.order,
        extended_layers=request.n_layers,
        lengths=asked.lengths,
        program_phases=stated if any(stated.values()) else None,
        topology=request.topology,
        n_devices=request.topology.n_devices,
        n_chips=request.topology.n_chips,
        phase=asked.phase,
    )
    phases = [phase for phase in Phase if phase in present]
    return new_manifest(
        Source.COMPILED,
        experiment,
        asked.command,
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
