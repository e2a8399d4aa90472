"""HLO texts of a few instructions, and what the readers and the simulator make of them."""

from collections.abc import Callable
from typing import Any

from meshscope.cost.steps import TimedStep, timed_step
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.groups import one_slice
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module_text(entry: str, *computations: str, header: str = ", num_partitions=2") -> str:
    """A scheduled module with a reducer `add`."""
    blocks, lines = "\n".join((ADD, *computations)), entry.rstrip("\n")
    return f"HloModule m, is_scheduled=true{header}\n{blocks}\nENTRY %main {{\n{lines}\n}}\n"


def loop_text(name: str, n: int, body: str, result: str, array: str = "f32[8]") -> str:
    """Computations of a loop of `n` iterations over (counter, x); `body` makes `result` of `x`."""
    state = f"(s32[], {array})"
    return f"""
%{name}_body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {array} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%i, %one)
{body}  ROOT %t = {state} tuple(%next, %{result})
}}

%{name}_cond (q: {state}) -> pred[] {{
  %q = {state} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({n})
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}
"""


def while_text(loop: str, operand: str, suffix: str = "", array: str = "f32[8]") -> str:
    """Lines that run the loop from `operand`, behind a constant `zero`, to `out`."""
    state = f"(s32[], {array})"
    return (
        f"  %init{suffix} = {state} tuple(%zero, %{operand})\n"
        f"  %while{suffix} = {state} while(%init{suffix}), condition=%{loop}_cond, body=%{loop}_body\n"
        f"  %out{suffix} = {array} get-tuple-element(%while{suffix}), index=1\n"
    )


def rows_in(
    module: str | HloModule,
    mesh: str,
    *,
    crosses_slices: Callable[..., Any] = one_slice,
    **facts: Any,
) -> list[Collective]:
    """The rows of a text or module on a mesh such as dp=2,tp=4."""
    module = parse_hlo(module, "m.hlo") if isinstance(module, str) else module
    collectives = module_collectives(module, mesh=parse_mesh(mesh), crosses_slices=crosses_slices)
    return collectives.rows(**facts)


def timed_text(
    text: str,
    topology: str,
    mesh: str,
    *,
    phase: Phase = Phase.PREFILL,
    change: Callable[[HloModule], HloModule] = lambda module: module,
    **facts: Any,
) -> TimedStep:
    """The simulated step of a text on a slice."""
    module, slices = change(parse_hlo(text, "m.hlo")), parse_topology(topology)
    layout: Mesh = parse_mesh(mesh)
    collectives = module_collectives(module, mesh=layout, crosses_slices=slices.crosses_slices)
    return timed_step(module, collectives, phase=phase, topology=slices, **facts)
