"""Link traffic equals the loads of the interconnect model for each collective."""

import pytest
from made import collective

from meshscope.analysis.volume import link_traffic
from meshscope.events.enums import Kind
from meshscope.events.schema import table_of
from meshscope.hardware.interconnect.lines import link_loads
from meshscope.hardware.topology import parse_topology

SLICE = parse_topology("v6e:2x4")


def made(kind: Kind, groups, *, count: int = 1, axis: str = "tp"):
    return collective(kind, (2**20,), axis=axis, groups=groups, count=count)


def test_a_permute_to_the_neighbor_uses_one_link() -> None:
    links = link_traffic(table_of([made(Kind.PERMUTE, ((0, 1),), count=3)]), SLICE)
    assert links["load_bytes"].to_list() == [3 * 2**21]
    assert links["link_s"].to_list() == pytest.approx([3 * 2**21 / 9e10])
    (row,) = links.iter_rows(named=True)
    steps = zip(row["from_chip"].split(","), row["to_chip"].split(","), strict=True)
    assert sum(abs(int(a) - int(b)) for a, b in steps) == 1


def test_the_links_sum_to_those_of_each_collective() -> None:
    rows = [
        made(Kind.ALL_REDUCE, (tuple(range(8)),), count=2),
        made(Kind.ALL_TO_ALL, ((0, 4), (1, 5), (2, 6), (3, 7)), axis="dp"),
    ]
    each = [
        row.count * load.load_bytes
        for row in rows
        for load in link_loads(row.kind, groups=row.groups, payload_bytes=2**21, topology=SLICE)
    ]
    links = link_traffic(table_of(rows), SLICE)
    assert links["load_bytes"].sum() == pytest.approx(sum(each))
    assert link_traffic(table_of(rows), SLICE, by=())["load_bytes"].sum() == pytest.approx(
        sum(each)
    )


@pytest.mark.parametrize("name", ["v6e:1x1", "h100:8", "cpu:8"])
def test_without_a_torus_no_link_carries_anything(name: str) -> None:
    topology = parse_topology(name)
    groups = (tuple(range(topology.n_devices)),)
    assert link_traffic(table_of([made(Kind.ALL_REDUCE, groups)]), topology).is_empty()
