"""The page of plans under several loads: every point, the knees, and the limits."""

from pathlib import Path

import pytest

import meshscope
from meshscope.errors import SpecError
from meshscope.reports.charts.cost import loads_chart

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
