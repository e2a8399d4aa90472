"""The answer of a search without a choice, and the page of loads."""

from pathlib import Path

import pytest

import meshscope
from meshscope.errors import SpecError
from meshscope.reports.charts.cost import loads_chart

MODEL, SLO = "Qwen/Qwen3-32B", "ttft=0.5,tpot=0.03"


@pytest.mark.slow
def test_limits_that_the_text_calls_met_are_met() -> None:
    closest = meshscope.plan(MODEL, topology="v6e-8", slo="ttft=0.05,tpot=0.002", batch=8)
    text = " ".join(repr(closest).split())
    limits = text.partition("it meets --slo ")[2].partition(";")[0]
    again = meshscope.plan(MODEL, topology="v6e-8", slo=limits, batch=8)
    assert again.plan is not None
    least_ttft, least_tpot = closest.search.fastest
    assert least_ttft.ttft_s <= closest.search.closest.ttft_s
    assert least_tpot.tpot_s <= closest.search.closest.tpot_s


@pytest.mark.slow
def test_the_closest_choice_says_what_the_checkpoint_s_own_format_would_reach() -> None:
    """DeepSeek-V3.1 is published in fp8."""
    asked = {"topology": "tpu7x-16", "batch": "64", "slo": "ttft=1.0,tpot=0.05"}
    searched = meshscope.plan("deepseek-ai/DeepSeek-V3.1", **asked)
    text = " ".join(repr(searched).split())
    assert searched.plan is None
    assert "weights int8: converts the checkpoint, which has fp8_block128" in text
    assert "own format: " in text
    stored = searched.search.own_format
    assert stored is not None
    assert stored.experiment.workload.weight_dtype == "f8e4m3fn_block128"


ASKED = {"topology": "v6e-8", "layers": 1, "prompt": 64, "output": 16, "requests": 40}


def test_the_page_has_every_point_and_a_knee_for_each_plan(tmp_path: Path) -> None:
    page = tmp_path / "loads.html"
    served = meshscope.serve_sim(
        "Qwen/Qwen3-4B",
        plan="tp=8/dp=8",
        max_concurrency="1,8,32",
        slo="tpot=0.03",
        out=page,
        **ASKED,
    )
    assert served.table is not None
    *_, marks = (layer["data"]["values"] for layer in loads_chart(served.table).spec["layer"])
    assert sum(mark["knee"] for mark in marks) == 2
    rates = [p.figures.output_tokens_per_s / 8 for c in served.table.curves for p in c.points]
    assert [mark["rate"] for mark in marks] == pytest.approx(rates)
    text = page.read_text(encoding="utf-8")
    assert all(
        words in text for words in ("limit of TPOT", "dp=8 at 32 in flight", "next measurement")
    )


def test_one_load_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a page of several loads or plans"):
        meshscope.serve_sim("Qwen/Qwen3-4B", plan="tp=8", rate=1, out=tmp_path / "x.html", **ASKED)
