"""Replica groups and source-target pairs of HLO text, expanded to device IDs and mapped to the mesh."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import prod

from meshscope.errors import ParseError
from meshscope.events.collective import SUBSETS, Groups
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.units import counted

MAX_DEVICES = 1_000_000  # in groups whose module is unknown

# These forms are matched in linear time, also in damaged text.
_LIST = re.compile(r"\{\s*(?:\{[\d,\s]*\}[\s,]*)*\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^()]*+(?:\([\d,]*\))?[^()]*+)\))?\s*\{(.*)\}"
)
_MESH_AXIS = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^'=,:\s]+)'?(?::\((\d+)\)(\d+))?")
_DEVICE_ORDER = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _AxisRef:
    """A mesh axis, or its sub-axis of `size` devices with `pre_size` groups of devices outside it."""

    name: str
    pre_size: int | None
    size: int | None


def parse_groups(text: str, *, n_devices: int, where: str) -> Groups:
    """Expands `replica_groups` to device groups; `{}` means one group of all devices.

    Raises ParseError, prefixed with `where`, for an unknown form. The three forms are those of
    XLA's xla/hlo/ir/replica_group.cc (list, iota) and xla/hlo/ir/mesh_and_axis.cc (mesh, with
    device order and sub-axes).
    """
    try:
        groups = _groups(text.strip(), n_devices)
    except ValueError as error:
        raise ParseError(
            f"{where}: replica_groups not understood: {text!r} ({error}). "
            "Expected a list {{0,1},{2,3}}, an iota [2,4]<=[8] or a mesh mesh['x'=8] {'x'}; please report this line."
        ) from error
    if any(device >= n_devices for group in groups for device in group):
        raise ParseError(
            f"{where}: replica_groups {text!r} name a device beyond the {n_devices} of the module. "
            "Set num_partitions or replica_count in the 'HloModule' line."
        )
    return groups


def parse_pairs(text: str, *, n_devices: int, where: str) -> Groups:
    """Expands `source_target_pairs` to (source, target) device IDs; ParseError for other text."""
    pairs = _listed(text) if _LIST.fullmatch(text.strip()) else ((),)
    if any(len(pair) != 2 or max(pair) >= n_devices for pair in pairs):
        raise ParseError(
            f"{where}: source_target_pairs not understood: {text!r}. Expected pairs of device ids below "
            f"{n_devices}, like {{{{0,1}},{{1,0}}}}; please report this line."
        )
    return pairs


def groups_without_module(text: str) -> Groups | None:
    """Expands groups or pairs that define all their devices; None for `{}`, a mesh or other text."""
    try:
        if _LIST.fullmatch(text):
            return _listed(text) or None
        iota = _IOTA.fullmatch(text)
        return _iota(iota, MAX_DEVICES) if iota else None
    except ValueError:
        return None


def is_complete(text: str) -> bool:
    """Whether the text of groups or pairs has one of the known forms, not truncated."""
    return any(form.fullmatch(text) for form in (_LIST, _IOTA, _MESH))


def connected_groups(pairs: Groups) -> Groups:
    """The sets of devices that (source, target) pairs connect, as sorted groups."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of |= dict.fromkeys(joined, joined)
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


@cache
def _groups(text: str, n_devices: int) -> Groups:
    if _LIST.fullmatch(text):
        return _listed(text) or (tuple(range(n_devices)),)
    if iota := _IOTA.fullmatch(text):
        return _iota(iota, n_devices)
    if mesh := _MESH.fullmatch(text):
        return _mesh(mesh, n_devices)
    raise ValueError("unknown form")


def _listed(text: str) -> Groups:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text))


def _iota(match: re.Match[str], n_devices: int) -> Groups:
    """Expands `[n_groups,size]<=[dims]T(perm)`: IDs 0.. in `dims`, transposed, cut into groups."""
    n_groups, size = _pair(match[1])
    if n_groups * size > n_devices:
        raise ValueError(f"{n_groups * size} ids, the module has {n_devices} devices")
    ids = _transposed(tuple(range(n_groups * size)), _ints(match[2]), _ints(match[3] or ""))
    return _cut(ids, size)


def _mesh(match: re.Match[str], n_devices: int) -> Groups:
    """Expands `mesh[axes], device_ids=(order) {refs}`: the devices grouped along the axes of refs."""
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(match[1])]
    n_in_mesh = prod(size for _, size in axes)
    if n_in_mesh != n_devices:
        raise ValueError(f"the mesh has {n_in_mesh} devices, the module {n_devices}")
    ids = _device_order(match[2], n_devices)
    refs = [_axis_ref(ref, dict(axes)) for ref in match[3].split(",") if ref.strip()]
    dims, grouped = _split_axes(axes, refs)
    ungrouped = [dim for dim in range(len(dims)) if dim not in grouped]
    return _cut(_transposed(ids, dims, (*ungrouped, *grouped)), prod(dims[dim] for dim in grouped))


def _axis_ref(text: str, sizes: dict[str, int]) -> _AxisRef:
    match = _AXIS_REF.fullmatch(text.strip())
    if match is None or match[1] not in sizes:
        raise ValueError(f"no axis {text.strip()!r}")
    if match[2] is None:
        return _AxisRef(name=match[1], pre_size=None, size=None)
    pre_size, size = int(match[2]), int(match[3])
    if not pre_size or not size or sizes[match[1]] % (pre_size * size):
        raise ValueError(f"sub-axis {text.strip()!r} does not divide its axis")
    return _AxisRef(name=match[1], pre_size=pre_size, size=size)


def _split_axes(
    axes: list[tuple[str, int]], refs: list[_AxisRef]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The mesh dims with sub-axes split off, and the indices of the grouped dims in ref order."""
    dims: list[int] = []
    dim_of: dict[_AxisRef, int] = {}
    for name, size in axes:
        axis_refs = sorted((r for r in refs if r.name == name), key=lambda ref: ref.pre_size or 1)
        for ref, (low, high) in _cuts(axis_refs, size):
            if ref is not None:
                dim_of[ref] = len(dims)
            dims.append(high // low)
    return tuple(dims), tuple(dim_of[ref] for ref in refs)


def _cuts(refs: list[_AxisRef], axis_size: int) -> list[tuple[_AxisRef | None, tuple[int, int]]]:
    """The consecutive factors (low, high) of an axis, each with the ref that covers it, if any."""
    spans = {
        (ref.pre_size or 1, (ref.pre_size or 1) * (ref.size or axis_size)): ref for ref in refs
    }
    bounds = sorted({1, axis_size, *(bound for span in spans for bound in span)})
    cuts = list(pairwise(bounds)) or [(1, 1)]
    if (
        any(high % low for low, high in cuts)
        or not set(spans) <= set(cuts)
        or len(spans) < len(refs)
    ):
        raise ValueError("sub-axes overlap")
    return [(spans.get(cut), cut) for cut in cuts]


def _device_order(text: str | None, n_devices: int) -> tuple[int, ...]:
    """The `device_ids` of a mesh: a list, or an iota that may be transposed."""
    if text is None:
        return tuple(range(n_devices))
    if match := _DEVICE_ORDER.fullmatch(text.strip()):
        dims = _ints(match[2] or match[1])
        if prod(dims) != n_devices:
            raise ValueError("device_ids do not number the devices of the mesh")
        ids = _transposed(tuple(range(prod(dims))), dims, _ints(match[3] or ""))
    else:
        ids = _ints(text)
    if sorted(ids) != list(range(n_devices)):
        raise ValueError("device_ids do not number the devices of the mesh")
    return ids


def _transposed(
    ids: tuple[int, ...], dims: tuple[int, ...], permutation: tuple[int, ...]
) -> tuple[int, ...]:
    """Row-major `ids` of an array of shape `dims`, in row-major order of the permuted dims."""
    permutation = permutation or tuple(range(len(dims)))
    if prod(dims) != len(ids) or sorted(permutation) != list(range(len(dims))):
        raise ValueError(f"{len(ids)} ids do not fill {list(dims)} permuted by {list(permutation)}")
    strides = [prod(dims[dim + 1 :]) for dim in permutation]
    offsets = [
        [i * stride for i in range(dims[d])] for d, stride in zip(permutation, strides, strict=True)
    ]
    return tuple(ids[sum(position)] for position in product(*offsets))


def _cut(ids: tuple[int, ...], size: int) -> Groups:
    return tuple(ids[i : i + size] for i in range(0, len(ids), size))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _pair(text: str) -> tuple[int, int]:
    numbers = _ints(text)
    if len(numbers) != 2 or not all(numbers):
        raise ValueError(f"expected [n_groups,size], got [{text}]")
    return numbers[0], numbers[1]


# Collectives whose groups are those of replicas also with a channel.
_ACROSS_REPLICAS = frozenset({"all-reduce", "all-gather", "reduce-scatter", "cross-replica-sum"})

CrossesSlices = Callable[[Groups], bool | None]  # None on a single slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a module on a mesh of `n_slices` slices, each of which runs a copy."""

    module: HloModule
    mesh: Mesh
    n_slices: int

    @property
    def n_per_slice(self) -> int:
        """The number of devices in one slice."""
        return self.module.n_devices

    def groups(self, instruction: Instruction) -> tuple[Groups, bool]:
        """The groups or source-target pairs on all slices, and whether they are pairs."""
        if (text := instruction.attribute("source_target_pairs")) is not None:
            return self.pairs(instruction, text), True
        where = self.module.where(instruction)
        if instruction.opcode.startswith("collective-permute"):
            raise ParseError(
                f"{where}: '{instruction.name}' ({instruction.opcode}) has no source_target_pairs. "
                "Give the text as the compiler wrote it."
            )
        text = instruction.replica_groups or "{}"  # XLA: all devices in one group
        groups = parse_groups(text, n_devices=self.n_per_slice, where=where)
        is_all = text.replace(" ", "") == "{}"
        return self.on_all_slices(self._flattened(instruction, groups, is_all=is_all)), False

    def pairs(self, instruction: Instruction, text: str) -> Groups:
        """The (source, target) pairs of a permute or send on all slices."""
        where = self.module.where(instruction)
        pairs = parse_pairs(text, n_devices=self.n_per_slice, where=where)
        return self.on_all_slices(self._flattened(instruction, pairs))

    def _flattened(
        self, instruction: Instruction, groups: Groups, *, is_all: bool = False
    ) -> Groups:
        """The groups by device, replica x partitions + partition, if their IDs are replicas or partitions.

        The modes are those of XLA's collective_ops_utils.h: without a channel the IDs are replicas; with one
        they are partitions, in a reduction or gather replicas of all partitions, or, with
        use_global_device_ids, devices. `is_all` marks one group of all IDs.
        """
        n_replicas, n_partitions = self.module.n_replicas, self.module.n_partitions
        if "use_global_device_ids=true" in instruction.attributes:
            return groups
        has_channel = bool(instruction.channel_id)
        opcode = instruction.opcode.removesuffix("-start")
        of_replicas = not has_channel or opcode in _ACROSS_REPLICAS
        n_ids = n_replicas if of_replicas else n_partitions
        if is_all and (n_replicas > 1 or has_channel):
            groups = (tuple(range(n_ids)),)
        if any(device >= n_ids for group in groups for device in group):
            return groups  # IDs of devices, as in text without channels
        if not of_replicas:
            replicas = range(0, self.n_per_slice, n_partitions)
            return tuple(tuple(r + p for p in group) for r in replicas for group in groups)
        devices = [[r * n_partitions + p for p in range(n_partitions)] for r in range(n_replicas)]
        if has_channel:
            return tuple(tuple(d for r in group for d in devices[r]) for group in groups)
        return tuple(
            tuple(devices[r][p] for r in group) for p in range(n_partitions) for group in groups
        )

    def on_all_slices(self, groups: Groups) -> Groups:
        """The devices of groups of positions in one slice, repeated for every slice."""
        positions = tuple(
            tuple(device + slice_index * self.n_per_slice for device in group)
            for slice_index in range(self.n_slices)
            for group in groups
        )
        return self.mesh.devices_at(positions)

    def axis_of(self, groups: Groups, *, is_pairs: bool) -> tuple[str | None, str | None]:
        """The mesh axis of the groups, or the reason why there is none; with a statement if they are parts of it."""
        if not groups:
            return None, "the participating devices are unknown"
        axis = self.mesh.axis_of_pairs(groups) if is_pairs else self.mesh.axis_of_groups(groups)
        if axis is not None:
            return axis, None
        if (around := self.mesh.axis_around_groups(groups)) is not None:
            return around, f"groups of {len(groups[0])} devices {SUBSETS} {around}"
        shown = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
        more = ",..." if len(groups) > 4 else ""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.axes)
        return None, f"groups {{{shown}{more}}} match no axis of the mesh ({mesh})"


def devices_of(module: HloModule, mesh: Mesh, crosses_slices: CrossesSlices) -> Devices:
    """The devices of the module; ParseError if their number does not fit the mesh.

    For several slices, libtpu compiles one module for the devices of one slice, with a send and a
    recv for each collective across slices.
    """
    n = module.n_devices
    if n == mesh.n_devices:
        return Devices(module=module, mesh=mesh, n_slices=1)
    is_slice = mesh.n_devices % n == 0 and bool(crosses_slices(((0, n),)))
    if n > 1 and is_slice and not crosses_slices((tuple(range(n)),)):
        return Devices(module=module, mesh=mesh, n_slices=mesh.n_devices // n)
    sizes = ",".join(f"{name}={size}" for name, size in mesh.axes)
    raise ParseError(
        f"{module.origin}:1: the module is compiled for {counted(n, 'device')}, but the mesh ({sizes}) has "
        f"{mesh.n_devices}. Give the plan or mesh, and the slice, for which it was compiled."
    )
