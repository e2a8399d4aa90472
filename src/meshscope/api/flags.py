"""`meshscope.flags`: which compiler flags change a program, and in what."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.api.compile import (
    FunctionRequest,
    compilable_experiment,
    described_devices,
    lowered_function,
)
from meshscope.api.console import Shown, WorkProgress, reporting
from meshscope.api.options import option, request_of
from meshscope.api.request import CompileRequest
from meshscope.backends.compile.function import flag_effects
from meshscope.errors import SpecError, public, read_only
from meshscope.events.enums import Phase
from meshscope.events.measured import Flag, FlagEffect
from meshscope.files import read_text
from meshscope.hardware.topology import parse_topology
from meshscope.programs.environments import compiler_of
from meshscope.reports.model import plain, wrapped
from meshscope.serialize import to_plain
from meshscope.units import format_gib, format_seconds
from meshscope.workers import Progress

MAX_FLAGS = 2000


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSweep:
    """The effects of flags on the programs of a model or on a function."""

    program: str
    topology: str
    effects: tuple[FlagEffect, ...]

    @property
    def changing(self) -> tuple[FlagEffect, ...]:
        """The effects that change the program."""
        return tuple(effect for effect in self.effects if effect.is_changed)


@public
def flags(
    model: str | Path | Callable[..., Any],
    *arguments: Any,
    flags: Iterable[str],
    topology: str,
    mesh: Any = None,
    compiler: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> FlagSweep:
    """Compiles the steps of a model, or a function, once for each flag, on all cores.

    Example:
        >>> sweep = meshscope.flags(
        ...     step, x, flags=["--xla_tpu_scoped_vmem_limit_kib=65536"], topology="v6e-8", mesh="tp=8"
        ... )
        >>> [str(effect.flag) for effect in sweep.changing]

    Args:
        model: A model, whose prefill and decode are compiled, or a JAX function.
        arguments: The arguments of the function.
        flags: Flags of libtpu or XLA with a value each, `--name=value`.
        topology: A TPU slice.
        mesh: The mesh of the function, as for `compile`.
        compiler: Another version of JAX and libtpu, such as `jax-0.12.0.1`; the program is traced by the
            JAX of this process.
        progress: Called with the name of the program and how many of the compilations are done.
        options: Options of `compile` for a model, such as `plan`.

    Returns:
        The effect of each flag on each phase.

    Raises:
        MeshscopeError: A flag has no value, or the program does not compile without flags.
    """
    parsed = [parse_flag(flag) for flag in flags]
    if not 0 < len(parsed) <= MAX_FLAGS:
        raise SpecError(f"{len(parsed)} flags were given. Give 1 to {MAX_FLAGS}.")
    slice_ = parse_topology(topology)
    if callable(model):
        request = request_of(FunctionRequest, {"topology": topology, "mesh": mesh, **options})
        program = lowered_function(model, arguments, request)
        programs = [(request.phase or Phase.STEP, program)]
        name = program.name
    else:
        asked = {"model": model, "topology": topology, **options}
        experiment, _ = compilable_experiment(request_of(CompileRequest, asked))
        devices = described_devices(experiment.topology)
        from meshscope.programs.jax.build import build_program  # imports JAX
        from meshscope.programs.jax.function import function_program

        programs = [
            (phase, function_program(lowered, f"{experiment.model.name} {phase}"))
            for phase in experiment.phases
            for lowered in [build_program(experiment, phase, devices).lower()]
        ]
        name = str(model)

    report, chosen = reporting(progress, name), compiler_of(compiler)

    def listener(done: int, total: int) -> None:
        report("", f"compiled {done} of {total}", None)

    effects = flag_effects(programs, parsed, slice_, listener=listener, compiler=chosen)
    return FlagSweep(program=name, topology=slice_.name, effects=effects)


def parse_flag(text: str) -> Flag:
    """The flag `--name=value`; SpecError for another form."""
    name, separator, value = text.strip().removeprefix("--").partition("=")
    if not separator or not name or not value:
        raise SpecError(f"flag '{text[:80]}' has no value. Use --name=value.")
    return Flag(name=name, value=value)


def read_flags(path: Path) -> Sequence[str]:
    """The flags of a file, one a line; `#` starts a comment. SpecError if it cannot be read."""
    lines = read_text(path, "Give a file of flags.", kind=SpecError).splitlines()
    stripped = (line.split("#")[0].strip() for line in lines)
    return [line for line in stripped if line]


def command(
    *,
    model: str = option("MODEL: Model id or config file.", kw_only=False),
    topology: str = option(CompileRequest),
    plan: str = option(CompileRequest),
    flag: list[str] | None = option("Compiler flag, --name=value; repeatable.", default=None),
    file: Path | None = option("File of flags, one per line; # starts a comment.", default=None),
    layers: int | None = option(CompileRequest, default=None),
    batch: int = option(CompileRequest, default=1),
    prompt: int = option(CompileRequest, default=128),
    compiler: str | None = option(CompileRequest, default=None),
) -> Shown:
    """Find the compiler flags that change a program.

    Compiles prefill and decode once for each flag, on all cores. An unchanged program is recognized by its text.
    """
    given = [*(flag or []), *(read_flags(file) if file else [])]
    asked: dict[str, Any] = {"plan": plan, "layers": layers, "batch": batch, "prompt": prompt}
    asked |= {"topology": topology, "compiler": compiler}
    with WorkProgress() as progress:
        sweep = flags(model, flags=given, progress=progress, **asked)
    shown = (sweep.program, sweep.topology, sweep.effects)
    basis = "the program of each compilation"
    return Shown(lambda: flag_document(*shown), lambda _: flag_lines(*shown), basis=basis)


def flag_lines(program: str, topology: str, effects: Sequence[FlagEffect]) -> Iterator[str]:
    """How many flags change the program, then those by their effect on the step."""
    by_flag = dict.fromkeys(str(effect.flag) for effect in effects)
    changing = {str(effect.flag) for effect in effects if effect.is_changed}
    refused = {str(effect.flag): effect.refused for effect in effects if effect.refused}
    head = f"{len(changing)} of {len(by_flag)} flags change {plain(program)} on {topology}"
    are = "is" if len(refused) == 1 else "are"
    unknown = f"; {len(refused)} {are} unknown to this compiler" if refused else ""
    yield from wrapped(f"{head}{unknown}")
    changed = [effect for effect in effects if effect.is_changed]
    for effect in sorted(changed, key=lambda e: -abs((e.step_s or 0.0) - (e.base_step_s or 0.0))):
        yield f"{effect.flag}"
        words = ["other collectives" if effect.is_other_collectives else "other code or schedule"]
        if effect.step_s is not None and effect.base_step_s:
            change = effect.step_s / effect.base_step_s - 1
            now, was = format_seconds(effect.step_s), format_seconds(effect.base_step_s)
            words.append(f"step {now}, was {was} ({change:+.1%})")
        if effect.total_bytes != effect.base_total_bytes:
            now, was = format_gib(effect.total_bytes), format_gib(effect.base_total_bytes)
            words.append(f"memory {now}, was {was}")
        yield from wrapped(f"{effect.phase}: {'; '.join([*words, *effect.notes])}", indent=2)
    unchanged = [flag for flag in by_flag if flag not in changing and flag not in refused]
    for head, flags in {"no change": unchanged, "refused": list(refused)}.items():
        yield from [f"{head}:"] if flags else ()
        yield from (f"  {plain(flag)}" for flag in flags)


def flag_document(program: str, topology: str, effects: Sequence[FlagEffect]) -> dict[str, Any]:
    """The document of `flags --json`."""
    rows = [{**to_plain(effect), "flag": str(effect.flag)} for effect in effects]
    return {"program": program, "topology": topology, "effects": rows}
