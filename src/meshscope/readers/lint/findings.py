"""The findings of a program: what it computes wrongly or wastes, where, over which axis."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from meshscope.errors import ParseError, read_only
from meshscope.events.enums import Part, Phase
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.groups import Devices, one_slice
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.readers.lint.log import WASTE, Fault, Log, Note
from meshscope.readers.lint.states import WHOLE, Factors, factors_of
from meshscope.readers.lint.walk import Walk

_NAMED_MESH = re.compile(r"replica_groups=mesh\[([^\]]+)\]")


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of a program; a certain one follows from its text and the shardings of its arguments.

    `n` is the number of instructions that share it, one for each of `layers`. `hlo_name` is the collective, or the
    sum that lacks one, `payload_bytes` its array on one device, `dur_s` the time of one collective in the step of a
    run (None for a text), and `source_lines` its line, then where it shows.
    """

    kind: Fault
    is_certain: bool
    program: str
    axis: str
    sentence: str
    hlo_name: str
    opcode: str
    phase: Phase | None
    layers: tuple[int, ...]
    part: Part | None
    source_lines: tuple[str, ...]
    n: int
    payload_bytes: int | None
    dur_s: float | None = None


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class LintedProgram:
    """The findings of one program, the certain ones first and waste last, and what could not be followed, with its reasons."""

    name: str
    mesh: str
    findings: tuple[Finding, ...]
    unfollowed: tuple[tuple[str, int], ...]  # reasons, and values that are unknown first there


def lint_module(
    module: HloModule, mesh: Mesh | None = None, *, name: str | None = None
) -> LintedProgram:
    """Follows how every value is held along every axis, and reports what contradicts it.

    Without a mesh, the one that the text names in its groups, else one axis of all devices. ParseError if the mesh
    does not fit the module, or if the text is damaged.
    """
    whole, mesh = mesh, _mesh(module, mesh)
    program = name or module.name
    shown = ",".join(f"{axis}={size}" for axis, size in mesh.axes)
    module, factors = with_scopes(module), factors_of(mesh)
    devices = Devices(module=module, mesh=mesh, crosses_slices=one_slice, n_slices=1)
    log = Log(factors, devices)
    Walk(module, log).run()
    findings = [_finding(module, factors, note, program) for note in log.notes.values()]
    counts = [(reason, len(names)) for reason, names in log.reasons.items()]
    if whole is not None and whole.n_devices > mesh.n_devices:
        counts.append(("what slices exchange: the program is of one of them", 1))
    unfollowed = sorted(counts, key=lambda one: -one[1])
    return LintedProgram(
        name=program, mesh=shown, findings=_merged(findings), unfollowed=tuple(unfollowed)
    )


def _mesh(module: HloModule, mesh: Mesh | None) -> Mesh:
    """The mesh over positions of devices, as the text numbers them."""
    n = module.n_devices
    if mesh is None or not mesh.axes:
        text = next(
            (m[1] for i in module.instructions if (m := _NAMED_MESH.search(i.attributes))), None
        )
        named = None if text is None else parse_mesh(text.replace("'", ""))
        return named if named is not None and named.n_devices == n else Mesh(axes=((WHOLE, n),))
    if mesh.n_devices == n:
        return Mesh(axes=mesh.axes)
    inner = list(mesh.axes)
    while inner and prod(size for _, size in inner) > n:  # the outer axes are across slices
        axis, size = inner.pop(0)
        rest = prod(size for _, size in inner)
        if rest < n and n % rest == 0 and size % (n // rest) == 0:
            inner.insert(0, (axis, n // rest))
    if prod(size for _, size in inner) == n:
        return Mesh(axes=tuple(inner))
    sizes = ",".join(f"{name}={size}" for name, size in mesh.axes)
    raise ParseError(
        f"{module.origin}:1: the module is compiled for {n} devices, but the mesh {sizes} has {mesh.n_devices}. "
        "Give the mesh for which it was compiled."
    )


def _finding(module: HloModule, factors: Factors, note: Note, program: str) -> Finding:
    origins = sorted(note.origins, key=lambda i: i.line)[:3]
    # A reduction is missing after the sum, not where the sum is used.
    shown = [*origins, note.at] if note.fault is Fault.MISSING else [note.at, *origins]
    scope, axis = scope_of(shown[0].op_name), factors.text(note.factors)
    lines = [module.source_line(i) for i in shown]
    sizes = [array.n_bytes for array in shown[0].arrays]
    return Finding(
        kind=note.fault,
        is_certain=note.is_certain,
        program=program,
        axis=axis,
        sentence=_sentence(note, factors, axis),
        hlo_name=shown[0].name,
        opcode=shown[0].opcode,
        phase=scope.phase,
        layers=tuple(scope.layers or ()),
        part=scope.part,
        source_lines=tuple(dict.fromkeys(line for line in lines if line is not None)),
        n=1,
        payload_bytes=None if None in sizes else sum(filter(None, sizes)),
    )


_SENTENCES = {
    Fault.MISSING: "no reduction over {axis} completes the sum{of} before {what} {verb} it",
    Fault.DOUBLE: "{what} sums {n} equal copies over {axis}: its result is {n} times the value",
    Fault.GROUPS: "{what} also sums {n} equal copies over {axis}: its result is {n} times the sum",
    Fault.COUNTED: "{what} counts a replicated addend {n} times over {axis}",
    Fault.CONSTANT: "{what} moves a constant over {axis}",
    Fault.GATHERED: "{what} gathers {n} equal copies over {axis}",
    Fault.PARTS: "{what} combines different parts of an array that is split over {axis}",
    Fault.MISMATCH: "{what} combines parts of arrays that do not belong together over {axis}",
    Fault.UNGATHERED: "{what} makes a whole array of parts over {axis} that it does not gather",
    Fault.DIVERGES: "devices along {axis} may take different paths of {what} and meet in no collective over it",
    Fault.SLICED: "each device along {axis} keeps its part of {what}: {less} would do",
    Fault.REPEATED: "{what} over {axis} repeats the one{of}",
    Fault.RETURNS: "{what} over {axis} undoes the one{of}",
    Fault.ALIKE: "{n} devices along {axis} compute the same {what}",
}


def _sentence(note: Note, factors: Factors, axis: str) -> str:
    n, what = prod(factors.all[f].size for f in note.factors), _operation(note.at)
    verb = "uses"
    if note.at.is_root and note.at.opcode == "tuple" and note.fault is Fault.MISSING:
        what, verb = "the program", "returns"
    if note.fault is Fault.GROUPS and note.origins:
        return f"{what} of a partial sum over {axis} has groups that are no groups over axes"
    of = ""
    if note.origins:
        of = f" of {_operation(min(note.origins, key=lambda i: i.line))}"
    scatter = "a reduce-scatter, or " * note.at.opcode.startswith("all-reduce")
    less = f"{scatter}a slice before it"
    return _SENTENCES[note.fault].format(n=n, what=what, axis=axis, of=of, verb=verb, less=less)


def _operation(at: Instruction) -> str:
    leaf = (at.op_name or "").rsplit("/", 1)[-1]
    return f"{at.opcode} ({leaf})" if leaf and leaf not in at.opcode else at.opcode


def _merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding for the same fault in several layers, the certain ones first."""
    merged: dict[object, Finding] = {}
    for one in findings:
        kind, place = (one.kind, one.is_certain, one.sentence), (one.axis, one.phase, one.part)
        known = merged.get(key := (*kind, *place, one.source_lines[:1]), replace(one, n=0))
        layers = tuple(sorted({*known.layers, *one.layers}))
        merged[key] = replace(known, n=known.n + 1, layers=layers)
    return tuple(sorted(merged.values(), key=lambda one: (not one.is_certain, one.kind in WASTE)))
