"""The loop of a GPU without one: its cases are experiments, and its correction is fitted to half of them.

And the stored loop of CPU devices.
"""

import csv
import sys
from pathlib import Path

import pytest

from meshscope.plans.kernel_choice import Kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cpu_loop
from gpu_loop import CPU, FULL, SHALLOW, Case, Judged, Measurement, corrected


@pytest.mark.parametrize("case", [*SHALLOW, *FULL])
def test_each_case_is_an_unrolled_experiment_with_a_cache_that_needs_no_padding(case) -> None:
    experiment = case.experiment("h200:1")
    assert not experiment.is_scanned
    assert experiment.workload.context % 64 == 0
    assert experiment.kernels.prefill_attention.kernel is Kernel.CUDNN


def test_there_are_twenty_experiments_and_a_rehearsal_on_a_cpu() -> None:
    assert len(SHALLOW) == 20
    assert {case.experiment("cpu:1").workload.weight_dtype for case in CPU} == {"f32"}


def _judged(case: int, *, measured_s: float, published_s: float) -> Judged:
    measurement = Measurement(
        case=case,
        phase="decode",
        seconds=2 * measured_s,
        queued_s=measured_s,
        n_bytes=1.0,
        flops=1.0,
        compile_s=1.0,
    )
    return Judged(
        case=Case(),
        measurement=measurement,
        is_fitted=case % 2 == 0,
        floor_s=0.5,
        published_s=published_s,
    )


def test_the_factor_comes_from_the_fitted_cases_alone() -> None:
    rows = [
        _judged(0, measured_s=1.2, published_s=1.0),
        _judged(1, measured_s=9.0, published_s=2.0),
    ]
    assert [row.corrected_s for row in corrected(rows)] == pytest.approx([1.2, 2.4])


def test_a_decode_step_takes_the_time_that_the_host_does_not_wait_for() -> None:
    assert _judged(0, measured_s=1.2, published_s=1.0).measured_s == pytest.approx(1.2)


def test_the_stored_loop_of_cpu_devices_has_the_collectives_of_present_predictions() -> None:
    """Its times are of the day that docs/evidence/accuracy.md names; `make cpu-loop` measures them again."""
    with cpu_loop.CSV.open(newline="", encoding="utf-8") as file:
        stored = [
            (r["model"], r["plan"], r["phase"], int(r["n_collectives"]))
            for r in csv.DictReader(file)
        ]
    present = [
        (case.model, case.plan, case.phase.value, sum(row.count for row in case.rows))
        for case in cpu_loop.cases()
    ]
    assert stored == present
