"""Compiles a user's function for a slice without the hardware, and reads its collectives.

A worker process, started on first use and kept, owns the compiler: its crash becomes a message, and the next
program starts another worker.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshscope import __version__
from meshscope.backends.compile.function_worker import DONE, PACKAGES
from meshscope.cost.steps import TimedStep, timed_step
from meshscope.errors import CompileError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.hardware.topology import Topology
from meshscope.plans.memory import Memory, TempBasis
from meshscope.plans.mesh import Mesh
from meshscope.programs.environments import Compiler, lone_variables
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.store.folder import scratch_folder
from meshscope.workers import WorkerTask, error_report, failure_of, worker_error, worker_process

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram

WORKER = ("-m", "meshscope.backends.compile.function_worker")
HLO_NAME = "step.hlo.txt.gz"
REPORT_NAME = "report.json"
REPORTED = {"memory", "versions", "seconds"}  # what the worker reports
PARTIAL = ".partial-"
MAX_KEPT = 500  # programs in the cache; the oldest are removed
NEWER_KERNEL = re.compile(r"Mosaic module: .*Unsupported version")
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFunction:
    """A compiled function: its HLO text in `folder`, and the worker's report.

    `is_cached` is whether the program was in the cache.
    """

    folder: Path
    memory: Mapping[str, int]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    is_cached: bool

    @property
    def text(self) -> Path:
        """The HLO text."""
        return self.folder / HLO_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionResult:
    """The collectives, memory and time of a compiled function on one device."""

    rows: tuple[Collective, ...]
    memory: Memory
    step: TimedStep


class FunctionCompiler:
    """A worker process that compiles programs one after the other.

    `compiler` is another than that of this process.
    """

    def __init__(self, environment: Mapping[str, str], *, compiler: Compiler | None = None) -> None:
        self.compiler = compiler
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(scratch_folder())
        self._log = self._folder / "log"
        python = sys.executable if compiler is None else compiler.python
        if compiler is not None and not compiler.is_own:
            environment = lone_variables(self._folder)
        self._worker: subprocess.Popen[bytes] = self._resources.enter_context(
            worker_process(WORKER, self._log, python=python, environment=environment)
        )
        self._n_requests = 0

    def compile(self, program: "FunctionProgram", topology: Topology, folder: Path) -> None:
        """Compiles into the folder: HLO text and report; CompileError if the compiler fails."""
        self._n_requests += 1
        file = self._folder / f"{self._n_requests}.json"
        module = self._folder / f"{self._n_requests}.stablehlo"
        module.write_bytes(self._readable(program.stablehlo))
        report = folder / REPORT_NAME
        request = {
            "stablehlo": str(module),
            "topology": topology.name,
            "options": compile_options(program),
            "text": str(folder / HLO_NAME),
            "report": str(report),
        }
        file.write_text(json.dumps(request), encoding="utf-8")
        answer = self._ask(file)
        if report.exists():
            return
        returncode = 1 if answer == DONE else self._worker.wait()
        failure = failure_of(returncode, error_report(file), self._log)
        if self.compiler is not None and NEWER_KERNEL.search(failure.words):
            raise _newer_kernel(program, self.compiler)
        raise worker_error(_task(program, topology, self.compiler), failure)

    def _readable(self, bytecode: bytes) -> bytes:
        """The program in a form that the compiler's MLIR reads."""
        if self.compiler is None or self.compiler.is_own:
            return bytecode
        from meshscope.programs.jax.stablehlo import portable_text  # noqa: PLC0415  imports JAX

        return portable_text(bytecode)

    def _ask(self, request: Path) -> str:
        """The worker's answer; empty if it ended."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            os.write(self._worker.stdin.fileno(), f"{request}\n".encode())  # keeps no unsent text
        except BrokenPipeError:
            return ""
        return self._worker.stdout.readline().decode().strip()

    @property
    def is_alive(self) -> bool:
        """Whether the worker can take another program."""
        return self._worker.poll() is None

    def close(self) -> None:
        """Ends the worker."""
        self._resources.close()


_compilers: dict[tuple[str, ...], FunctionCompiler] = {}


def function_compiler(compiler: Compiler | None = None) -> FunctionCompiler:
    """The worker of this process, started on first use and after a crash or a change of flags."""
    python = "" if compiler is None else compiler.python
    key = (python, *(os.environ.get(name, "") for name in FLAGS))
    worker = _compilers.get(key)
    if worker is None or not worker.is_alive:
        if worker is not None:
            worker.close()
        _close_at_exit()
        worker = _compilers[key] = FunctionCompiler(dict(os.environ), compiler=compiler)
    return worker


@cache
def _close_at_exit() -> None:
    atexit.register(close_compilers)


def close_compilers() -> None:
    """Ends all workers of this process."""
    while _compilers:
        _compilers.popitem()[1].close()


def compile_options(program: "FunctionProgram") -> dict[str, Any]:
    """The options of a request, as JSON values."""
    return {
        "is_tupled": program.is_tupled,
        "is_shardy": program.is_shardy,
        "propagates_to_parameters": list(program.propagates_to_parameters),
        "propagates_to_outputs": list(program.propagates_to_outputs),
        "compiler_options": dict(program.compiler_options),
    }


def compile_function(
    program: "FunctionProgram",
    topology: Topology,
    *,
    is_cached: bool = True,
    compiler: Compiler | None = None,
    worker: FunctionCompiler | None = None,
) -> CompiledFunction:
    """The compiled program, from the cache if the same one was compiled before.

    `compiler` is another than that of this process, and `worker` the one to use, by default that of
    this process.
    """
    home = cache_folder() / program_key(program, topology, compiler)
    kept = _report(home) if is_cached else None

    def used() -> FunctionCompiler:
        if worker is not None:
            return worker
        return function_compiler() if compiler is None else function_compiler(compiler)

    report = kept or _compile_into(home, program, topology, used)
    return CompiledFunction(folder=home, **report, is_cached=kept is not None)


def _report(home: Path) -> dict[str, Any] | None:
    """The report of a program in the cache; None if it is missing, damaged or of another form."""
    try:
        report = json.loads((home / REPORT_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    is_known = isinstance(report, dict) and set(report) == REPORTED
    return report if is_known and (home / HLO_NAME).exists() else None


def _compile_into(
    home: Path,
    program: "FunctionProgram",
    topology: Topology,
    worker: Callable[[], FunctionCompiler],
) -> dict[str, Any]:
    """Compiles a program into its folder of the cache, which appears whole; returns the report."""
    home.parent.mkdir(parents=True, exist_ok=True)
    _remove_oldest(home.parent)
    with TemporaryDirectory(dir=home.parent, prefix=PARTIAL) as name:
        partial = Path(name) / home.name
        partial.mkdir()
        worker().compile(program, topology, partial)
        shutil.rmtree(home, ignore_errors=True)
        with suppress(OSError):  # another process put the same program there just now
            partial.rename(home)
    return json.loads((home / REPORT_NAME).read_bytes())


def cache_folder() -> Path:
    """The folder of compiled programs: `$MESHSCOPE_CACHE`, else that of the user's caches."""
    named = os.environ.get("MESHSCOPE_CACHE")
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "meshscope" / "programs"


def program_key(
    program: "FunctionProgram", topology: Topology, compiler: Compiler | None = None
) -> str:
    """A hash of everything that determines the compiled text: program, slice, flags and versions."""
    versions = (
        {name: version(name) for name in PACKAGES} if compiler is None else compiler.release.pins
    )
    facts = {
        "topology": topology.name,
        "options": compile_options(program),
        "flags": {name: os.environ.get(name, "") for name in FLAGS},
        "versions": {**versions, "meshscope": __version__},
    }
    text = json.dumps([program.digest, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _remove_oldest(folder: Path) -> None:
    kept = [path for path in folder.iterdir() if not path.name.startswith(PARTIAL)]
    for entry in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
        shutil.rmtree(entry, ignore_errors=True)


def read_function(
    compiled: CompiledFunction,
    *,
    mesh: Sequence[tuple[str, int]],
    topology: Topology,
    phase: Phase | None = None,
) -> FunctionResult:
    """The rows, memory and time of the compiled program.

    Without `phase` it is that of its scopes, if they all name one, else `step`.
    """
    module = read_hlo(compiled.text)
    collectives = module_collectives(
        module, mesh=Mesh(axes=tuple(mesh)), crosses_slices=topology.crosses_slices
    )
    rows = rows_of(
        collectives,
        n_steps_of={},
        crosses_slices=topology.crosses_slices,
        default_phase=phase or Phase.STEP,
    )
    phases = {row.phase for row in rows}
    of_scopes = phases.pop() if len(phases) == 1 else None
    step_phase = phase or of_scopes or Phase.STEP
    rows = [replace(row, phase=step_phase) for row in rows]
    step = timed_step(module, collectives, phase=step_phase, topology=topology)
    return FunctionResult(
        rows=tuple(step.rows(rows)),
        memory=function_memory(compiled.memory, topology),
        step=step,
    )


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


def _newer_kernel(program: "FunctionProgram", compiler: Compiler) -> CompileError:
    """The error of a compiler that is older than a kernel of the program."""
    return CompileError(
        f"{program.name} has a Pallas kernel that {compiler.release.label} cannot read: it was traced "
        f"by JAX {version('jax')}, which is newer. Use a compiler as new as that, or leave the kernel out."
    )


def _task(program: "FunctionProgram", topology: Topology, compiler: Compiler | None) -> WorkerTask:
    name = "the TPU compiler" if compiler is None else compiler.release.label
    return WorkerTask(
        process=name,
        activity=f"compiling {program.name} for {topology.name}",
        rejection=f"{name} rejected {program.name} for {topology.name}",
        memory_remedy="Use a smaller program, or a machine with more memory.",
        crash_remedy="Try another topology or another version of libtpu.",
        error=CompileError,
    )
