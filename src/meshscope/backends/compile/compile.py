"""Compiles an experiment for TPUs or GPUs without the hardware, and reads its collectives.

Each phase compiles in a worker process. This module starts the workers, reports their failures and
reads the HLO text that they write.
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
    profiling_environment,
    read_profile,
    write_profile,
)
from meshscope.backends.compile.gpu import check_can_compile_for_gpu
from meshscope.backends.worker_failure import WorkerTask, worker_error
from meshscope.cost.expert_load import expert_load
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

WORKER = ("-m", "meshscope.backends.compile.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """A compiled experiment.

    `seconds` is the wall time of each step, by `phase.step`; `devices` has the ID and coordinates of
    each device in mesh order; `flags` are the compiler flags from the environment.
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
    """Compiles every phase, writes `PHASE.hlo.txt.gz` and `PHASE.json` to `hlo_dir`, and reads them.

    A measured `chip_profile` replaces the published constants.
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
        phase_rows, step = read_phase(
            experiment,
            phase,
            hlo_dir / f"{phase}.hlo.txt.gz",
            chip_profile=chip_profile,
            notes=notes,
        )
        rows += phase_rows
        steps.append(step)
        seconds |= {f"{phase}.{name}": value for name, value in report["seconds"].items()}
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

    A cycle profile beside the text overrides the cycle estimates in the text.
    """
    module = read_hlo(path)
    collectives = module_collectives(
        module, mesh=experiment.plan.mesh, crosses_slices=experiment.crosses_slices
    )
    rows = rows_of(
        collectives,
        n_steps_of=n_steps_of(experiment),
        crosses_slices=experiment.crosses_slices,
        default_phase=phase,
    )
    profile = path.with_name(f"{phase}{PROFILE_SUFFIX}")
    step = timed_step(
        module,
        collectives,
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
            "scanned layers cannot prefetch the weights of the next layer; with --loop unroll, a step "
            "may take half as long and compilation several times as long"
        )


def read_rows(experiment: Experiment, phase: Phase, path: Path) -> list[Collective]:
    """The collectives of one phase's HLO text, attributed to the experiment's plan."""
    return phase_collectives(experiment, phase, read_hlo(path))


def check_can_compile(experiment: Experiment) -> None:
    """Raises an error if the experiment cannot be compiled here."""
    topology, is_torchxla = experiment.topology, experiment.program.frontend is Frontend.TORCHXLA
    if topology.chip.kind is ChipKind.CPU:
        raise SpecError(
            f"'{topology.name}' is neither a TPU nor a GPU slice; compile needs one, e.g. v6e-8 or "
            "h100:8. For CPU devices use predict or run."
        )
    if topology.chip.kind is ChipKind.GPU and is_torchxla:
        raise SpecError(
            f"'{topology.name}' is not a TPU slice; torch_xla programs compile only for TPUs, e.g. "
            "v6e-8. Omit --frontend for GPUs."
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
            f"compile needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            f"not installed ({platform.system()} {platform.machine()}). "
            "Install the extra: pip install -e '.[tpu]' in your clone (Linux x86-64)."
        )


def _compile_phases(
    experiment: Experiment,
    phases: tuple[Phase, ...],
    hlo_dir: Path,
    progress: Progress,
    cycles: Cycles,
) -> tuple[str, ...]:
    """Compiles the phases, with the compiler's cycle profile if requested.

    Returns notes that explain a missing profile: any libtpu version may drop the internal flag.
    """
    if cycles is Cycles.PROFILE and experiment.topology.chip.kind is not ChipKind.TPU:
        raise SpecError("--cycles profile needs the TPU compiler. Omit it for GPUs.")
    if cycles is Cycles.ESTIMATED:
        _run_workers(experiment, phases, hlo_dir, progress)
        return ()
    with tempfile.TemporaryDirectory(prefix="meshscope-cycles-") as folder:
        try:
            _run_workers(experiment, phases, hlo_dir, progress, Path(folder))
        except CompileError as error:
            _run_workers(experiment, phases, hlo_dir, progress)
            return (f"no cycle profile: compiling with {FLAG} failed: {str(error)[:200]}",)
        profiles = {phase: read_profile(Path(folder) / phase.value) for phase in phases}
    for phase, profile in profiles.items():
        write_profile(hlo_dir / f"{phase}{PROFILE_SUFFIX}", profile)
    if not all(profiles.values()):
        return (f"no cycle profile: this libtpu writes none with {FLAG}",)
    return ()


def _run_workers(
    experiment: Experiment,
    phases: tuple[Phase, ...],
    hlo_dir: Path,
    progress: Progress,
    cycles_dir: Path | None = None,
) -> None:
    """Runs one worker per phase concurrently; the first failure stops the others."""
    with tempfile.TemporaryDirectory(prefix="meshscope-") as scratch:
        experiment_file = Path(scratch) / "experiment.json"
        experiment_file.write_text(json.dumps(experiment.as_dict()), encoding="utf-8")
        with ExitStack() as workers:
            running: dict[Phase, subprocess.Popen[bytes]] = {}
            for phase in phases:
                phase_dir = None if cycles_dir is None else cycles_dir / phase.value
                worker = _worker(experiment, experiment_file, hlo_dir, phase, phase_dir)
                running[phase] = workers.enter_context(worker)
                progress(phase, "compiling")
            while running:
                for phase in [p for p, worker in running.items() if worker.poll() is not None]:
                    returncode = running.pop(phase).returncode
                    if returncode:
                        errors = error_report(experiment_file, phase)
                        failure = failure_of(returncode, errors, _log(experiment_file, phase))
                        raise worker_error(_task(experiment, phase), failure)
                    progress(phase, "compiled")
                time.sleep(POLL_S)


def _log(experiment_file: Path, phase: Phase) -> Path:
    return experiment_file.with_name(f"{phase}.log")


def _worker(
    experiment: Experiment,
    experiment_file: Path,
    out_dir: Path,
    phase: Phase,
    cycles_dir: Path | None,
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The worker of a phase, run by the Python that has its frontend; it logs to `_log`."""
    is_torchxla = experiment.program.frontend is Frontend.TORCHXLA
    environment = torchxla_environment() if is_torchxla else dict(os.environ)
    if cycles_dir is not None:
        cycles_dir.mkdir()
        environment = profiling_environment(environment, cycles_dir)
    return worker_process(
        (*WORKER, str(experiment_file), str(out_dir), phase.value),
        _log(experiment_file, phase),
        python=torchxla_python() if is_torchxla else sys.executable,
        environment=environment,
        is_piped=False,
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
