"""Compiles one program under many compiler flags, on all cores, and says what each flag changes.

A program whose canonical text is that of the program without flags is unchanged, and is not read again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

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
from meshscope.programs.environments import Compiler
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
    compiler: Compiler | None = None,
) -> tuple[FlagEffect, ...]:
    """The effect of every flag on every program, in order; `compiler` is another than that of this process."""
    jobs = [(phase, program, flag) for phase, program in programs for flag in flags]
    bases = {
        phase: _base(program, topology, phase, compiler)
        for phase, program in {phase: program for phase, program, _ in jobs}.items()
    }
    with _Compilers(min(len(jobs), _n_cores()), compiler) as compilers:
        done = SimpleQueue[int]()

        def work(job: "tuple[Phase, FunctionProgram, Flag]") -> FlagEffect:
            phase, program, flag = job
            effect = compilers.use(
                lambda worker: _effect(flag, program, topology, bases[phase], worker)
            )
            done.put(1)
            listener(done.qsize(), len(jobs))
            return effect

        return tuple(compilers.map(work, jobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The program without flags."""

    phase: Phase
    digest: str
    result: FunctionResult


def _base(
    program: "FunctionProgram", topology: Topology, phase: Phase, compiler: Compiler | None
) -> _Base:
    compiled = compile_function(program, topology, compiler=compiler)
    result = read_function(compiled, mesh=program.mesh, topology=topology, phase=phase)
    return _Base(phase=phase, digest=canonical_hash(compiled.text), result=result)


def _effect(
    flag: Flag,
    program: "FunctionProgram",
    topology: Topology,
    base: _Base,
    worker: FunctionCompiler,
) -> FlagEffect:
    options = {**program.compiler_options, flag.name: flag.value}
    flagged = replace(program, compiler_options=options)
    try:
        compiled = compile_function(flagged, topology, compiler=worker.compiler, worker=worker)
    except CompileError as error:
        return FlagEffect(flag=flag, phase=base.phase, refused=str(error).splitlines()[0][:300])
    before = base.result
    is_changed = canonical_hash(compiled.text) != base.digest
    after = (
        read_function(compiled, mesh=program.mesh, topology=topology, phase=base.phase)
        if is_changed
        else before
    )
    return FlagEffect(
        flag=flag,
        phase=base.phase,
        is_changed=is_changed,
        is_other_collectives=_facts(before.rows) != _facts(after.rows),
        step_s=after.step.time.step.value_s,
        total_bytes=after.memory.total_bytes,
        base_step_s=before.step.time.step.value_s,
        base_total_bytes=before.memory.total_bytes,
        notes=tuple(_notes(before.step.time.notes, after.step.time.notes)) if is_changed else (),
    )


def _notes(before: Iterable[str], after: Iterable[str]) -> Iterator[str]:
    """What has no measured basis in the times without the flag and with it."""
    for where, notes in (("without the flag", before), ("with the flag", after)):
        yield from (f"{where}, {note}" for note in notes if NO_MEASURED_BASIS in note)


def _facts(rows: Iterable[Collective]) -> list[tuple[object, ...]]:
    """What the collectives are and how they run, without names and times."""
    names = ("kind", "opcode", "axis", "dtype", "shape", "count", "is_async", "algorithm")
    return sorted((tuple(getattr(row, name) for name in names) for row in rows), key=str)


class _Compilers:
    """Workers for the threads of a pool, one each."""

    def __init__(self, n: int, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._idle = SimpleQueue[FunctionCompiler]()
        self._all = [self._new() for _ in range(n)]
        self._threads = ThreadPoolExecutor(max_workers=n)
        for worker in self._all:
            self._idle.put(worker)

    def _new(self) -> FunctionCompiler:
        return FunctionCompiler(dict(os.environ), compiler=self._compiler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.close()

    def map(self, work: Callable[..., FlagEffect], jobs: Sequence[object]) -> Iterable[FlagEffect]:
        """The results in the order of the jobs."""
        return self._threads.map(work, jobs)

    def use(self, work: Callable[[FunctionCompiler], FlagEffect]) -> FlagEffect:
        """Lends a worker; one that crashed is replaced."""
        worker = self._idle.get()
        try:
            return work(worker)
        finally:
            if not worker.is_alive:
                worker = self._new()
                self._all.append(worker)
            self._idle.put(worker)


def _n_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else (os.cpu_count() or 1)
