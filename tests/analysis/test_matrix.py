"""The traffic matrix: rows sum to the wire bytes of a device; algorithms determine the receivers."""

from fractions import Fraction

import pytest
from made import collective

from meshscope.analysis.volume import sent_by_device, traffic_imbalance, traffic_matrix
from meshscope.events.enums import Kind, wire_factor
from meshscope.events.schema import table_of

TWO = ((0, 1, 2, 3), (4, 5, 6, 7))


def made(kind: Kind, groups, *, count: int = 1, axis: str = "tp", n: int = 96):
    return collective(kind, (n,), axis=axis, groups=groups, count=count)


def edges(*rows) -> dict[tuple[int, int], float]:
    sent = traffic_matrix(table_of(rows), by=())
    return {(a, b): n for a, b, n in sent.select("from_device", "to_device", "wire_bytes").rows()}


RING = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4))
PAIRS = ((0, 1), (1, 2), (2, 2))


@pytest.mark.parametrize(
    ("kind", "groups", "of_edge", "sent"),
    [
        (Kind.ALL_REDUCE, TWO, 288.0, RING),
        (Kind.ALL_GATHER, TWO, 144.0, RING),
        (Kind.ALL_GATHER, ((0, 2, 3, 1),), 144.0, ((0, 2), (2, 3), (3, 1), (1, 0))),
        (Kind.ALL_TO_ALL, ((0, 1, 2),), 64.0, ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))),
        (Kind.PERMUTE, PAIRS, 192.0, PAIRS[:2]),
        (Kind.RECV, PAIRS, 0.0, ()),
        (Kind.BROADCAST, ((0, 1, 2),), 192.0, ((0, 1), (1, 2))),
        (Kind.REDUCE, ((0, 1, 2),), 192.0, ((1, 0), (2, 1))),
        (Kind.ALL_REDUCE, ((0,), (1,)), 0.0, ()),
    ],
)
def test_the_algorithm_determines_the_receivers(kind, groups, of_edge, sent) -> None:
    """Rings in the order of the group, all pairs, the targets, and chains to and from the first."""
    assert edges(made(kind, groups)) == dict.fromkeys(sent, of_edge)


@pytest.mark.parametrize(
    "kind",
    [
        k
        for k in Kind
        if k not in {Kind.RECV, Kind.BROADCAST, Kind.GATHER, Kind.REDUCE, Kind.SCATTER}
    ],
)
def test_a_device_sends_its_wire_bytes(kind: Kind) -> None:
    pairs = tuple((i, (i + 1) % 8) for i in range(8))
    groups = pairs if kind in {Kind.PERMUTE, Kind.SEND} else TWO
    table = table_of([made(kind, groups, count=3), made(kind, groups, count=2, n=10)])
    size = len(groups[0])
    wire = wire_factor(kind, size) * (3 * 192 + 2 * 20)
    sent = sent_by_device(traffic_matrix(table), 8)
    assert sent["sent_bytes"].to_list() == pytest.approx([float(Fraction(wire))] * 8)


def test_axes_sum_to_the_whole() -> None:
    across = made(Kind.ALL_TO_ALL, ((0, 4), (1, 5), (2, 6), (3, 7)), axis="dp")
    table = table_of([made(Kind.ALL_REDUCE, TWO), across])
    by_axis = traffic_matrix(table)
    assert by_axis["wire_bytes"].sum() == traffic_matrix(table, by=())["wire_bytes"].sum()
    assert set(by_axis["axis"]) == {"tp", "dp"}


def test_renumbered_devices_send_as_much() -> None:
    there = {i: (3 * i + 1) % 8 for i in range(8)}
    renumbered = tuple(tuple(there[d] for d in group) for group in TWO)
    ours, theirs = edges(made(Kind.ALL_REDUCE, TWO)), edges(made(Kind.ALL_REDUCE, renumbered))
    assert {(there[a], there[b]): n for (a, b), n in ours.items()} == theirs


@pytest.mark.parametrize(
    ("kind", "groups", "n_devices", "expected"),
    [(Kind.PERMUTE, ((0, 1),), 4, 4.0), (Kind.ALL_REDUCE, TWO, 8, 1.0)],
)
def test_a_device_that_sends_nothing_counts_in_the_imbalance(
    kind, groups, n_devices, expected
) -> None:
    imbalance = traffic_imbalance(table_of([made(kind, groups)]), n_devices)
    assert imbalance["imbalance"].to_list() == [expected]
