"""Runs an experiment on live devices in a worker process and reads its HLO and profile."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshscope.backends.live.measurement import ProfiledProgram, measured_of, summed_rows
from meshscope.backends.live.worker import HLO, TRACE
from meshscope.errors import RunFailedError, SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.measured import Measured, Request, StepCost
from meshscope.hardware.chips import ChipKind
from meshscope.plans.checks import check_program_format
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory, compiled_memory
from meshscope.programs.environments import (
    check_can_run,
    check_torchxla,
    cpu_variables,
    tracing_variables,
)
from meshscope.programs.frontends import frontend_of, program_file
from meshscope.programs.torchxla.configs import check_traceable
from meshscope.readers.hlo.collectives import program_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.xplane import read_profile
from meshscope.serialize import from_plain
from meshscope.store.folder import scratch_folder
from meshscope.store.write import write_table
from meshscope.workers import Progress, WorkerTask, run_worker

WORK = "meshscope.backends.live.worker:run_request"
OPS = "ops.parquet"
LIVE, PROFILE = "devices", "profile"  # subjects of progress reports


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """`warmup` requests, then `repeats` timed requests, then one profiled request.

    `profiled_steps` is its number of decode steps; `seed` determines random weights and prompts.
    """

    repeats: int = 3
    warmup: int = 1
    profiled_steps: int = 4
    seed: int = 0
    prompt_tokens: tuple[int, ...] | None = None
    checkpoint: str | None = None
    coordinator: str | None = None  # HOST:PORT of process 0, if there are several
    process_id: int = 0
    n_processes: int = 1

    def __post_init__(self) -> None:
        """Checks that several processes have a coordinator and valid ids."""
        if (self.coordinator is not None) != (self.n_processes > 1):
            raise SpecError(
                "--coordinator HOST:PORT and --n-processes N (2 or more) need each other. Give every "
                "process the same two and a different --process-id."
            )
        if self.process_id >= self.n_processes:
            raise SpecError(
                f"--process-id {self.process_id} is too large for --n-processes {self.n_processes}. "
                f"Use 0 to {self.n_processes - 1}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A live run: compiled and measured `rows`, and the output `tokens` of each sequence."""

    rows: list[Collective]
    measured: Measured
    memory: Memory
    tokens: list[list[int]]
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    seconds: Mapping[str, float]


def run_experiment(
    experiment: Experiment, folder: Path, options: RunOptions, *, progress: Progress
) -> RunResult:
    """Runs in a worker that writes `hlo/` and `trace/` to `folder`, then reads both."""
    report = run_process(experiment, folder, options, progress=progress)
    progress(PROFILE, "reading", None)
    profile = read_profile(folder / TRACE)
    n_steps = {Phase.PREFILL: 1, Phase.DECODE: len(report["profiled"]["decode_s"])}
    n_steps = {phase: n_steps[phase] for phase in experiment.phases}
    programs = list(profiled_programs(experiment, folder / HLO, n_steps=n_steps))
    compiled = [
        row
        for phase in experiment.phases
        for row in summed_rows([program.rows for program in programs if program.phase is phase])
    ]
    timings = measured_of(profile, programs, n_steps=n_steps)
    write_table(timings.ops, folder / TRACE / OPS)
    requests, step_s = report["requests"], dict[Phase, tuple[float, ...]]()
    if experiment.is_part_of_decode:  # which has steps, no requests
        step_s[Phase.DECODE] = tuple(step for request in requests for step in request["decode_s"])
        requests = ()
    measured = Measured(
        requests=from_plain(tuple[Request, ...], requests),
        step_s=step_s,
        n_profiled_steps=n_steps,
        loads=timings.loads,
        times=timings.times,
        findings=timings.findings,
        # by the compiler; not for loops, whose body counts only once
        costs=tuple(
            StepCost(phase=Phase(phase), **{"flops": None, "accessed_bytes": None, **cost})
            for phase, cost in report["costs"].items()
            if not experiment.is_scanned
        ),
    )
    progress(PROFILE, "done", None)
    return RunResult(
        rows=[*compiled, *timings.rows],
        measured=measured,
        memory=compiled_memory(experiment, report["memory"].values()),
        **{name: report[name] for name in ("tokens", "versions", "flags", "seconds")},
    )


def profiled_programs(
    experiment: Experiment, hlo_dir: Path, *, n_steps: Mapping[Phase, int]
) -> Iterator[ProfiledProgram]:
    """The programs of a run with `n_steps` of each phase in its profile."""
    for phase in experiment.phases:
        n_runs = experiment.prefill_chunks.n_sequence_chunks if phase is Phase.PREFILL else 1
        for program in experiment.programs(phase):
            module = read_hlo(hlo_dir / program_file(program.name))
            rows = program_collectives(experiment, phase, module)
            yield ProfiledProgram(
                phase=phase,
                module=module,
                rows=[replace(row, count=row.count * n_runs) for row in rows],
                n_runs=n_runs * n_steps[phase],
            )


def run_process(
    experiment: Experiment, folder: Path, options: RunOptions, *, progress: Progress
) -> dict[str, Any]:
    """Runs in a worker that writes `hlo/` and `trace/` to `folder`; returns its report.

    With several processes, process 0 gets all profiles.
    """
    if experiment.program.frontend.is_traced:
        _check_torchxla(experiment)
    else:
        check_program_format(experiment)
        check_can_run()
    if experiment.topology.n_devices % options.n_processes:
        raise SpecError(
            f"{experiment.topology.n_devices} devices of '{experiment.topology.name}' are not divisible "
            f"by --n-processes {options.n_processes}."
        )
    (folder / HLO).mkdir(parents=True)
    (folder / TRACE).mkdir()
    request = {
        "experiment": experiment.as_dict(),
        "options": asdict(options),
        "folder": str(folder),
    }
    framework = "JAX" if experiment.program.frontend.is_own else "torch_xla"
    program = (
        f"{experiment.model.name} ({experiment.model.n_layers} layers, plan '{experiment.plan}') "
        f"on {experiment.topology.name}"
    )
    task = WorkerTask(
        process="the worker process",
        activity=f"running {program}",
        rejection=f"{framework} could not run {program}",
        memory_remedy="Use fewer --layers, a smaller --batch, or a machine with more memory.",
        crash_remedy=f"Try other options or another version of {framework}.",
        error=RunFailedError,
    )
    with scratch_folder() as scratch:
        python, variables = frontend_of(experiment).interpreter(experiment.program, scratch)
        variables = {"TF_CPP_MIN_LOG_LEVEL": "2", **variables}
        report = run_worker(
            WORK,
            request,
            scratch,
            task,
            python=python,
            environment=variables | _variables(experiment, options.n_processes),
            part=LIVE,
            progress=progress,
        )
    progress(LIVE, "done", None)
    return report


def _variables(experiment: Experiment, n_processes: int) -> dict[str, str]:
    """The environment variables that JAX and torch_xla read on import; torch_xla only traces."""
    kind, n_devices = experiment.topology.chip.kind, experiment.topology.n_devices
    of_jax = cpu_variables(n_devices // n_processes) if kind is ChipKind.CPU else {}
    is_traced = experiment.program.frontend.is_traced
    return tracing_variables(n_devices) | of_jax if is_traced else of_jax


def _check_torchxla(experiment: Experiment) -> None:
    if experiment.topology.chip.kind is ChipKind.GPU:
        raise SpecError(
            f"'{experiment.topology.name}': --frontend torchxla runs on TPU slices and CPU devices. Use --frontend jax "
            "there, or a TPU slice or --topology cpu:8."
        )
    check_torchxla()
    check_traceable(experiment)
