"""Parallel plans: the size of each parallelism axis, parsed from text such as `dp=2,tp=4`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from math import prod

from meshscope.errors import PlanError, nearest
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part
from meshscope.plans.mesh import Mesh
from meshscope.units import counted, whole_number

AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep")
MESH_AXES = ("pp", "dp", "fsdp", "cp", "tp")  # outermost first; ep reuses dp or fsdp, and tp
FILL = -1

# Names of the axes in MaxText, vLLM and torchtitan, whose words are joined by _ or -.
_ALIASES_OF = {
    "tp": "tensor_parallel_size ici_tensor_parallelism tensor_parallelism tensor model tensor_parallel_degree",
    "pp": "pipeline_parallel_size ici_pipeline_parallelism dcn_pipeline_parallelism pipeline_parallel_degree stage",
    "dp": "data_parallel_size ici_data_parallelism dcn_data_parallelism dp_replicate data_parallel_replicate_degree data",
    "fsdp": "ici_fsdp_parallelism dcn_fsdp_parallelism dp_shard data_parallel_shard_degree",
    "cp": "ici_context_parallelism context_parallel_size prefill_context_parallel_size context_parallel_degree context",
    # In vLLM, enable_expert_parallel has no size: experts are split over all devices of tp and dp.
    "ep": "expert_parallel_size ici_expert_parallelism expert_parallel_degree expert enable_expert_parallel",
    "sp": "sequence_parallel",
}
ALIASES = {alias: axis for axis, aliases in _ALIASES_OF.items() for alias in aliases.split()}
# What axes of other meshes are called: as here, as in other tools, and `sequence`, which is no axis of a plan.
_PARALLELISM_OF = {
    **ALIASES,
    **{axis: axis for axis in (*AXES, "sp")},
    "sequence": "sp",
    "seq": "sp",
}


class Tables(StrEnum):
    """Over what the rows of tables of n-grams are split; each part has copies on the other axes."""

    ALL = "all"  # devices
    TP = "tp"
    DP = "dp"  # the data axis
    HOST = "host"  # not split: in the memory of each host, which sends rows to its devices


_SHORT = re.compile(rf"({'|'.join(AXES)}) ?(-?[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Axis sizes; `sp` enables Megatron sequence parallelism over the tp axis, `tables` places rows of n-grams."""

    tp: int = 1
    dp: int = 1
    fsdp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    tables: Tables = Tables.ALL

    def __post_init__(self) -> None:
        """Check that sizes are at least 1 (or -1 to fill) and that the axes can be combined."""
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1 and size != FILL:
                raise PlanError(
                    f"plan '{self}': {axis}={size} is invalid. Use at least 1, or -1 to fill the slice."
                )
        if self.dp != 1 and self.fsdp != 1:
            raise PlanError(f"plan '{self}': dp and fsdp cannot be combined. Use one of them.")
        if FILL not in (self.ep, self.dp, self.fsdp, self.tp):
            _ = self.expert_axes
        if self.sp and self.tp == 1:
            raise PlanError(
                f"plan '{self}': sp splits the sequence over the tp axis, which has size 1. Add tp=N."
            )

    def __str__(self) -> str:
        """The plan as typed, e.g. `dp=2,tp=4,sp`; `tp=1` for a single device."""
        sizes = [axis if axis == "sp" else f"{axis}={getattr(self, axis)}" for axis in self.axes]
        tables = [f"tables={self.tables}"] if self.tables is not Tables.ALL else []
        return ",".join((sizes or ["tp=1"]) + tables)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are not of size 1, and sp."""
        return (*(axis for axis in AXES if getattr(self, axis) != 1), *(["sp"] if self.sp else []))

    @property
    def mesh(self) -> Mesh:
        """The mesh (pp, dp or fsdp, cp, tp) without axes of size 1; tp=1 for a single device."""
        return _mesh_of(self.pp, self.dp, self.fsdp, self.cp, self.tp)

    @property
    def data_axis(self) -> str:
        """The axis that splits the batch: fsdp or dp."""
        return "fsdp" if self.fsdp != 1 else "dp"

    @property
    def data_size(self) -> int:
        """Number of shards of the batch."""
        return self.dp * self.fsdp

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the experts, outermost first, tp if several match; () if ep=1."""
        data, tp = self.data_size, self.tp
        if self.ep == 1:
            return ()
        if self.ep == tp:
            return ("tp",)
        if self.ep == data:
            return (self.data_axis,)
        if self.ep == data * tp:
            return (self.data_axis, "tp")
        sizes = [f"ep={size}" for size in sorted({tp, data, data * tp})]
        if data * tp == 1:  # ep lays experts over the devices of other axes
            sizes = [f"{axis}={self.ep},ep={self.ep}" for axis in ("tp", "dp")]
        raise PlanError(
            f"plan '{self}': ep={self.ep} must equal tp, {self.data_axis}, or their product. "
            f"Use {' or '.join(sizes)}."
        )

    @property
    def table_axes(self) -> tuple[str, ...]:
        """The axes that split the rows of tables of n-grams, outermost first; () in the memory of hosts."""
        of = {Tables.TP: ("tp",), Tables.DP: (self.data_axis,), Tables.HOST: ()}
        return of.get(self.tables, ("pp", self.data_axis, "cp", "tp"))

    @property
    def n_looked_up(self) -> int:
        """Ranks whose rows of tables of n-grams each device looks up."""
        return prod(getattr(self, axis) for axis in {self.data_axis, "cp"} & set(self.table_axes))

    @property
    def of_weights(self) -> "Plan":
        """The plan with only the axes that split the weights of a layer."""
        dp = self.dp if "dp" in self.expert_axes else 1
        return replace(self, pp=1, cp=1, dp=dp, sp=False, tables=Tables.ALL)

    @property
    def n_devices(self) -> int:
        """Number of devices that the plan needs."""
        return prod(getattr(self, axis) for axis in MESH_AXES)

    def filled(self, n_devices: int) -> "Plan":
        """The plan with -1 replaced so that it covers `n_devices`; PlanError if impossible."""
        open_axes = [axis for axis in MESH_AXES if getattr(self, axis) == FILL]
        if len(open_axes) > 1:
            raise PlanError(
                f"plan '{self}': {' and '.join(open_axes)} are -1, but only one axis can be. "
                "Give sizes for the others."
            )
        plan = self
        if self.ep == FILL:
            plan = replace(plan, ep=1)
        if open_axes:
            known = prod(getattr(self, axis) for axis in MESH_AXES if axis != open_axes[0])
            if n_devices % known:
                raise PlanError(
                    f"plan '{self}': {known} does not divide {counted(n_devices, 'device')}. Change an axis."
                )
            plan = replace(plan, **{open_axes[0]: n_devices // known})
        if self.ep == FILL:
            plan = replace(plan, ep=plan.data_size * plan.tp)
        if plan.n_devices != n_devices:
            remedy = "Change the plan or the topology, or set one axis to -1 to fill the slice."
            if plan.n_devices < n_devices and n_devices % plan.n_devices == 0:
                n_shards = plan.data_size * (n_devices // plan.n_devices)
                wider = replace(plan, **{plan.data_axis: n_shards})
                remedy = f"Use '{wider}' to fill the slice, or a slice of {counted(plan.n_devices, 'device')}."
            raise PlanError(
                f"plan '{plan}' needs {counted(plan.n_devices, 'device')}, but the slice has {n_devices}. {remedy}"
            )
        return plan


@cache
def _mesh_of(*sizes: int) -> Mesh:
    axes = tuple((axis, size) for axis, size in zip(MESH_AXES, sizes, strict=True) if size != 1)
    return Mesh(axes=axes or (("tp", 1),))


def parse_plan(text: str) -> Plan:
    """Parse `tp=4,dp=2`, `tp8`, `--tp 8`, `tp=8,sp`, `tp=8,tables=host` or `fsdp=-1,tp=2`; accepts the axis names of other tools."""
    values: dict[str, int | bool] = {}
    tables: Tables | None = None
    names: dict[str, str] = {}  # as typed, by axis
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, number = (part.strip() for part in item.lower().partition("="))
        name = name.lstrip("-")
        if not separator and (short := _SHORT.fullmatch(name)):
            name, separator, number = short[1], "=", short[2]
        axis = ALIASES.get(name.replace("-", "_"), name)
        if axis not in (*AXES, "sp", "tables"):
            known = (
                f"{', '.join(AXES)}, sp, tables, and their names in MaxText, vLLM and torchtitan"
            )
            hint = nearest(name, [*AXES, "sp", "tables", *ALIASES], f"Known: {known}.")
            raise PlanError(f"plan '{text}': unknown axis '{name}'. {hint}")
        if axis == "tables":
            if tables is not None:
                raise PlanError(f"plan '{text}': tables appears twice. Give it once.")
            tables = _tables(text, number)
            continue
        value = _value(text, axis, name, number if separator else None)
        if axis in values:  # MaxText has sizes of one axis within slices and across them
            prefixes = {one.partition("_")[0] for one in (names[axis], name)}
            if prefixes != {"ici", "dcn"} or FILL in (values[axis], value):
                raise PlanError(f"plan '{text}': {axis} appears twice. Give it once.")
            value *= values[axis]
        values[axis], names[axis] = value, name
    if not values:
        raise PlanError(f"plan '{text}' is empty. Use for example 'tp=8' or 'dp=2,tp=4'.")
    return Plan(**values, tables=tables or Tables.ALL)  # type: ignore[arg-type]  sp is the only bool


def _tables(text: str, name: str) -> Tables:
    if name not in set(Tables):
        raise PlanError(f"plan '{text}': tables is one of {', '.join(Tables)}, got '{name}'.")
    return Tables(name)


def _value(text: str, axis: str, name: str, number: str | None) -> int | bool:
    flags = {None: True, "1": True, "true": True, "0": False, "false": False}
    if axis == "sp" and number in flags:
        return flags[number]
    if axis == "sp":
        raise PlanError(f"plan '{text}': sp takes no size, got '{number}'. Use 'sp'.")
    if name.startswith("enable") and number in {None, "", "true", "false"}:
        return 1 if number == "false" else FILL
    try:
        return whole_number(number or "")
    except ValueError as error:
        raise PlanError(
            f"plan '{text}': {axis} needs a whole number, got '{number or ''}'."
        ) from error


_SPLIT_KINDS = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.PERMUTE, Kind.ALL_TO_ALL})
_ROUTED_PARTS = frozenset({Part.MOE_ROUTER, Part.MOE_DISPATCH, Part.MOE_COMBINE})


def with_parallelism(
    rows: Iterable[Collective], plan: Plan | None, hidden: int | None
) -> tuple[Collective, ...]:
    """The rows with their parallelism where it is not set; `hidden` is the width of the residual stream."""
    return tuple(
        row if row.parallelism else replace(row, parallelism=parallelism_of(row, plan, hidden))
        for row in rows
    )


def parallelism_of(row: Collective, plan: Plan | None, hidden: int | None = None) -> str | None:
    """The parallelism of a row, several joined by +; None if the axis is unknown, or its name is of none.

    Axes of a user's mesh are called as in a plan or in other tools: `expert`, `model`, `sequence`.
    """
    axes = () if row.axis is None else tuple(row.axis.split("+"))
    if row.part is Part.STAGE and axes:
        return "pp"
    if not axes or not set(axes) <= set(MESH_AXES):
        named = [_PARALLELISM_OF.get(axis.lower()) for axis in axes]
        return "+".join(dict.fromkeys(filter(None, named))) if axes and all(named) else None
    if plan is not None and _moves_experts(row, plan, axes):
        return "ep"
    if axes == ("tp",) and plan is not None and plan.sp and _is_split(row, hidden):
        return "sp"
    if "cp" in axes and set(axes) <= {"cp", "tp"}:
        return "cp"  # of a sequence that sp splits further
    return "+".join(axes)


def _moves_experts(row: Collective, plan: Plan, axes: tuple[str, ...]) -> bool:
    if not set(axes) & set(plan.expert_axes):
        return False
    if plan.expert_axes == ("tp",):  # tokens stay where they are
        is_sum = row.kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER}
        return is_sum and row.part is Part.MOE_COMBINE
    is_exchange = row.kind is Kind.ALL_TO_ALL and row.part in {None, Part.MOE_EXPERTS}
    return is_exchange or row.part in _ROUTED_PARTS


def _is_split(row: Collective, hidden: int | None) -> bool:
    if row.part is not Part.LM_HEAD:
        return row.kind in _SPLIT_KINDS
    # The last tokens, as wide as the residual stream, go to all devices of tp before the head.
    return hidden is not None and row.shape is not None and row.shape[-1] == hidden
