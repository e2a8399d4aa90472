"""`meshscope import`: HLO text that someone else dumped becomes a run."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from meshscope.backends.compile.import_hlo import read_imported
from meshscope.backends.compile.saved_graph import compile_graph
from meshscope.cli.keeping import keep
from meshscope.cli.making import new_manifest
from meshscope.cli.options import ForceOption, JsonOption, OutOption, PlanOption, TopologyOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.progress import DONE, CompileProgress
from meshscope.cost.timeline import write_timeline
from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import read_hlo
from meshscope.spec.experiment_record import ExperimentRecord
from meshscope.spec.hardware.topology import Topology, parse_topology
from meshscope.spec.plan.plan import Plan, parse_plan
from meshscope.spec.program import Frontend
from meshscope.store.folder import new_folder
from meshscope.store.folder_names import default_folder, safe_name
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO
from meshscope.views.document import run_document
from meshscope.views.plain import plain
from meshscope.views.text import run_text


def command(  # noqa: PLR0913  the options of the command
    dumps: Annotated[
        list[Path],
        typer.Argument(
            metavar="DUMP...",
            help="Optimised HLO text, plain or gzipped; with --frontend torchxla, HLO protos.",
        ),
    ],
    *,
    topology: TopologyOption,
    plan: PlanOption,
    phase: Annotated[
        Phase | None, typer.Option(help="The phase of a dump whose scopes name none.")
    ] = None,
    frontend: Annotated[
        Frontend | None,
        typer.Option(help="torchxla: compile the graphs that torch_xla saved, then read them."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Read what there is of a text that was cut short.")
    ] = False,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read HLO text that someone else dumped, into a run.

    The plan tells how the devices of the dump are laid out; no model is needed. A scheduled text of
    a TPU that is one whole phase has the time of its step, too.
    """
    if frontend is Frontend.JAX:
        raise SpecError("--frontend jax: `compiled.as_text()` is text; leave the option out.")
    with TemporaryDirectory(prefix="meshscope-") as scratch:
        slice_ = parse_topology(topology)
        texts, versions = list(dumps), dict[str, str]()
        if frontend is Frontend.TORCHXLA:
            texts, versions = _compiled(dumps, slice_, Path(scratch))
        run = _imported_run(
            texts,
            origins=dumps,
            versions=versions,
            topology=slice_,
            plan=parse_plan(plan),
            phase=phase,
            is_partial=partial,
            out=out,
            force=force,
        )
    if as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))


def _imported_run(  # noqa: PLR0913  the options of the command
    dumps: Sequence[Path],
    *,
    origins: Sequence[Path],
    versions: Mapping[str, str],
    topology: Topology,
    plan: Plan,
    phase: Phase | None,
    is_partial: bool,
    out: Path | None,
    force: bool,
) -> RunRecord:
    plan = plan.filled(topology.n_devices)
    names = _kept_names(dumps)
    path = out or default_folder(
        dumps[0].name.split(".")[0], topology.name, str(plan).replace("=", "")
    )
    modules = [_read(dump, is_partial=is_partial) for dump in dumps]
    read = read_imported(modules, topology=topology, plan=plan, phase=phase)
    run = RunRecord(
        path=None,
        manifest=new_manifest(
            Source.COMPILED,
            _known(origins, topology, plan, phase),
            phases=_phases(read.rows, phase),
            versions=versions,
        ),
        rows=tuple(read.rows),
        memory={},
        times=tuple(step.time for step in read.steps),
    )
    with new_folder(path, force=force) as partial:
        (partial / HLO).mkdir()
        for dump, name in zip(dumps, names, strict=True):
            shutil.copyfile(dump, partial / HLO / name)
        if read.steps:
            write_timeline(partial, read.steps)
        keep(run, partial)
    return replace(run, path=path)


def _compiled(
    protos: Sequence[Path], topology: Topology, scratch: Path
) -> tuple[list[Path], Mapping[str, str]]:
    """The texts of graphs that torch_xla saved, compiled for the slice, and the compiler's versions."""
    texts: list[Path] = []
    versions: Mapping[str, str] = {}
    began_s = time.monotonic()
    with CompileProgress() as progress:
        for name, proto in zip(_kept_names(protos), protos, strict=True):
            text = scratch / f"{name.removesuffix('.pb')}.hlo.txt.gz"
            n_done, n_left = len(texts), len(protos) - len(texts)
            left_s = n_left * (time.monotonic() - began_s) / n_done if n_done else None
            words = f"compiling for {topology.name}, {n_done + 1} of {len(protos)}"
            progress(plain(proto.name), words, left_s)
            versions = compile_graph(proto, topology, text)
            texts.append(text)
            progress(plain(proto.name), DONE)
    return texts, versions


def _kept_names(dumps: Sequence[Path]) -> list[str]:
    names = [safe_name(dump.name) for dump in dumps]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(
                f"two dumps are called '{name}'. Rename one, or import them one by one."
            )
    return names


def _read(dump: Path, *, is_partial: bool) -> HloModule:
    module = read_hlo(dump, is_partial=is_partial)
    if module.cut_off_at is not None:
        note(f"{dump}:{module.cut_off_at}: the text ends here; what followed is not in the table.")
    return module


def _known(
    dumps: Sequence[Path], topology: Topology, plan: Plan, phase: Phase | None
) -> ExperimentRecord:
    """The parts of the experiment that the user named; `phase` only for dumps whose scopes name none."""
    return ExperimentRecord(
        imported=tuple(map(str, dumps)),
        plan=plan,
        mesh=dict(plan.mesh.axes),
        topology=topology,
        n_devices=topology.n_devices,
        n_chips=topology.n_chips,
        phase=phase,
    )


def _phases(rows: Sequence[Collective], phase: Phase | None) -> list[Phase]:
    found = {row.phase for row in rows} | {phase}
    return [phase for phase in Phase if phase in found]
