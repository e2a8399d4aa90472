"""The collectives of a compiled module, or of one of its phases, as rows of the event table, by their effect.

The program of a pipeline contains all stages, and each stage takes its own branches. The scopes name the stages.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from meshscope.events.collective import Collective, Groups, Resharding
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase, Source
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo import collective_matmul
from meshscope.readers.hlo.attribution import Scope, leaf, plain_name
from meshscope.readers.hlo.communication import is_collective, kernel_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import BRANCH_CAVEAT, call_sites, first_of_each_chain
from meshscope.readers.hlo.groups import CrossesSlices, Devices, devices_of, one_slice
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.operations import Operation, operations_of, source_ops_of
from meshscope.readers.hlo.semantics import operand_of
from meshscope.readers.hlo.transfers import is_megascale, peer_transfer_of, transfer_of
from meshscope.serialize import picked


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCollectives:
    """The collectives of a module, in schedule order.

    `scheduled` has one operation for each scheduled instruction. In `merged`, operations that
    together implement one collective are replaced by that collective.
    """

    flow: Dataflow
    devices: Devices
    scheduled: tuple[Operation, ...]
    merged: tuple[Operation, ...]

    def rows(
        self, *, n_steps_of: Mapping[Phase, int] = {}, default_phase: Phase | None = None
    ) -> list[Collective]:
        """One row for each layer and operation, in schedule order.

        `default_phase` applies if the scopes name no phase. Every operation gets a row; its
        `axis_reason` says what could not be determined.
        """
        return [
            replace(
                row,
                n_steps=n_steps_of.get(row.phase, 1) if row.phase else 1,
                crosses_slices=self.devices.crosses_slices(row.groups),
            )
            for operation in self.merged
            for row in _rows(operation, self.devices, default_phase)
        ]


def module_collectives(
    module: HloModule, *, mesh: Mesh, crosses_slices: CrossesSlices = one_slice
) -> ModuleCollectives:
    """Reads the collectives of a module on a mesh, by default of a single slice."""
    devices = devices_of(module, mesh, crosses_slices)
    flow = Dataflow(module)
    scheduled: list[Operation] = []
    for site in first_of_each_chain(call_sites(module, is_collective)):
        if is_megascale(site.instruction):
            scheduled.append(transfer_of(flow, site, devices))
        elif site.instruction.opcode in {"send", "recv"}:
            scheduled += peer_transfer_of(flow, site, devices)
        elif site.instruction.opcode == "custom-call":
            scheduled.append(kernel_of(flow, site, devices))
        else:
            scheduled += operations_of(flow, site, devices)
    merged = collective_matmul.merge_collective_matmuls(flow, scheduled)
    merged = collective_matmul.merge_slice_levels(flow, merged, devices)
    return ModuleCollectives(
        flow=flow,
        devices=devices,
        scheduled=tuple(scheduled),
        merged=tuple(_pool_partial_loops(merged)),
    )


def _pool_partial_loops(operations: list[Operation]) -> list[Operation]:
    """Merges operations that cover a scanned range of layers only together.

    A loop that the compiler unrolled by two or peeled contains the same operation several times.
    The same holds for the ticks of a pipeline.
    """
    parts: dict[tuple[Any, ...], list[Operation]] = defaultdict(list)
    for o in operations:
        if o.count % o.scope.n_times:
            key = (plain_name(o.op_name), o.kind, o.opcode, o.groups, o.dtype, o.shape)
            parts[key].append(o)
    pooled: dict[int, Operation | None] = {}
    for same in parts.values():
        count = sum(o.count for o in same)
        if count % same[0].scope.n_times == 0:
            first = replace(same[0], count=count, source_ops=source_ops_of(same))
            pooled |= dict.fromkeys(map(id, same)) | {id(same[0]): first}
    return collective_matmul.with_merged(operations, pooled)


# Fields that a row takes from its operation.
_SAME = (
    *("kind", "opcode", "group_size", "dtype", "shape", "payload_bytes", "wire_bytes"),
    *("is_async", "algorithm", "inserted_by", "hlo_shape"),
)


def _rows(
    operation: Operation, devices: Devices, default_phase: Phase | None
) -> Iterator[Collective]:
    scope, mesh = operation.scope, devices.mesh
    if scope.phase is None:
        scope = replace(scope, phase=default_phase)
    axis, no_axis = devices.axis_of(operation.groups, is_pairs=operation.is_pairs)
    if operation.group_size == 1 and operation.wire_bytes == 0:
        axis, no_axis = None, "no device sends to another"
    if scope.phase in REQUEST_PHASES:  # else pp is a name that the user chose
        scope = with_stage_send(scope, operation.kind, axis, mesh)
    reasons = [no_axis]
    if scope.missing is not None:
        name = operation.op_name
        reasons.append(f"op_name {name!r} names no {scope.missing}" if name else "no op_name")
    layers, (count, rest) = list(scope.layers or [None]), divmod(operation.count, scope.n_times)
    count *= scope.n_microbatches
    if rest:
        expected = [f"{scope.n_ticks} ticks of a pipeline"] if scope.n_ticks > 1 else []
        if scope.layers is not None:
            expected.insert(0, f"layers {scope.layers[0]} to {scope.layers[-1]}")
        layers, count = [None], operation.count
        reasons.append(
            f"the scope says {' and '.join(expected)}, but the operation runs {count} times"
        )
    branches = [c for c in operation.caveats if c.startswith(BRANCH_CAVEAT)]
    taken = branches[:1] if scope.stages is not None else ()  # the stage always takes the outermost
    reasons += [caveat for caveat in operation.caveats if caveat not in taken]
    reason = "; ".join(reason for reason in reasons if reason is not None) or None
    facts = picked(operation, *_SAME)
    for stage, layer, groups in _places(scope, operation.groups, layers, mesh):
        yield Collective(
            source=Source.COMPILED,
            phase=scope.phase,
            stage=stage,
            layer=layer,
            part=scope.part,
            axis=axis,
            axis_reason=reason,
            groups=groups,
            count=count,
            hlo_name=operation.scheduled_op.instruction.name,
            **facts,
            source_line=devices.module.source_line(operation.site.instruction),
        )


def by_instruction(rows: Iterable[Collective]) -> dict[str, list[Collective]]:
    """The rows of each instruction by its name; it may have several layers, and combine several arrays."""
    by_name: dict[str, list[Collective]] = defaultdict(list)
    for row in rows:
        if row.hlo_name is not None:
            by_name[row.hlo_name].append(row)
    return by_name


def expected_executions(module: HloModule, rows: Iterable[Collective]) -> dict[str, dict[int, int]]:
    """Executions of each instruction of these rows in one run of the module, by device.

    In a pipeline, the devices of a stage execute what belongs to it in ticks with a micro-batch; all devices execute the
    sends between stages.
    """
    named, counts = by_instruction(rows), Counter[str]()
    for site in call_sites(module, lambda instruction: instruction.name in named):
        counts[site.instruction.name] += site.count
    listed = (device for same in named.values() for device in _devices(same))
    every = range(max((module.n_devices - 1, *listed)) + 1)
    expected: dict[str, dict[int, int]] = {}
    for name, n in counts.items():
        of_stages: dict[int, list[Collective]] = defaultdict(list)
        for row in named[name]:
            if row.stage is not None and row.part is not Part.STAGE:
                of_stages[row.stage].append(row)
        expected[name] = {} if of_stages else dict.fromkeys(every, n)
        for same in of_stages.values():
            # All arrays of one layer belong to the same execution.
            n_arrays = max(Counter(row.layer for row in same).values())
            n_of_stage = min(n, sum(row.count for row in same) // n_arrays)
            expected[name] |= dict.fromkeys(_devices(same), n_of_stage)
    return expected


def _devices(rows: Iterable[Collective]) -> set[int]:
    return {device for row in rows for group in row.groups for device in group}


# Facts of a collective that its event table row has under the same name.
_ROW_FACTS = (
    *("kind", "opcode", "axis", "axis_reason", "group_size", "n_groups", "groups"),
    *("dtype", "stage", "algorithm", "inserted_by", "crosses_slices", "hlo_shape", "source_line"),
)


def instruction_facts(rows: Sequence[Collective]) -> dict[str, Any]:
    """The facts of one instruction, from its rows; bytes are summed over its arrays."""
    first = rows[0]
    arrays = [row for row in rows if row.layer == first.layer]
    parts = {row.part for row in arrays}
    sizes, wires = [row.payload_bytes for row in arrays], [row.wire_bytes for row in arrays]
    shape = first.shape if len(arrays) == 1 else None
    layers = dict.fromkeys(row.layer for row in rows if row.stage == first.stage)
    return {
        **picked(first, *_ROW_FACTS),
        "groups": [list(group) for group in first.groups] or None,
        "part": parts.pop() if len(parts) == 1 else None,
        "shape": None if shape is None else list(shape),
        "payload_bytes": None if None in sizes else sum(filter(None, sizes)),
        "wire_bytes": None if None in wires else float(sum(filter(None, wires))),
        "layers": [layer for layer in layers if layer is not None],
    }


def program_collectives(
    experiment: Experiment, phase: Phase, module: HloModule
) -> list[Collective]:
    """One row for each layer and operation of a phase's program, attributed to the plan."""
    collectives = module_collectives(
        module, mesh=experiment.mesh, crosses_slices=experiment.topology.crosses_slices
    )
    return collectives.rows(n_steps_of=n_steps_of(experiment), default_phase=phase)


def n_steps_of(experiment: Experiment) -> dict[Phase, int]:
    """The number of steps in a request, by phase."""
    return {Phase.PREFILL: 1, Phase.DECODE: experiment.workload.n_decode_steps}


def _places(
    scope: Scope, groups: Groups, layers: Sequence[int | None], mesh: Mesh
) -> Iterator[tuple[int | None, int | None, Groups]]:
    """(stage, layer, groups in that stage) of every stage and layer; `layers` are the first stage's.

    The pairs of a send between stages belong to the sending stage.
    """
    if scope.stages is None or scope.stages[-1] >= mesh.size("pp"):
        yield from ((None, layer, groups) for layer in layers)
        return
    for number, stage in enumerate(scope.stages):
        stage_groups, first = mesh.groups_of_stage(groups, stage), number * scope.stage_layers
        for layer in layers:
            yield stage, None if layer is None else layer + first, stage_groups


def with_stage_send(scope: Scope, kind: Kind, axis: str | None, mesh: Mesh) -> Scope:
    """The scope; for a permute along pp without a part, the send between stages.

    A send across slices loses its op_name, and the loop around it has no usable one.
    """
    if scope.part is not None or kind is not Kind.PERMUTE or axis != "pp":
        return scope
    return Scope(phase=scope.phase, layers=None, part=Part.STAGE, stages=range(mesh.size("pp") - 1))


_MIN_DROPPED = Fraction(1, 4)  # of a result: smaller parts are padding
_SCATTERS = ("reduce-scatter", "all-reduce-scatter")
_MAX_STEPS = 50  # instructions between an argument and its collective

_MOVES = frozenset(
    {"optimization-barrier", "slice", "dynamic-slice", "parameter", "get-tuple-element", "convert"}
)


def reshardings(collectives: ModuleCollectives) -> dict[str, Resharding]:
    """The collectives that the partitioner inserted, by the names of their scheduled instructions.

    Also the program's own whose result is not kept whole, or that gather what was just scattered; not a
    psum_scatter that the compiler runs as an all-reduce.
    """
    inserted = (o for o in collectives.merged if o.inserted_by == "partitioner")
    of_program = (o for o in collectives.merged if o.inserted_by == "program")
    written = (o for o in of_program if "scatter" not in (leaf(o.op_name) or ""))
    moved = [_resharding(collectives, operation) for operation in inserted]
    wasted = (_resharding(collectives, operation) for operation in written)
    return {one.hlo_name: one for one in (*moved, *(w for w in wasted if w.is_wasteful))}


def _resharding(collectives: ModuleCollectives, operation: Operation) -> Resharding:
    flow, mesh, kept_frac = collectives.flow, collectives.devices.mesh, operation.kept_frac
    argument, opcode = _source(flow, operation)
    reduced = (mesh.axis_of_groups(operation.groups) or "").split("+")
    others = [name for name, size in mesh.axes if size > 1 and name not in reduced]
    part = Fraction(1, prod(mesh.size(name) for name in others))
    is_returned = False
    if operation.kind == "all_reduce" and part < 1:
        # Devices have a part of an argument of the same whole shape, such as the weight of a gradient.
        shape = operation.shape or ()
        parts = {(*shape[:i], size * part, *shape[i + 1 :]) for i, size in enumerate(shape)}
        is_part = any(
            array.dims in parts and one.whole_dims == shape
            for one in flow.module.entry.parameters.values()
            for array in one.arrays
        )
        is_returned = is_part and _is_returned(flow, operation)
    kept_frac = part if is_returned else kept_frac
    by_device = operation.is_kept_by_device or is_returned
    if kept_frac is not None and not by_device and 1 - kept_frac < _MIN_DROPPED:
        kept_frac = None
    choices = (axes for axes in mesh.axis_subsets if {*axes} <= {*others})
    fitting = [a for a in choices if Fraction(1, prod(map(mesh.size, a))) == kept_frac]
    dims = operation.site.instruction.dimensions
    return Resharding(
        hlo_name=operation.scheduled_op.instruction.name,
        argument=argument,
        opcode=opcode,
        dim=dims[0] if len(dims) == 1 and operation.hlo_shape is None else None,
        is_of_product=collective_matmul.is_product(operation.op_name),
        is_unmerged=operation.kind == "reduce_scatter" and operation.opcode == "all-reduce",
        dropped_frac=None if kept_frac is None else 1 - kept_frac,
        dropped_over="+".join(fitting[0]) if len(fitting) == 1 and by_device else None,
        is_returned=is_returned,
        is_regathered=operation.kind == "all_gather" and (opcode or "").startswith(_SCATTERS),
    )


def _is_returned(flow: Dataflow, operation: Operation) -> bool:
    """Whether the program returns the whole result and uses it for nothing else."""
    context, result = operation.scheduled_op.context, operation.scheduled_op.result
    computation = context.computation
    for _ in range(_MAX_STEPS if context.caller is None else 0):
        if result is None or result is computation.root:
            return result is not None
        users = flow.users(computation, result)
        if len(users) != 1 or not (flow.keeps_values(users[0]) or users[0].opcode == "tuple"):
            return False
        result = users[0]
    return False


def _source(flow: Dataflow, operation: Operation) -> tuple[str | None, str | None]:
    """The argument that the operand is, or else the opcode of the operation that computes it."""
    place = operand_of(flow, operation.site, 0)
    for _ in range(_MAX_STEPS):
        if place is None:
            break
        context, instruction = flow.origin(*place)
        if instruction.opcode == "parameter" and context.caller is None:
            return instruction.op_name, None
        inputs = flow.inputs(context, instruction)
        if instruction.opcode not in _MOVES or not inputs:
            return None, instruction.opcode
        place = inputs[0]
    return None, None
