"""Compiles an experiment with the real compiler on a machine without the chips, and reads the table.

Each phase compiles in a child process; this one starts them, words their failures, and reads the
HLO that they wrote.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.backends.compile.cycles import (
    FLAG,
    Cycles,
    keep_profile,
    profiling_environment,
    read_profile,
)
from meshscope.backends.compile.gpu import check_can_compile_for_gpu
from meshscope.backends.worker_failure import WorkerTask, worker_error
from meshscope.cost.features import expert_load
from meshscope.cost.steps import TimedStep, timed_step
from meshscope.errors import CompileError, MissingToolError, SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.interconnect.profile import ChipProfile
from meshscope.programs.torchxla.configs import transformers_config
from meshscope.programs.torchxla.interpreter import (
    check_torchxla,
    torchxla_environment,
    torchxla_python,
)
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.phases import n_steps_of, phase_collectives
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.plan.memory import Memory, compiled_memory
from meshscope.spec.program import Frontend
from meshscope.workers.failure import failure_of
from meshscope.workers.progress import error_report
from meshscope.workers.spawn import worker_process

Progress = Callable[[Phase, str], None]

POLL_S = 0.05

PROFILE_SUFFIX = ".cycles.json"

CHILD = ("-m", "meshscope.backends.compile.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What the compiler made of an experiment.

    `seconds` is the wall time of each step, by `phase.step`; `devices` tells id and coordinates of
    each position in the mesh; `flags` are what the compiler read from its environment.
    """

    rows: list[Collective]
    memory: Memory
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    devices: list[dict[str, Any]]
    flags: Mapping[str, str]
    steps: tuple[TimedStep, ...] = ()


def compile_experiment(
    experiment: Experiment,
    hlo_dir: Path,
    *,
    progress: Progress,
    cycles: Cycles = Cycles.ESTIMATED,
    chip_profile: ChipProfile | None = None,
) -> CompileResult:
    """Compiles every phase, leaves `PHASE.hlo.txt.gz` and `PHASE.json` in `hlo_dir`, reads rows and times.

    `chip_profile` is a measured one, in place of published figures.
    """
    check_can_compile(experiment)
    phases = experiment.phases
    notes = _compile_phases(experiment, phases, hlo_dir, progress, cycles)
    reports = {
        phase: json.loads((hlo_dir / f"{phase}.json").read_text(encoding="utf-8"))
        for phase in phases
    }
    rows: list[Collective] = []
    steps: list[TimedStep] = []
    seconds: dict[str, float] = {}
    for phase, report in reports.items():
        progress(phase, "reading")
        started = time.perf_counter()
        own, step = read_phase(
            experiment,
            phase,
            hlo_dir / f"{phase}.hlo.txt.gz",
            chip_profile=chip_profile,
            notes=notes,
        )
        rows += own
        steps.append(step)
        seconds |= {f"{phase}.{step}": value for step, value in report["seconds"].items()}
        seconds[f"{phase}.read"] = time.perf_counter() - started
        progress(phase, "done")
    first = reports[phases[0]]
    return CompileResult(
        rows=rows,
        memory=compiled_memory(experiment, (report["memory"] for report in reports.values())),
        versions=first["versions"],
        seconds=seconds,
        devices=first["devices"],
        flags=first["flags"],
        steps=tuple(steps),
    )


def read_phase(
    experiment: Experiment,
    phase: Phase,
    path: Path,
    *,
    chip_profile: ChipProfile | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[list[Collective], TimedStep]:
    """The collectives of one phase's HLO text with their times, and the time of its step.

    A cycle profile that lies beside the text counts in place of the estimates in it.
    """
    module = read_hlo(path)
    found = module_collectives(
        module, mesh=experiment.plan.mesh, crosses_slices=experiment.crosses_slices
    )
    rows = rows_of(
        found,
        n_steps_of=n_steps_of(experiment),
        crosses_slices=experiment.crosses_slices,
        default_phase=phase,
    )
    profile = path.with_name(f"{phase}{PROFILE_SUFFIX}")
    step = timed_step(
        module,
        found,
        phase=phase,
        topology=experiment.topology,
        chip_profile=chip_profile,
        cycle_profile=json.loads(profile.read_text(encoding="utf-8")) if profile.exists() else None,
        experts=expert_load(experiment, phase),
        notes=(*notes, *_loop_notes(experiment, phase)),
    )
    return step.rows(rows), step


def _loop_notes(experiment: Experiment, phase: Phase) -> Iterator[str]:
    is_tpu = experiment.topology.chip.kind is ChipKind.TPU
    if is_tpu and experiment.is_scanned and phase is Phase.DECODE:
        yield (
            "layers are scanned, so that no weights are fetched ahead of their layer; with --loop "
            "unroll a step may take half as long, and compiling several times as long"
        )


def read_rows(experiment: Experiment, phase: Phase, path: Path) -> list[Collective]:
    """The collectives of one phase's HLO text, attributed to the experiment's plan."""
    return phase_collectives(experiment, phase, read_hlo(path))


def check_can_compile(experiment: Experiment) -> None:
    """Refuses what the compilers of TPUs and GPUs cannot do, before any process starts."""
    topology, is_torchxla = experiment.topology, experiment.program.frontend is Frontend.TORCHXLA
    if topology.chip.kind is ChipKind.CPU:
        raise SpecError(
            f"'{topology.name}' is no TPU and no GPU; compile needs a slice of chips, e.g. v6e-8 or "
            "h100:8. For CPU devices use predict, or run."
        )
    if topology.chip.kind is ChipKind.GPU and is_torchxla:
        raise SpecError(
            f"'{topology.name}' is no TPU; programs of torch_xla are compiled for TPUs alone, e.g. "
            "v6e-8. Leave --frontend out for GPUs."
        )
    if topology.chip.kind is ChipKind.GPU:
        check_can_compile_for_gpu(topology)
        return
    if is_torchxla:
        check_torchxla()
        transformers_config(experiment.model)
        return
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingToolError(
            f"compile needs {' and '.join(missing)}, not installed here "
            f"({platform.system()} {platform.machine()}). "
            'Install the extra: pip install "meshscope[tpu]" (Linux x86-64).'
        )


def _compile_phases(
    experiment: Experiment,
    phases: tuple[Phase, ...],
    hlo_dir: Path,
    progress: Progress,
    cycles: Cycles,
) -> tuple[str, ...]:
    """Compiles the phases; with the compiler's cycle profile where it is asked for and to be had.

    Says why, where it is not: an internal flag may go with any libtpu.
    """
    if cycles is Cycles.PROFILE and experiment.topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            "--cycles profile is an account of the TPU compiler. Leave it out for GPUs."
        )
    if cycles is Cycles.ESTIMATED:
        _run_children(experiment, phases, hlo_dir, progress)
        return ()
    with tempfile.TemporaryDirectory(prefix="meshscope-cycles-") as folder:
        try:
            _run_children(experiment, phases, hlo_dir, progress, Path(folder))
        except CompileError as error:
            _run_children(experiment, phases, hlo_dir, progress)
            return (f"no cycle profile, for with {FLAG} compiling failed: {str(error)[:200]}",)
        profiles = {phase: read_profile(Path(folder) / phase.value) for phase in phases}
    for phase, profile in profiles.items():
        keep_profile(hlo_dir / f"{phase}{PROFILE_SUFFIX}", profile)
    if not all(profiles.values()):
        return (f"no cycle profile, for this libtpu writes none with {FLAG}",)
    return ()


def _run_children(
    experiment: Experiment,
    phases: tuple[Phase, ...],
    hlo_dir: Path,
    progress: Progress,
    cycles_dir: Path | None = None,
) -> None:
    """Runs one child a phase, side by side; the first failure stops the others."""
    with tempfile.TemporaryDirectory(prefix="meshscope-") as scratch:
        experiment_file = Path(scratch) / "experiment.json"
        experiment_file.write_text(json.dumps(experiment.as_dict()), encoding="utf-8")
        with ExitStack() as held:
            waiting: dict[Phase, subprocess.Popen[bytes]] = {}
            for phase in phases:
                own_dir = None if cycles_dir is None else cycles_dir / phase.value
                child = _held(experiment, experiment_file, hlo_dir, phase, own_dir)
                waiting[phase] = held.enter_context(child)
                progress(phase, "compiling")
            while waiting:
                for phase in [p for p, child in waiting.items() if child.poll() is not None]:
                    returncode = waiting.pop(phase).returncode
                    if returncode:
                        errors = error_report(experiment_file, phase)
                        failure = failure_of(returncode, errors, _log(experiment_file, phase))
                        raise worker_error(_task(experiment, phase), failure)
                    progress(phase, "compiled")
                time.sleep(POLL_S)


def _log(experiment_file: Path, phase: Phase) -> Path:
    return experiment_file.with_name(f"{phase}.log")


def _held(
    experiment: Experiment,
    experiment_file: Path,
    out_dir: Path,
    phase: Phase,
    cycles_dir: Path | None,
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The child of a phase, in the Python that has its front end; its log is beside the experiment."""
    is_torchxla = experiment.program.frontend is Frontend.TORCHXLA
    environment = torchxla_environment() if is_torchxla else dict(os.environ)
    if cycles_dir is not None:
        cycles_dir.mkdir()
        environment = profiling_environment(environment, cycles_dir)
    return worker_process(
        (*CHILD, str(experiment_file), str(out_dir), phase.value),
        _log(experiment_file, phase),
        python=torchxla_python() if is_torchxla else sys.executable,
        environment=environment,
        is_heard=False,
    )


def _task(experiment: Experiment, phase: Phase) -> WorkerTask:
    compiler = f"the {experiment.topology.chip.kind.upper()} compiler"
    program = (
        f"{phase} of {experiment.model.name} ({experiment.model.n_layers} layers, "
        f"plan '{experiment.plan}') for {experiment.topology.name}"
    )
    return WorkerTask(
        process=compiler,
        activity=f"compiling {program}",
        rejection=f"{compiler} rejected {program}",
        memory_remedy="Use --loop scan, fewer --layers, or a machine with more memory.",
        crash_remedy=(
            "Try another --prompt or --loop, another topology, or another version of the compiler."
        ),
        error=CompileError,
    )
