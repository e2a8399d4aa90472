"""The sentence of a step, from figures that are easy to divide."""

from dataclasses import replace

import pytest

from meshscope.analysis.why import why_sentence
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.spec.hardware.chips import chip_of

V5E = chip_of("v5e")  # 819 GB/s, 197 TFLOP/s
MLP = PartCost(
    part="mlp",
    compute_s=11e-3,
    collective_s=0.0,
    exposed_s=0.0,
    flops=1.97e11,  # 1 ms
    hbm_bytes=8.19e9,  # 10 ms
)
BETWEEN = PartCost(part=None, compute_s=0.0, collective_s=0.0, exposed_s=0.0)


def _step(*, exposed_s: float = 0.0, between_s: float = 0.0, idle_s: float = 0.0) -> StepTime:
    return StepTime(
        source=Source.COMPILED,
        phase=Phase.DECODE,
        step=TimeEstimate(value_s=11e-3 + exposed_s + between_s + idle_s, low_s=None, high_s=None),
        compute_s=11e-3 + between_s,
        exposed_s=exposed_s,
        idle_s=idle_s,
        bubble_s=0.0,
        collective_s=exposed_s,
        exposed_by_axis_s={"tp": exposed_s},
        by_basis_s={},
        parts=(MLP, replace(BETWEEN, compute_s=between_s)),
    )


@pytest.mark.parametrize(
    ("time", "sentence"),
    [
        (
            _step(exposed_s=1.5e-3),
            (
                "decode reads and writes 8.19 GB a device at 80% of the HBM rate; 1.5 ms is exposed "
                "communication over tp; 1 ms is mlp beyond the floor"
            ),
        ),
        (
            _step(exposed_s=5e-3, idle_s=4e-3),
            (
                "decode takes 20 ms, 2.0 x its HBM floor of 10 ms: 5 ms is exposed communication over tp, "
                "4 ms is waiting for copies or other pipeline stages"
            ),
        ),
        (
            _step(between_s=489e-3),
            (
                "489 ms of the 500 ms of decode are copies and other operations outside the parts of the "
                "model; the HBM floor is 10 ms"
            ),
        ),
    ],
    ids=["near its floor", "far from it", "one cause takes most"],
)
def test_a_sentence_names_what_binds_and_the_largest_causes(time: StepTime, sentence: str) -> None:
    assert why_sentence(time, V5E) == sentence


def test_a_chip_without_peaks_gets_the_time_alone() -> None:
    assert why_sentence(_step(), chip_of("cpu")) == "decode takes 11 ms"
