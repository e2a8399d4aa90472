"""`meshscope.import_`: HLO text, StableHLO and traces of other tools become a run."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshscope.api.console import Shown, WorkProgress, reporting, shown_run
from meshscope.api.import_traces import ONE_LAYOUT, import_traces, imported_folder, laid_out
from meshscope.api.options import (
    RunOutput,
    changed_options,
    option,
    option_words,
    optional_choice,
    optional_path,
    refuse,
    request,
    takes,
    texts,
)
from meshscope.api.records import new_record, saved
from meshscope.api.request import CompileRequest
from meshscope.api.run import Run
from meshscope.backends.compile.import_hlo import compile_graph, read_imported
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase, Source
from meshscope.files import fetched, path_of
from meshscope.hardware.topology import Topology
from meshscope.model.config import read_model
from meshscope.readers.hlo.attribution import MAX_LAYERS
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.traces.sniff import NO_TRACE, check_kind, format_of
from meshscope.readers.traces.trace import TraceFormat
from meshscope.reports.model import plain
from meshscope.store.folder import safe_name, scratch_folder
from meshscope.store.write import HLO
from meshscope.workers import Progress

_ENDINGS = re.compile(r"(\.(gz|txt|hlo|pb|mlir|mlirbc|hlo_module))+$")


@request
class ImportRequest:
    """The options of `import`, by the names of the command line."""

    paths: list[str] = option(
        "FILE...: Optimized HLO text, plain or gzipped; StableHLO, which is compiled. decode=FILE or prefill=FILE: the step that runs it, after those before it. Or traces: a file "
        "for each rank or host, or a folder. gs://, s3:// and other names of fsspec are copied first.",
        converter=texts,
        kw_only=False,
    )
    topology: str | None = option(CompileRequest, default=None)
    plan: str | None = option(CompileRequest, default=None)
    mesh: str | None = option("AXES: Other axes, instead of --plan: data=8,model=8.", default=None)
    device_order: str | None = option(
        "IDS: Devices in the order of the mesh: 0,2,4,6,7,5,3,1.", default=None
    )
    card: Path | None = option(
        "FILE: CCL-Bench card of the traces: their plan and slice.",
        default=None,
        converter=optional_path,
    )
    model: str | None = option(
        "MODEL: Model behind traces, to predict its collectives, or behind a dump of a few layers.",
        default=None,
    )
    phase: Phase | None = option(
        "Phase of a dump whose names do not state it.",
        default=None,
        converter=optional_choice(Phase),
    )
    layers: int | None = option(
        "N: Layers of the whole model, if the dump has only a few.", default=None
    )
    step_lengths: str | None = option(
        "NxQ:K: Sequences of a step on a device: N with Q new tokens at a context of K, for attention "
        "kernels. 64x1:1024, or mixed 63x1:1024,1x2048:8192.",
        default=None,
    )
    out: Path | None = option(CompileRequest, default=None, converter=optional_path)
    force: bool = option(CompileRequest, default=False)
    progress: Progress | None = option(CompileRequest, default=None)

    @property
    def command(self) -> tuple[str, ...]:
        """The command that imports these files."""
        words = option_words({**changed_options(self), "paths": None, "out": self.out}, argument="")
        return ("meshscope", "import", *self.paths, *words)


def import_request(request: ImportRequest) -> Run:
    """Reads optimized HLO text, StableHLO or traces of another tool, and saves a run.

    Collectives get phase, layer and part from the names in the text: op_names, functions, arguments. A
    scheduled TPU program that is one whole phase gets modeled times, too; so does a step of several
    programs, given as `decode=model.txt`, `decode=sampler.txt` in the order of execution.
    StableHLO (`.mlir`, text or bytecode) is compiled for the slice, which needs the extra `tpu`. docs/traces.md
    lists the traces. Files in a store, such as `gs://bucket/trace.json.gz`, need the extra `remote`.

    Example:
        >>> meshscope.import_("module.txt", topology="v6e-8", plan="tp=8").collectives

    Returns:
        A run with the source `compiled`; of traces with the source `measured`, whose `record.measured.findings` say what the capture lacks.

    Raises:
        MeshscopeError: A file cannot be read or does not fit the plan, or the folder exists.
    """
    phases, named = _files(request)
    with scratch_folder() as scratch, fetched(named, scratch) as files:
        for path in files:
            check_kind(path)
        return _imported(request, phases, files, scratch)


import_ = takes("import_", ImportRequest, import_request)


def _imported(
    request: ImportRequest, phases: Sequence[Phase | None], files: Sequence[Path], scratch: Path
) -> Run:
    kinds = [None if path.is_dir() else format_of(path) for path in files]
    is_traced = [p.is_dir() or kind not in NO_TRACE for p, kind in zip(files, kinds, strict=True)]
    if any(is_traced):
        return import_traces(request, files)
    if request.topology is None or request.card is not None:
        for path, kind in zip(files, kinds, strict=True):
            if kind is None:  # not HLO text, which needs another answer
                read_hlo(path)
        raise SpecError(
            "HLO text and StableHLO need --topology, and --plan or --mesh; --card is for traces."
        )
    model = None if request.model is None else read_model(request.model)
    experiment = laid_out(request, request.paths, model)
    if experiment.topology is None or not experiment.mesh:
        raise PlanError(ONE_LAYOUT)
    pairs = zip(files, kinds, strict=True)
    programs = [path for path, kind in pairs if kind is TraceFormat.STABLEHLO]
    made, versions = _compiled(request, programs, experiment.topology, scratch)
    texts = [made.get(path, path) for path in files]
    named = _by_kept_name(texts)
    experiment = replace(
        experiment,
        extended_layers=request.layers or (None if model is None else model.n_layers),
        lengths=request.step_lengths,
        program_phases=dict(zip(named, phases, strict=True)) if any(phases) else None,
        phase=request.phase,
    )
    modules = [read_hlo(text) for text in texts]
    by_name = dict(zip(named, modules, strict=True))
    read = read_imported(experiment, by_name)
    stated = {row.phase for row in (*read.rows, *read.others)} | {request.phase, *phases}
    record = new_record(
        Source.COMPILED,
        experiment,
        request.command,
        phases=[phase for phase in Phase if phase in stated],
        rows=read.rows,
        memory={},
        times=read.times,
        versions=versions,
        other_operations=read.others,
    )
    path = request.out or imported_folder(_ENDINGS.sub("", texts[0].name), experiment)
    kept = {f"{HLO}/{name}": text for name, text in named.items()}
    record = saved(record, path, force=request.force, files=kept, steps=read.steps)
    return Run(record=record)


def _files(request: ImportRequest) -> tuple[list[Phase | None], list[Path]]:
    """The files, and the phases that the user states, as in `decode=model.txt`; SpecError for impossible options."""
    phases: list[Phase | None] = []
    files: list[Path] = []
    for path in request.paths:
        name, separator, rest = path.partition("=")
        is_stated = bool(separator) and name in set(Phase) and not Path(path).exists()
        phases.append(Phase(name) if is_stated else None)
        files.append(path_of(rest if is_stated else path))
    layers = request.layers
    refuse(
        (not files, "there is no file to import. Give the path of HLO text."),
        (
            layers is not None and not 1 <= layers < MAX_LAYERS,
            f"--layers {layers}: expected 1 to {MAX_LAYERS - 1}. Give all layers of the model.",
        ),
    )
    return phases, files


def _compiled(
    request: ImportRequest, programs: Sequence[Path], topology: Topology, scratch: Path
) -> tuple[dict[Path, Path], Mapping[str, str]]:
    """The texts of StableHLO, compiled for the slice, and the compiler's versions."""
    texts: dict[Path, Path] = {}
    versions: Mapping[str, str] = {}
    began_s, progress = time.monotonic(), reporting(request.progress)
    for name, program in _by_kept_name(programs).items():
        text = scratch / f"{_ENDINGS.sub('', name)}.hlo.txt.gz"
        n_done, n_left = len(texts), len(programs) - len(texts)
        left_s = n_left * (time.monotonic() - began_s) / n_done if n_done else None
        step = f"compiling for {topology.name}, {n_done + 1} of {len(programs)}"
        progress(plain(program.name), step, left_s)
        versions = compile_graph(program, topology, text)
        texts[program] = text
        progress(plain(program.name), "done", None)
    return texts, versions


def _by_kept_name(paths: Iterable[Path]) -> dict[str, Path]:
    """The files by their safe names in the run; SpecError for two files of one name."""
    named: dict[str, Path] = {}
    for path in paths:
        if (name := safe_name(path.name)) in named:
            raise SpecError(f"two files are named '{name}'. Rename one, or import them one by one.")
        named[name] = path
    return named


def command(request: ImportRequest, output: RunOutput) -> Shown:
    """Read HLO text, StableHLO or traces from other tools.

    The plan or mesh lays out the devices; no model is needed. Names in HLO text give each collective its layer and
    part. Saves a run. A scheduled TPU program that is one whole phase gets modeled times, too. Traces of the PyTorch
    profiler (vLLM, SGLang), of nsys and of the TPU profiler are recognized by their content; docs/traces.md lists them.
    """
    with WorkProgress() as progress:
        run = import_request(replace(request, progress=progress))
    return shown_run(run, rows=output.rows)
