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


def test_a_ring_sends_to_the_next_of_the_group() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4)]
    for kind, sent in ((Kind.ALL_REDUCE, 288.0), (Kind.ALL_GATHER, 144.0)):
        assert edges(made(kind, TWO)) == dict.fromkeys(ring, sent)


def test_the_ring_follows_the_order_of_the_group() -> None:
    assert set(edges(made(Kind.ALL_GATHER, ((0, 2, 3, 1),)))) == {(0, 2), (2, 3), (3, 1), (1, 0)}


def test_all_to_all_sends_equally_to_all_others() -> None:
    sent = edges(made(Kind.ALL_TO_ALL, ((0, 1, 2),)))
    assert sent == dict.fromkeys([(a, b) for a in range(3) for b in range(3) if a != b], 64.0)


def test_a_permute_goes_to_its_target_and_a_receive_nowhere() -> None:
    pairs = ((0, 1), (1, 2), (2, 2))
    assert edges(made(Kind.PERMUTE, pairs), made(Kind.RECV, pairs)) == {
        (0, 1): 192.0,
        (1, 2): 192.0,
    }


def test_a_broadcast_goes_along_a_chain() -> None:
    assert set(edges(made(Kind.BROADCAST, ((0, 1, 2),)))) == {(0, 1), (1, 2)}


def test_a_reduction_goes_along_the_chain_to_the_first() -> None:
    assert set(edges(made(Kind.REDUCE, ((0, 1, 2),)))) == {(1, 0), (2, 1)}


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
    rows = [
        made(Kind.ALL_REDUCE, TWO),
        made(Kind.ALL_TO_ALL, ((0, 4), (1, 5), (2, 6), (3, 7)), axis="dp"),
    ]
    by_axis = traffic_matrix(table_of(rows))
    assert by_axis["wire_bytes"].sum() == traffic_matrix(table_of(rows), by=())["wire_bytes"].sum()
    assert set(by_axis["axis"]) == {"tp", "dp"}


def test_renumbered_devices_send_as_much() -> None:
    there = {i: (3 * i + 1) % 8 for i in range(8)}
    renumbered = tuple(tuple(there[d] for d in group) for group in TWO)
    ours, theirs = edges(made(Kind.ALL_REDUCE, TWO)), edges(made(Kind.ALL_REDUCE, renumbered))
    assert {(there[a], there[b]): n for (a, b), n in ours.items()} == theirs


def test_groups_of_one_send_nothing() -> None:
    assert edges(made(Kind.ALL_REDUCE, ((0,), (1,)))) == {}


def test_a_device_that_sends_nothing_counts_in_the_imbalance() -> None:
    table = table_of([made(Kind.PERMUTE, ((0, 1),))])
    assert traffic_imbalance(table, 4)["imbalance"].to_list() == [4.0]
    assert traffic_imbalance(table_of([made(Kind.ALL_REDUCE, TWO)]), 8)["imbalance"].to_list() == [
        1
    ]
