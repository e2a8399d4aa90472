"""Compiles an experiment for TPUs or GPUs without the hardware, and reads its collectives.

Each program compiles in a worker process. This module starts the workers, reports their failures and
reads the HLO text that they write. The program of all layers, scanned if they are many, gives counts,
bytes and memory; if they are scanned, a shallow unrolled program gives the time.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshscope.backends.compile.cache import (
    REPORT_NAME,
    kept_program,
    kept_report,
    new_program,
    source_digest,
)
from meshscope.backends.compile.read import (
    FIRST_CHUNK,
    UNROLLED,
    ReadPrograms,
    read_chunks,
    read_timed,
)
from meshscope.cost.steps import TimedStep, prefill_time
from meshscope.errors import CompileError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.model.layers import ShallowLayers
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory, compiled_memory
from meshscope.programs.environments import Release, lone_variables
from meshscope.programs.frontends import frontend_of, program_file
from meshscope.store.folder import scratch_folder
from meshscope.units import format_seconds
from meshscope.workers import Progress, Worker, WorkerTask

WORK = "meshscope.backends.compile.worker:compile_phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """A compiled experiment: `times` of its phases, and `steps`, their programs on their timeline.

    `seconds` is the wall time by `phase.step`. The unrolled programs have `timed_layers`, if not all layers.
    """

    rows: list[Collective]
    memory: Memory
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    flags: Mapping[str, str]
    times: tuple[StepTime, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    timed_layers: ShallowLayers | None = None
    code_bytes: int | None = None  # without shallow programs; older reports lack it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """The program of one phase, of a `chunk` of a split prompt, and the folder for its HLO and its report."""

    experiment: Experiment
    phase: Phase
    folder: Path
    chunk: int = -1

    @property
    def text(self) -> Path:
        return self.folder / program_file(self.phase)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / f"{self.phase}.json").read_text(encoding="utf-8"))

    def texts(self, report: Mapping[str, Any]) -> list[str]:
        """The files of its HLO, one for each program of the step."""
        return [program_file(self.phase, name) for name in report["programs"]]

    def is_taken(self, home: Path) -> bool:
        """Whether it is kept in `home`, from where its texts and its report are copied."""
        report, started = kept_report(home, self.texts), time.perf_counter()
        if report is None:
            return False
        for text in self.texts(report):
            shutil.copyfile(home / text, self.folder / text)
        self.write({**report, "seconds": {"cache": time.perf_counter() - started}})
        return True

    def keep(self, home: Path, report: Mapping[str, Any]) -> None:
        """Keeps it in `home`; without a folder that can be written, the next run compiles again."""
        with suppress(OSError), new_program(home) as folder:
            for text in self.texts(report):
                shutil.copyfile(self.folder / text, folder / text)
            (folder / REPORT_NAME).write_text(json.dumps(report), encoding="utf-8")

    def write(self, report: Mapping[str, Any]) -> None:
        path = self.folder / f"{self.phase}.json"
        path.write_text(json.dumps(report), encoding="utf-8")


def compile_experiment(  # noqa: PLR0913  what a compilation depends on
    experiment: Experiment,
    hlo_dir: Path,
    *,
    progress: Progress,
    chip_profile: ChipProfile | None = None,
    compiler: Release | None = None,
    phases: Sequence[Phase] | None = None,
) -> CompileResult:
    """Compiles the phases, by default all, writes `PHASE.hlo.txt.gz` and `PHASE.json` to `hlo_dir`, and reads them.

    A measured `chip_profile` replaces the published constants. `compiler` defaults to this process's.
    """
    layers, phases = experiment.shallow_layers, phases or experiment.phases
    programs = [one for one in _programs(experiment, hlo_dir) if one.phase in phases]
    shallow = [] if layers is None else list(_shallow_programs(programs, layers))
    read_s: dict[str, float] = {}
    read: dict[Phase, ReadPrograms] = {}

    def read_compiled(phase: Phase) -> None:
        progress(phase, "reading", None)
        started = time.perf_counter()
        read[phase] = read_chunks(
            experiment, phase, hlo_dir, layers=layers, chip_profile=chip_profile
        )
        read_s[f"{phase}.read"] = time.perf_counter() - started
        (time_of_step,) = read[phase].times
        progress(phase, f"done, {format_seconds(time_of_step.step.value_s)}", None)

    _run_workers([*programs, *shallow], progress, compiler, compiled=read_compiled)
    reports = [program.report for program in programs]
    seconds = _seconds(programs) | _seconds(shallow, f".{UNROLLED}") | read_s
    every = [read[phase] for phase in phases]
    codes = [report["memory"].get("code_bytes") for report in reports]
    first = reports[0]
    return CompileResult(
        rows=[row for one in every for row in one.rows],
        memory=compiled_memory(experiment, (report["memory"] for report in reports)),
        versions=first["versions"],
        seconds=seconds,
        flags=first["flags"],
        times=tuple(time for one in every for time in one.times),
        steps=tuple(step for one in every for step in one.steps),
        timed_layers=layers,
        code_bytes=None if None in codes else sum(filter(None, codes)),
    )


def compile_step_time(
    experiment: Experiment, phase: Phase, hlo_dir: Path, *, progress: Progress
) -> StepTime:
    """The time of one phase, from only the programs that give it; compiles what `hlo_dir` lacks."""
    layers = experiment.shallow_layers
    timed = [program for program in _programs(experiment, hlo_dir) if program.phase is phase]
    if layers is not None:
        timed = list(_shallow_programs(timed, layers))
    _run_workers([program for program in timed if not program.text.exists()], progress)
    times = [
        read_timed(program.experiment, phase, program.text, layers=layers)[1].time
        for program in timed
    ]
    return prefill_time(times, experiment.prefill_chunks) if phase is Phase.PREFILL else times[0]


def _programs(experiment: Experiment, hlo_dir: Path) -> Iterator[_Program]:
    """The programs of all layers: one per phase, and the first chunk of a prompt besides the last."""
    for phase in experiment.phases:
        is_served = experiment.program.frontend.is_served  # chunks differ only in its arguments
        if len(experiment.programs(phase)) > 1 and not is_served:
            folder = hlo_dir / FIRST_CHUNK
            folder.mkdir(exist_ok=True)
            yield _Program(experiment=experiment, phase=phase, folder=folder, chunk=0)
        yield _Program(experiment=experiment, phase=phase, folder=hlo_dir)


def _shallow_programs(programs: Iterable[_Program], layers: ShallowLayers) -> Iterator[_Program]:
    for program in programs:
        folder = program.folder / UNROLLED
        folder.mkdir(exist_ok=True)
        yield replace(program, experiment=program.experiment.unrolled(layers), folder=folder)


def _seconds(programs: Sequence[_Program], suffix: str = "") -> dict[str, float]:
    return {
        f"{program.phase}{'.first' if program.chunk == 0 else ''}{suffix}.{name}": seconds
        for program in programs
        for name, seconds in program.report["seconds"].items()
    }


def _run_workers(
    programs: Sequence[_Program],
    progress: Progress,
    compiler: Release | None = None,
    *,
    compiled: Callable[[Phase], None] = lambda _: None,
) -> None:
    """Runs one worker per program concurrently; the first failure stops the others.

    Programs that are kept from an earlier run are taken. Calls `compiled` with each phase that has all its programs.
    """
    with (
        scratch_folder() as scratch,
        ThreadPoolExecutor(len(programs) or 1) as threads,
        ExitStack() as workers,
    ):
        running: dict[Future[Any], _Program] = {}
        kept: dict[_Program, Path] = {}
        is_own = compiler is None or compiler.is_own
        for number, program in enumerate(programs):
            request = {
                "experiment": program.experiment.as_dict(),
                "phase": program.phase.value,
                "chunk": program.chunk,
            }
            if is_own and not program.experiment.program.frontend.is_traced:
                home = kept[program] = kept_program({**request, "source": source_digest()})
                if program.is_taken(home):
                    continue
            folder, experiment = scratch / str(number), program.experiment
            folder.mkdir()
            if compiler is not None and not is_own:
                python, environment = compiler.python, lone_variables(folder)
            else:
                adapter = frontend_of(experiment)
                python, environment = adapter.interpreter(experiment.program, folder)
            worker = Worker(WORK, folder, python=python, environment=environment)
            request["folder"] = str(program.folder)
            do = workers.enter_context(worker).do
            running[threads.submit(do, request, _task(program, compiler))] = program
        for phase in dict.fromkeys(program.phase for program in programs):
            if step := _compiling(running.values(), phase):
                progress(phase, step, None)
            else:
                compiled(phase)
        for done in as_completed(list(running)):
            program = running.pop(done)
            report = done.result()
            program.write(report)
            if program in kept:
                program.keep(kept[program], report)
            if step := _compiling(running.values(), program.phase):
                progress(program.phase, step, None)
            else:
                compiled(program.phase)


def _compiling(running: Iterable[_Program], phase: Phase) -> str | None:
    experiments = [program.experiment for program in running if program.phase is phase]
    labels = [
        f"{e.model.n_layers} {'scanned' if e.is_scanned else 'unrolled'} layers"
        for e in experiments
    ]
    return f"compiling {' and '.join(labels)}" if labels else None


def _task(target: _Program, compiler: Release | None) -> WorkerTask:
    experiment = target.experiment
    name = f"the {experiment.topology.chip.kind.upper()} compiler"
    if compiler is not None:
        name = compiler.name
    if experiment.program.engine_version is not None:
        name = f"{experiment.program.frontend} {experiment.program.engine_version}"
    program = (
        f"{target.phase} of {experiment.model.name} ({experiment.model.n_layers} layers, "
        f"plan '{experiment.plan}') for {experiment.topology.name}"
    )
    return WorkerTask(
        process=name,
        activity=f"compiling {program}",
        rejection=f"{name} rejected {program}",
        memory_remedy="Use --loop scan, fewer --layers, or a machine with more memory.",
        crash_remedy=(
            "Try another --prompt or --loop, another topology, or another version of the compiler."
        ),
        error=CompileError,
    )
