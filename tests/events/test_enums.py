"""Wire factors against the formulas of nccl-tests and against a simulated ring."""

from fractions import Fraction
from typing import NamedTuple

import pytest

from meshscope.events.enums import Kind, wire_factor

GROUP_SIZES = (2, 3, 4, 8, 256)


class Factor(NamedTuple):
    """A bus bandwidth factor of nccl-tests doc/PERFORMANCE.md: numerator over the group size n."""

    kind: Kind
    numerator: str


@pytest.mark.parametrize("n", GROUP_SIZES)
@pytest.mark.parametrize(
    "case",
    [
        Factor(Kind.ALL_REDUCE, "2*(n-1)"),
        Factor(Kind.ALL_GATHER, "n-1"),
        Factor(Kind.REDUCE_SCATTER, "n-1"),
        Factor(Kind.ALL_TO_ALL, "n-1"),
        Factor(Kind.BROADCAST, "n"),
        Factor(Kind.GATHER, "n"),
        Factor(Kind.REDUCE, "n"),
        Factor(Kind.SCATTER, "n"),
        Factor(Kind.PERMUTE, "n"),
        Factor(Kind.SEND, "n"),
        Factor(Kind.RECV, "0"),
    ],
    ids=lambda case: case.kind,
)
def test_wire_factor_equals_nccl_tests(case: Factor, n: int) -> None:
    assert wire_factor(case.kind, n) == Fraction(eval(case.numerator, {"n": n}), n)


@pytest.mark.parametrize("kind", Kind)
def test_a_single_device_sends_nothing(kind: Kind) -> None:
    assert wire_factor(kind, 1) == 0


@pytest.mark.parametrize("n", GROUP_SIZES[:4])
def test_wire_factor_equals_the_bytes_sent_in_a_ring(n: int) -> None:
    assert wire_factor(Kind.ALL_GATHER, n) == _sent_in_a_ring_all_gather(n)
    assert wire_factor(Kind.ALL_REDUCE, n) == 2 * _sent_in_a_ring_all_gather(n)


def _sent_in_a_ring_all_gather(n: int) -> Fraction:
    """Each device forwards the chunk it received last until all devices have all n chunks."""
    has = [{device} for device in range(n)]
    newest = list(range(n))
    n_sent = 0
    while any(len(chunks) < n for chunks in has):
        newest = [newest[device - 1] for device in range(n)]
        n_sent += 1
        for device, chunk in enumerate(newest):
            has[device].add(chunk)
    return Fraction(n_sent, n)
