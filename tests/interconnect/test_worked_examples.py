"""The scaling book's worked examples, to the digits that it gives, from the published peaks alone."""

import pytest

from meshscope.hardware.topology import parse_topology
from meshscope.interconnect import collective_time
from meshscope.interconnect.constants import spec_constants
from meshscope.table.kinds import Kind


def test_v5e_corner_to_corner_takes_the_published_time() -> None:
    """tpus.md question 5: bf16[8,128,8192] over v5e 4x4 from (0,0) to (3,3).

    The book splits the array over both links of the corner: half along x first, half along y. Ours
    are two permutes side by side; a transfer of half takes 1.7e7/9e10 = 188 us and six hops, 194 us.
    """
    topology = parse_topology("v5e:4x4")
    half = 8 * 128 * 8192 * 2 // 2
    time = collective_time(
        Kind.PERMUTE,
        groups=((0, 15),),
        payload_bytes=half,
        topology=topology,
        constants=spec_constants(topology.chip),
    )
    # The book adds the latency of the hops; to two digits.
    assert time.seconds == pytest.approx(194e-6, rel=0.02)
