"""The sentence of a step, from figures that are easy to divide."""

from dataclasses import replace
from pathlib import Path

import pytest
from made import estimate, part_cost, step_time

from meshscope.analysis.roofline import step_floor, why_sentence
from meshscope.events.enums import Phase
from meshscope.events.step_time import Activity, ActivityTime, PartCost, StepTime
from meshscope.hardware.chips import chip_of

V5E = chip_of("v5e")  # 819 GB/s, 197 TFLOP/s
MLP = part_cost("mlp", 11e-3, flops=1.97e11, hbm_bytes=8.19e9)
READS = ActivityTime(activity=Activity.KERNEL, seconds=11e-3, hbm_busy_s=10e-3, flops=1.97e11)


def _step(*, exposed_s: float = 0.0, relayout_s: float = 0.0, idle_s: float = 0.0) -> StepTime:
    return step_time(
        Phase.DECODE,
        estimate(11e-3 + exposed_s + relayout_s + idle_s),
        11e-3 + relayout_s,
        exposed_s=exposed_s,
        idle_s=idle_s,
        collective_s=exposed_s,
        exposed_by_axis_s={"tp": exposed_s},
        parts=(MLP,),
        activities=(
            READS,
            ActivityTime(activity=Activity.EXPOSED, seconds=exposed_s, hbm_busy_s=0.0, axis="tp"),
            ActivityTime(activity=Activity.RELAYOUT, seconds=relayout_s, hbm_busy_s=0.0),
            ActivityTime(activity=Activity.COPY, seconds=idle_s, hbm_busy_s=0.0),
        ),
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"exposed_s": 1.5e-3},
            "takes 12.5 ms, 1.25 x its HBM floor of 10 ms: 1.5 ms exposed tp communication, 1 ms attention kernels below peak",
        ),
        (
            {"exposed_s": 5e-3, "idle_s": 4e-3},
            "takes 20 ms, 2.00 x its HBM floor of 10 ms: 5 ms exposed tp communication, 4 ms waiting for HBM, 1 ms other",
        ),
        (
            {"relayout_s": 489e-3},
            "takes 500 ms, 50.0 x its HBM floor of 10 ms: 489 ms copies between layouts",
        ),
    ],
    ids=["near its floor", "far from it", "one cause takes most"],
)
def test_a_sentence_names_what_binds_and_the_largest_causes(options, sentence) -> None:
    assert why_sentence(_step(**options), V5E) == f"decode {sentence}"


def test_a_chip_without_peaks_gets_the_time_alone() -> None:
    assert why_sentence(_step(), chip_of("cpu")) == "decode takes 11 ms"


def test_the_glossary_explains_every_reason() -> None:
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text("utf-8")
    reasons = glossary.partition("## Reasons")[2].partition("\n## ")[0]
    explained = {
        name
        for line in reasons.splitlines()
        for name in line.removeprefix("| ").partition(" | ")[0].split(", ")
    }
    spent = [
        ActivityTime(activity=activity, seconds=1e-3, hbm_busy_s=0.0, padding_flops=1.0)
        for activity in Activity
    ]
    for part in ("mlp", "moe.experts"):
        for work in ({"hbm_bytes": 1e9}, {"hbm_bytes": 1.0, "flops": 1.97e11}):
            parts = (PartCost(part=part, compute_s=1.0, collective_s=0.0, exposed_s=0.0, **work),)
            time = replace(_step(), parts=parts, activities=tuple(spent))
            floor = step_floor(time, V5E)
            named = {cause.cause for cause in floor.causes}
            assert named - {"exposed communication"} <= explained
