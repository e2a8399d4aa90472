"""Compiles one program under many compiler flags, on all cores, and says what each flag changes.

A program with the same canonical text as without flags is unchanged, and is not read again.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from meshscope.backends.compile.function import (
    FunctionCompiler,
    FunctionResult,
    compile_function,
    read_function,
)
from meshscope.cost.steps import NO_MEASURED_BASIS
from meshscope.errors import CompileError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.measured import Flag, FlagEffect
from meshscope.hardware.topology import Topology
from meshscope.programs.environments import Release
from meshscope.readers.hlo.parse import canonical_hash

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram


Listener = Callable[[int, int], None]  # programs compiled, of how many


def flag_effects(
    programs: "Iterable[tuple[Phase, FunctionProgram]]",
    flags: Sequence[Flag],
    topology: Topology,
    *,
    listener: Listener,
    compiler: Release | None = None,
) -> tuple[FlagEffect, ...]:
    """The effect of every flag on every program, in order; `compiler` defaults to this process's."""
    jobs = [(phase, program, flag) for phase, program in programs for flag in flags]
    bases: dict[Phase, tuple[str, FunctionResult]] = {}  # canonical text and result without flags
    for phase, program, _ in jobs:
        if phase not in bases:
            compiled = compile_function(program, topology, compiler=compiler)
            result = read_function(compiled, mesh=program.mesh, topology=topology, phase=phase)
            bases[phase] = canonical_hash(compiled.text), result
    n_workers = min(len(jobs), len(os.sched_getaffinity(0)))
    idle, done = SimpleQueue[FunctionCompiler | None](), SimpleQueue[int]()
    for _ in range(n_workers):
        idle.put(None)
    with ThreadPoolExecutor(n_workers) as threads, ExitStack() as workers:

        def work(job: "tuple[Phase, FunctionProgram, Flag]") -> FlagEffect:
            worker = idle.get()
            try:
                if worker is None or not worker.is_alive:
                    worker = FunctionCompiler(compiler)
                    workers.callback(worker.close)
                effect = _effect(job, topology, bases[job[0]], worker)
            finally:
                idle.put(worker)
            done.put(1)
            listener(done.qsize(), len(jobs))
            return effect

        return tuple(threads.map(work, jobs))


def _effect(
    job: "tuple[Phase, FunctionProgram, Flag]",
    topology: Topology,
    base: tuple[str, FunctionResult],
    worker: FunctionCompiler,
) -> FlagEffect:
    phase, program, flag = job
    options = {**program.compiler_options, flag.name: flag.value}
    flagged = replace(program, compiler_options=options)
    try:
        compiled = compile_function(flagged, topology, compiler=worker.compiler, worker=worker)
    except CompileError as error:
        return FlagEffect(flag=flag, phase=phase, refused=str(error).splitlines()[0][:300])
    digest, before = base
    after, notes = before, list[str]()
    if is_changed := canonical_hash(compiled.text) != digest:
        after = read_function(compiled, mesh=program.mesh, topology=topology, phase=phase)
        for where, result in (("without the flag", before), ("with the flag", after)):
            unmeasured = (note for note in result.step.time.notes if NO_MEASURED_BASIS in note)
            notes += [f"{where}, {note}" for note in unmeasured]
    return FlagEffect(
        flag=flag,
        phase=phase,
        is_changed=is_changed,
        is_other_collectives=_facts(before.rows) != _facts(after.rows),
        step_s=after.step.time.step.value_s,
        total_bytes=after.memory.total_bytes,
        base_step_s=before.step.time.step.value_s,
        base_total_bytes=before.memory.total_bytes,
        notes=tuple(notes),
    )


def _facts(rows: Iterable[Collective]) -> list[tuple[object, ...]]:
    """What the collectives are and how they run, without names and times."""
    names = ("kind", "opcode", "axis", "dtype", "shape", "count", "is_async", "algorithm")
    return sorted((tuple(getattr(row, name) for name in names) for row in rows), key=str)
