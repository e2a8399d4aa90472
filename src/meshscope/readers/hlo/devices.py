"""Maps the device IDs of a module to the mesh, for one slice or one module copy per slice."""

from collections.abc import Callable
from dataclasses import dataclass

from meshscope.errors import ParseError
from meshscope.events.collective import SUBSETS, Groups
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.groups import parse_groups, parse_pairs
from meshscope.readers.hlo.module import HloModule, Instruction
from meshscope.units import counted

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
