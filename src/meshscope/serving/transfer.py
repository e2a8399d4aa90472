"""The move of a prompt's KV cache from the instance that computed it to the one that decodes."""

from dataclasses import dataclass, replace
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.constants import LinkConstants, constants_of
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.interconnect.lines import CollectiveLine, collective_lines, fastest
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment import Experiment
from meshscope.serving.step_costs import sequence_bytes

SHARED_BYTES = float(1 << 30)  # that each device sends, to see whether ranks slow each other
NEAR = 1 + 1e-9


class TransferPath(StrEnum):
    """What connects the instances: links of one slice, or the data center network."""

    ICI = "ici"
    DCN = "dcn"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransfer:
    """Bytes of a prompt's cache over all receiving devices, and the lines of senders and receivers.

    Each device of a side moves an equal part; `sides` pairs the number of devices with the lines of their
    links. `networks` lists, for each rank of a prefill and of a decode instance, the hosts whose network it
    uses, or one number for all ranks that share links. Batches of a pipeline are ranks with the same networks.
    """

    path: TransferPath
    fixed_bytes: float
    token_bytes: float
    sides: tuple[tuple[int, tuple[CollectiveLine, ...]], ...]
    networks: tuple[tuple[tuple[int, ...], ...], ...]

    def n_bytes(self, n_tokens: int) -> float:
        """Bytes of a prompt of this length."""
        return self.fixed_bytes + self.token_bytes * n_tokens

    def seconds(self, n_tokens: int) -> float:
        """Seconds of a prompt that has the links to itself, on the slower side."""
        n_bytes = self.n_bytes(n_tokens)
        return max(fastest(lines, n_bytes / n).seconds(n_bytes / n) for n, lines in self.sides)


def cache_transfer(
    prefill: Experiment,
    decode: Experiment,
    path: TransferPath,
    constants: LinkConstants | None = None,
) -> CacheTransfer:
    """The transfer between one rank of each instance, in the cache layout of the decoding one.

    Over ICI, the instances are neighbors in a slice. SpecError for different chips, or instances that
    cannot be connected so.
    """
    if prefill.topology.chip != decode.topology.chip:
        raise SpecError(
            f"prefill on {prefill.topology.name} and decode on {decode.topology.name}: the time of the "
            "transfer is modeled between equal chips. Use slices of one chip."
        )
    constants = constants or constants_of(decode.topology.chip)
    fixed_bytes, token_bytes = sequence_bytes(decode)
    # The devices that hold the cache of a sequence of the first rank.
    sides = [(one, one.mesh.groups("pp", "cp", "tp")[0]) for one in (prefill, decode)]
    n_receivers = len(sides[1][1])
    return CacheTransfer(
        path=path,
        fixed_bytes=fixed_bytes * n_receivers,
        token_bytes=token_bytes * n_receivers,
        sides=tuple((len(d), _lines(one.topology, d, path, constants)) for one, d in sides),
        networks=tuple(_networks(one, path, constants) for one, _ in sides),
    )


def networks_of_engines(
    n_engines: int, of_instance: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """The networks of all engines of a pool, which take one rank of each instance after the other."""
    n_instances = n_engines // len(of_instance)
    stride = 1 + max(network for of_rank in of_instance for network in of_rank)
    return tuple(
        tuple(instance * stride + network for network in of_rank)
        for of_rank in of_instance
        for instance in range(n_instances)
    )


def _lines(
    topology: Topology, devices: tuple[int, ...], path: TransferPath, constants: LinkConstants
) -> tuple[CollectiveLine, ...]:
    """The lines of these devices, which send all at once to the same devices of an equal instance."""
    match path:
        case TransferPath.DCN:
            pair = replace(topology, n_slices=2 * topology.n_slices)
            groups = tuple((device, device + topology.n_devices) for device in devices)
        case TransferPath.ICI:
            pair = _joined_slice(topology)
            groups = _neighbors(topology, pair, devices)
    return collective_lines(Kind.SEND, geometry_of(pair, groups), constants)


def _networks(
    experiment: Experiment, path: TransferPath, constants: LinkConstants
) -> tuple[tuple[int, ...], ...]:
    """The networks of each rank and of each batch of a pipeline: hosts, or links that ranks may share."""
    plan, topology = experiment.plan, experiment.topology
    ranks = plan.mesh.groups("pp", "cp", "tp")
    match path:
        case TransferPath.DCN if topology.chip.kind is ChipKind.TPU:
            host = fabric_of(topology).host
            networks = [tuple(sorted({int(host[device]) for device in rank})) for rank in ranks]
        case TransferPath.DCN:  # each GPU has a network interface
            networks = [tuple(rank) for rank in ranks]
        case TransferPath.ICI:
            every = tuple(device for rank in ranks for device in rank)
            one_s, all_s = (
                fastest(lines, SHARED_BYTES).seconds(SHARED_BYTES)
                for lines in (_lines(topology, d, path, constants) for d in (ranks[0], every))
            )
            is_shared = all_s > one_s * NEAR
            networks = [(0 if is_shared else number,) for number in range(len(ranks))]
    return tuple(networks * plan.pp)


def _joined_slice(topology: Topology) -> Topology:
    if topology.chip.kind is not ChipKind.TPU or topology.n_slices > 1:
        raise SpecError(
            f"instances of {topology.name} are not parts of a slice. Use --transfer dcn."
        )
    grid = list(topology.grid)
    grid[grid.index(min(grid))] *= 2
    joined = replace(topology, grid=tuple(grid))
    try:
        return parse_topology(joined.name)
    except SpecError as error:
        raise SpecError(
            f"two instances of {topology.name} do not fit in one slice ({error}) Use --transfer dcn."
        ) from error


def _neighbors(topology: Topology, joined: Topology, devices: tuple[int, ...]) -> Groups:
    """Each device with the one at its place in the second half of the joined slice."""
    places, joined_places = (
        [(*at, core) for at, core in zip(one.coordinates.tolist(), one.core.tolist(), strict=True)]
        for one in (fabric_of(topology), fabric_of(joined))
    )
    ids: dict[tuple[int, ...], int] = {place: number for number, place in enumerate(joined_places)}
    offset = [a if a != b else 0 for a, b in zip(topology.grid, joined.grid, strict=True)]
    offset += [0] * (4 - len(offset))  # places have x, y, z and the core
    moved = {d: tuple(map(sum, zip(places[d], offset, strict=True))) for d in devices}
    return tuple((ids[places[d]], ids[moved[d]]) for d in devices)
