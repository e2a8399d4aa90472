"""Replica groups and source-target pairs of HLO text, expanded to device IDs and mapped to the mesh."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

import numpy as np

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


def parse_groups(text: str, *, n_devices: int, where: str) -> Groups:
    """Expands `replica_groups` to device groups; `{}` means one group of all devices.

    Raises ParseError, prefixed with `where`, for an unknown form. The three forms are from
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


def connected_groups(pairs: Groups) -> Groups:
    """The sets of devices that (source, target) pairs connect, as sorted groups."""
    above: dict[int, int] = {}

    def root(device: int) -> int:
        while (parent := above.setdefault(device, device)) != device:
            above[device] = device = above[parent]  # halves the path
        return device

    for source, target in pairs:
        above[root(source)] = root(target)
    groups: dict[int, list[int]] = defaultdict(list)
    for device in sorted(above):
        groups[root(device)].append(device)
    return tuple(sorted(map(tuple, groups.values())))


@cache
def _groups(text: str, n_devices: int) -> Groups:
    if _LIST.fullmatch(text):
        groups = _listed(text) or (tuple(range(n_devices)),)
        ids = [device for group in groups for device in group]
        if len(set(ids)) < len(ids):
            raise ValueError("a device is there twice")
        return groups
    if iota := _IOTA.fullmatch(text):
        return _iota(iota, n_devices)
    if mesh := _MESH.fullmatch(text):
        return _mesh(mesh, n_devices)
    raise ValueError("unknown form")


def _listed(text: str) -> Groups:
    return tuple(integers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))


def integers(text: str) -> tuple[int, ...]:
    """Numbers that are separated by commas."""
    return tuple(int(number) for number in text.split(",") if number.strip())


def _iota(match: re.Match[str], n_devices: int) -> Groups:
    """Expands `[n_groups,size]<=[dims]T(perm)`: IDs 0.. in `dims`, transposed, cut into groups."""
    shape = integers(match[1])
    if len(shape) != 2 or not all(shape):
        raise ValueError(f"expected [n_groups,size], got [{match[1]}]")
    if prod(shape) > n_devices:
        raise ValueError(f"{prod(shape)} ids, the module has {n_devices} devices")
    ids = _transposed(range(prod(shape)), integers(match[2]), integers(match[3] or ""))
    return _cut(ids, shape[1])


def _mesh(match: re.Match[str], n_devices: int) -> Groups:
    """Expands `mesh[axes], device_ids=(order) {refs}`: the devices grouped along the axes of refs.

    A ref is an axis, or `axis:(pre_size)size`: its sub-axis of `size` devices, with `pre_size` outside it.
    """
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(match[1])}
    if prod(axes.values()) != n_devices:
        raise ValueError(f"the mesh has {prod(axes.values())} devices, the module {n_devices}")
    refs: list[tuple[str, int, int]] = []  # (axis, low, high): its factors between these products
    for text in (piece.strip() for piece in match[3].split(",") if piece.strip()):
        ref = _AXIS_REF.fullmatch(text)
        if ref is None or ref[1] not in axes:
            raise ValueError(f"no axis {text!r}")
        low, size = int(ref[2] or 1), int(ref[3] or axes[ref[1]])
        if not low or not size or axes[ref[1]] % (low * size):
            raise ValueError(f"sub-axis {text!r} does not divide its axis")
        refs.append((ref[1], low, low * size))
    dims: dict[tuple[str, int, int], int] = {}
    for name, size in axes.items():
        bounds = sorted({1, size, *(bound for ref in refs if ref[0] == name for bound in ref[1:])})
        for low, high in pairwise(bounds) if size > 1 else [(1, 1)]:
            if high % low:
                raise ValueError("sub-axes overlap")
            dims[name, low, high] = high // low
    if not set(refs) <= set(dims) or len(set(refs)) < len(refs):
        raise ValueError("sub-axes overlap")
    order = [dim for dim in dims if dim not in refs] + refs
    permutation = [list(dims).index(dim) for dim in order]
    ids = _transposed(_device_order(match[2], n_devices), [*dims.values()], permutation)
    return _cut(ids, prod(dims[ref] for ref in refs))


def _device_order(text: str | None, n_devices: int) -> Sequence[int]:
    ids: Sequence[int] = range(n_devices) if text is None else ()
    if text is not None and (match := _DEVICE_ORDER.fullmatch(text.strip())):
        dims = integers(match[2] or match[1])
        if prod(dims) == n_devices:
            ids = _transposed(range(n_devices), dims, integers(match[3] or ""))
    elif text is not None:
        ids = integers(text)
    if sorted(ids) != list(range(n_devices)):
        raise ValueError("device_ids do not number the devices of the mesh")
    return ids


def _cut(ids: Sequence[int], size: int) -> Groups:
    return tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def _transposed(ids: Sequence[int], dims: Sequence[int], permutation: Sequence[int]) -> list[int]:
    """Row-major `ids` of an array of shape `dims`, in row-major order of the permuted dims."""
    permutation = permutation or range(len(dims))
    if prod(dims) != len(ids) or sorted(permutation) != list(range(len(dims))):
        raise ValueError(f"{len(ids)} ids do not fill {list(dims)} permuted by {list(permutation)}")
    return np.array(ids).reshape(tuple(dims)).transpose(tuple(permutation)).ravel().tolist()


# Collectives whose groups are of replicas even with a channel.
_ACROSS_REPLICAS = frozenset({"all-reduce", "all-gather", "reduce-scatter", "cross-replica-sum"})

CrossesSlices = Callable[[Groups], bool | None]  # None on a single slice


def one_slice(_: Groups) -> None:
    """Whether groups cross slices: unknown, or on a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a module on a mesh of `n_slices` slices, each running a copy."""

    module: HloModule
    mesh: Mesh
    crosses_slices: CrossesSlices
    n_slices: int

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
        groups = parse_groups(text, n_devices=self.module.n_devices, where=where)
        is_all = text.replace(" ", "") == "{}"
        return self.on_all_slices(self._flattened(instruction, groups, is_all=is_all)), False

    def pairs(self, instruction: Instruction, text: str) -> Groups:
        """The (source, target) pairs of a permute or send on all slices."""
        where = self.module.where(instruction)
        pairs = parse_pairs(text, n_devices=self.module.n_devices, where=where)
        return self.on_all_slices(self._flattened(instruction, pairs))

    def _flattened(
        self, instruction: Instruction, groups: Groups, *, is_all: bool = False
    ) -> Groups:
        """The groups by device, replica x partitions + partition, if their IDs are replicas or partitions.

        The modes follow XLA's collective_ops_utils.h: without a channel the IDs are replicas; with one
        they are partitions, in a reduction or gather replicas of all partitions, or, with
        use_global_device_ids, devices. `is_all` marks one group of all IDs.
        """
        n_replicas, n_partitions = self.module.n_replicas, self.module.n_partitions
        if "use_global_device_ids=true" in instruction.attributes:
            return groups
        has_channel = bool(instruction.channel_id)
        of_replicas = (
            not has_channel or instruction.opcode.removesuffix("-start") in _ACROSS_REPLICAS
        )
        n_ids = n_replicas if of_replicas else n_partitions
        if is_all and (n_replicas > 1 or has_channel):
            groups = (tuple(range(n_ids)),)
        if any(device >= n_ids for group in groups for device in group):
            return groups  # IDs of devices, as in text without channels
        if not of_replicas:
            replicas = range(0, n_replicas * n_partitions, n_partitions)
            return tuple(tuple(r + p for p in group) for r in replicas for group in groups)
        each = [range(n_partitions)] if has_channel else [(p,) for p in range(n_partitions)]
        return tuple(
            tuple(r * n_partitions + p for r in group for p in partitions)
            for partitions in each
            for group in groups
        )

    def on_all_slices(self, groups: Groups) -> Groups:
        """The devices of groups of positions in one slice, repeated for every slice."""
        firsts = range(0, self.n_slices * self.module.n_devices, self.module.n_devices)
        positions = tuple(tuple(first + d for d in group) for first in firsts for group in groups)
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
        return None, f"groups {{{shown}{more}}} match no axis of the mesh ({_sizes(self.mesh)})"


def _sizes(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.axes)


def is_one_slice(n_devices: int, mesh: Mesh, crosses_slices: CrossesSlices) -> bool:
    """Whether so many devices are one of several slices."""
    is_part = n_devices > 1 and mesh.n_devices % n_devices == 0
    is_whole = is_part and bool(crosses_slices(((0, n_devices),)))
    return is_whole and not crosses_slices((tuple(range(n_devices)),))


def devices_of(module: HloModule, mesh: Mesh, crosses_slices: CrossesSlices) -> Devices:
    """The devices of the module; ParseError if their number does not fit the mesh.

    For several slices, libtpu compiles one module for the devices of one slice, with a send and a
    recv for each collective across slices.
    """
    n = module.n_devices
    if n == mesh.n_devices:
        return Devices(module=module, mesh=mesh, crosses_slices=crosses_slices, n_slices=1)
    if is_one_slice(n, mesh, crosses_slices):
        n_slices = mesh.n_devices // n
        return Devices(module=module, mesh=mesh, crosses_slices=crosses_slices, n_slices=n_slices)
    raise ParseError(
        f"{module.origin}:1: the module is compiled for {counted(n, 'device')}, but the mesh ({_sizes(mesh)}) has "
        f"{mesh.n_devices}. Give the plan or mesh, and the slice, for which it was compiled."
    )
