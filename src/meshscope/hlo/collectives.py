"""The collectives of a compiled module as rows of the event table: each operation once, told for what it means."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from meshscope.hlo.attribution import Scope
from meshscope.hlo.dataflow import Dataflow
from meshscope.hlo.devices import CrossesSlices, Devices, devices_of
from meshscope.hlo.executions import sites
from meshscope.hlo.meaning import KIND_OF_OPCODE
from meshscope.hlo.module import HloModule, Instruction
from meshscope.hlo.operations import Operation, operations_of
from meshscope.hlo.provenance import is_later_leg
from meshscope.plan.mesh import Mesh
from meshscope.table.collective import Collective
from meshscope.table.kinds import Phase, Source


def collectives_of(
    module: HloModule,
    *,
    mesh: Mesh,
    n_steps_of: Mapping[Phase, int],
    crosses_slices: CrossesSlices,
    default_phase: Phase | None = None,
) -> list[Collective]:
    """One row a layer and operation, in schedule order.

    `default_phase` is the phase of a module whose scopes name none. What could not be told is
    said in `axis_reason` of the row; no operation is left out.
    """
    devices = devices_of(module, mesh, crosses_slices)
    flow = Dataflow(module)
    rows: list[Collective] = []
    for site in sites(module, _is_collective):
        if is_later_leg(site):
            continue
        for operation in operations_of(flow, site, devices):
            rows += _rows(operation, devices, default_phase)
    return [
        replace(
            row,
            n_steps=n_steps_of.get(row.phase, 1) if row.phase else 1,
            crosses_slices=crosses_slices(row.groups),
        )
        for row in rows
    ]


def unattributed(rows: Iterable[Collective]) -> tuple[int, int, dict[str, int]]:
    """What is not told in full: operations a step, their payload bytes, and operations by reason."""
    reasons: Counter[str] = Counter()
    n_bytes = 0
    for row in rows:
        if row.axis_reason is not None:
            reasons[row.axis_reason] += row.count
            n_bytes += (row.payload_bytes or 0) * row.count
    return reasons.total(), n_bytes, dict(reasons)


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in KIND_OF_OPCODE


def _rows(
    operation: Operation, devices: Devices, default_phase: Phase | None
) -> Iterator[Collective]:
    scope = operation.scope
    if scope.phase is None:
        scope = replace(scope, phase=default_phase)
    layers, count, doubt = _layers(operation.count, scope)
    axis, no_axis = devices.axis_of(operation.groups, is_pairs=operation.is_pairs)
    missing = scope.missing
    no_scope = f"no {missing} in the scopes of op_name {operation.op_name!r}" if missing else None
    reasons = [r for r in (no_axis, no_scope, doubt, *operation.doubts) if r is not None]
    payload = operation.payload
    for layer in layers:
        yield Collective(
            source=Source.COMPILED,
            phase=scope.phase,
            layer=layer,
            part=scope.part,
            kind=operation.kind,
            opcode=operation.opcode,
            axis=axis,
            axis_reason="; ".join(reasons) or None,
            group_size=len(operation.groups[0]),
            groups=operation.groups,
            dtype=payload.dtype if payload else None,
            shape=payload.dims if payload else None,
            payload_bytes=operation.payload_bytes,
            wire_bytes=operation.wire_bytes,
            count=count,
            is_async=operation.is_async,
            algorithm=operation.algorithm,
            inserted_by=operation.inserted_by,
            hlo_name=operation.anchor.instruction.name,
            hlo_shape=operation.hlo_shape,
            source_line=devices.module.source_line(operation.site.instruction),
        )


def _layers(count: int, scope: Scope) -> tuple[list[int | None], int, str | None]:
    """The layers that an operation stands for, how often it runs in each, and what does not fit."""
    if scope.layers is None:
        return [None], count, None
    first, last = scope.layers
    each, rest = divmod(count, scope.n_layers)
    if rest:
        doubt = f"the scope says layers {first} to {last}, but the operation runs {count} times"
        return [None], count, doubt
    return list(range(first, last + 1)), each, None
