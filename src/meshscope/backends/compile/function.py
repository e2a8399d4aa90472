"""Compiles a user's function for a slice without the hardware, and reads its collectives.

A worker process, started on first use and kept, owns the compiler: its crash becomes a message, and the next
program starts another worker. A program is also compiled under many flags, on all cores: one with the same
canonical text as without flags is unchanged, and is not read again.
"""

import atexit
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.backends.compile.cache import REPORT_NAME, kept_program, kept_report, new_program
from meshscope.backends.compile.worker import FLAGS
from meshscope.cost.steps import NO_MEASURED_BASIS, TimedStep, timed_step
from meshscope.errors import CompileError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.measured import Flag, FlagEffect
from meshscope.hardware.topology import Topology
from meshscope.plans.memory import Memory, TempBasis
from meshscope.plans.mesh import Mesh
from meshscope.programs.environments import Release, lone_variables
from meshscope.readers.hlo.collectives import ModuleCollectives, module_collectives
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import canonical_hash, read_hlo
from meshscope.serialize import picked, to_plain
from meshscope.store.folder import scratch_folder
from meshscope.workers import Worker, WorkerTask, n_available_cores

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram

WORK = "meshscope.backends.compile.worker:compile_function"
HLO_NAME = "step.hlo.txt.gz"
REPORTED = {"memory", "versions", "seconds"}  # what the worker reports
NEWER_KERNEL = re.compile(r"Mosaic module: .*Unsupported version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFunction:
    """A compiled function: its HLO text and the worker's report."""

    text: Path
    memory: Mapping[str, int]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]


class FunctionCompiler:
    """A worker process that compiles programs one after the other, perhaps with a `compiler` of its own."""

    def __init__(self, compiler: Release | None = None) -> None:
        self.compiler = compiler
        self._is_other = compiler is not None and not compiler.is_own
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(scratch_folder())
        worker = Worker(
            WORK,
            self._folder,
            python=sys.executable if compiler is None else compiler.python,
            environment=lone_variables(self._folder) if self._is_other else None,
        )
        self.worker = self._resources.enter_context(worker)

    def compile(
        self, program: "FunctionProgram", topology: Topology, folder: Path
    ) -> dict[str, Any]:
        """Compiles into the folder, HLO text and report, and returns the report; CompileError if the compiler fails."""
        bytecode = program.stablehlo
        if self._is_other:
            from meshscope.programs.jax.stablehlo import portable_text  # noqa: PLC0415  imports JAX

            bytecode = portable_text(bytecode)  # which its MLIR reads
        module = self._folder / "program"
        module.write_bytes(bytecode)
        request = {
            "program": str(module),
            "topology": topology.name,
            "options": compile_options(program),
            "text": str(folder / HLO_NAME),
        }
        name = "the TPU compiler" if self.compiler is None else self.compiler.label
        try:
            report = self.worker.do(request, compiling(name, program.name, topology))
        except CompileError as error:
            if self.compiler is None or not NEWER_KERNEL.search(str(error)):
                raise
            raise CompileError(
                f"{program.name} has a Pallas kernel that {name} cannot read: it was traced by JAX "
                f"{version('jax')}, which is newer. Use a compiler as new as that, or leave the kernel out."
            ) from error
        (folder / REPORT_NAME).write_text(json.dumps(report), encoding="utf-8")
        return report

    @property
    def is_alive(self) -> bool:
        """Whether the worker can take another program."""
        return self.worker.process.poll() is None

    def close(self) -> None:
        """Ends the worker."""
        self._resources.close()


def compiling(compiler: str, program: str, topology: Topology) -> WorkerTask:
    """What a worker does that compiles a program."""
    return WorkerTask(
        process=compiler,
        activity=f"compiling {program} for {topology.name}",
        rejection=f"{compiler} rejected {program} for {topology.name}",
        memory_remedy="Use a smaller program, or a machine with more memory.",
        crash_remedy="Try another topology or another version of libtpu.",
        error=CompileError,
    )


_compilers: dict[tuple[str, ...], FunctionCompiler] = {}


def function_compiler(compiler: Release | None = None) -> FunctionCompiler:
    """The worker of this process, started on first use and after a crash or a change of flags."""
    python = "" if compiler is None else compiler.python
    key = (python, *(os.environ.get(name, "") for name in FLAGS))
    worker = _compilers.get(key)
    if worker is None or not worker.is_alive:
        if worker is not None:
            worker.close()
        if not _compilers:
            atexit.register(close_compilers)
        worker = _compilers[key] = FunctionCompiler(compiler)
    return worker


def close_compilers() -> None:
    """Ends all workers of this process."""
    while _compilers:
        _compilers.popitem()[1].close()


def compile_options(program: "FunctionProgram") -> dict[str, Any]:
    """The options of a request, as JSON values."""
    propagates = ("propagates_to_parameters", "propagates_to_outputs")
    return to_plain(picked(program, "is_tupled", "is_shardy", *propagates, "compiler_options"))


def compile_function(
    program: "FunctionProgram",
    topology: Topology,
    *,
    is_cached: bool = True,
    compiler: Release | None = None,
    worker: FunctionCompiler | None = None,
) -> CompiledFunction:
    """The compiled program, from the cache if the same one was compiled before."""
    home = program_home(program, topology, compiler)
    report = kept_report(home, lambda _: [HLO_NAME]) if is_cached else None
    if report is None or set(report) != REPORTED:
        compiling_with = worker or function_compiler(compiler)
        with new_program(home) as folder:
            report = compiling_with.compile(program, topology, folder)
    return CompiledFunction(text=home / HLO_NAME, **report)


def program_home(
    program: "FunctionProgram", topology: Topology, compiler: Release | None = None
) -> Path:
    """The folder that keeps the compiled program."""
    facts = {
        "program": program.digest,
        "topology": topology.name,
        "options": compile_options(program),
    }
    return kept_program(facts, None if compiler is None else compiler.pins)


def read_function(
    compiled: CompiledFunction,
    *,
    mesh: Sequence[tuple[str, int]],
    topology: Topology,
    phase: Phase | None = None,
) -> tuple[list[Collective], TimedStep]:
    """The rows and the time of the compiled program, which is one step, by the phase of `function_rows`."""
    module, layout = read_hlo(compiled.text), Mesh(axes=tuple(mesh))
    of_step, collectives, rows = function_rows(module, mesh=layout, topology=topology, phase=phase)
    step = timed_step(module, collectives, phase=of_step, topology=topology)
    return step.rows(rows), step


def function_rows(
    module: HloModule, *, mesh: Mesh, topology: Topology, phase: Phase | None
) -> tuple[Phase, ModuleCollectives, list[Collective]]:
    """The phase of a function, by `phase`, its scopes or else `step`, and its collectives."""
    collectives = module_collectives(module, mesh=mesh, crosses_slices=topology.crosses_slices)
    rows = collectives.rows(default_phase=phase or Phase.STEP)
    phases = {row.phase for row in rows}
    of_scopes = phases.pop() if len(phases) == 1 else None
    step = phase or of_scopes or Phase.STEP
    return step, collectives, [replace(row, phase=step) for row in rows]


def function_memory(analysis: Mapping[str, int], topology: Topology) -> Memory:
    """Bytes on one device by the compiler's memory analysis."""
    output_bytes = analysis["output_bytes"] - analysis["alias_bytes"]
    total_bytes = analysis["argument_bytes"] + output_bytes + analysis["temp_bytes"]
    hbm_bytes = topology.chip.device_hbm_bytes
    return Memory(
        weights_bytes=None,
        kv_cache_bytes=None,
        argument_bytes=analysis["argument_bytes"],
        output_bytes=output_bytes,
        temp_bytes=analysis["temp_bytes"],
        total_bytes=total_bytes,
        hbm_bytes=hbm_bytes,
        fits=None if hbm_bytes is None else total_bytes <= hbm_bytes,
        temp_basis=TempBasis.COMPILER,
    )


# What compiler flags change.

Listener = Callable[[int, int], None]  # programs compiled, of how many
_Read = tuple[CompiledFunction, str, list[Collective], TimedStep]  # with its canonical text


def flag_effects(
    programs: Iterable[tuple[Phase, "FunctionProgram"]],
    flags: Sequence[Flag],
    topology: Topology,
    *,
    listener: Listener,
    compiler: Release | None = None,
) -> tuple[FlagEffect, ...]:
    """The effect of every flag on every program, in order; `compiler` defaults to this process's."""
    jobs = [(phase, program, flag) for phase, program in programs for flag in flags]
    bases: dict[Phase, _Read] = {}
    for phase, program, _ in jobs:
        if phase not in bases:
            compiled = compile_function(program, topology, compiler=compiler)
            rows = read_function(compiled, mesh=program.mesh, topology=topology, phase=phase)
            bases[phase] = (compiled, canonical_hash(compiled.text), *rows)
    n_workers = min(len(jobs), n_available_cores())
    local, done = threading.local(), count(1)
    with ThreadPoolExecutor(n_workers) as threads, ExitStack() as workers:

        def work(job: tuple[Phase, "FunctionProgram", Flag]) -> FlagEffect:
            worker: FunctionCompiler | None = getattr(local, "worker", None)
            if worker is None or not worker.is_alive:
                worker = local.worker = FunctionCompiler(compiler)
                workers.callback(worker.close)
            effect = _effect(job, topology, bases[job[0]], worker)
            listener(next(done), len(jobs))
            return effect

        return tuple(threads.map(work, jobs))


def _effect(
    job: tuple[Phase, "FunctionProgram", Flag],
    topology: Topology,
    base: _Read,
    worker: FunctionCompiler,
) -> FlagEffect:
    phase, program, flag = job
    options = {**program.compiler_options, flag.name: flag.value}
    flagged = replace(program, compiler_options=options)
    try:
        compiled = compile_function(flagged, topology, compiler=worker.compiler, worker=worker)
    except CompileError as error:
        return FlagEffect(flag=flag, phase=phase, refused=str(error).splitlines()[0][:300])
    unflagged, digest, rows_before, before = base
    rows, after, notes = rows_before, before, list[str]()
    if is_changed := canonical_hash(compiled.text) != digest:
        rows, after = read_function(compiled, mesh=program.mesh, topology=topology, phase=phase)
        for where, step in (("without the flag", before), ("with the flag", after)):
            unmeasured = (note for note in step.time.notes if NO_MEASURED_BASIS in note)
            notes += [f"{where}, {note}" for note in unmeasured]
    return FlagEffect(
        flag=flag,
        phase=phase,
        is_changed=is_changed,
        is_other_collectives=_facts(rows_before) != _facts(rows),
        step_s=after.time.step.value_s,
        total_bytes=function_memory(compiled.memory, topology).total_bytes,
        base_step_s=before.time.step.value_s,
        base_total_bytes=function_memory(unflagged.memory, topology).total_bytes,
        notes=tuple(notes),
    )


def _facts(rows: Iterable[Collective]) -> list[tuple[object, ...]]:
    """What the collectives are and how they run, without names and times."""
    names = ("kind", "opcode", "axis", "dtype", "shape", "count", "is_async", "algorithm")
    return sorted((tuple(getattr(row, name) for name in names) for row in rows), key=str)
