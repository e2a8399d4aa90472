"""Plots: one PNG and one SVG of each chart of the report, the same at every run."""

import json
import sys
from pathlib import Path
from xml.dom.minidom import parse

import polars as pl
import pytest

from meshscope.api import export
from meshscope.errors import MissingToolError
from meshscope.events.enums import Source
from meshscope.hardware.topology import parse_topology
from meshscope.reports.charts.timeline import TimeSpan, lanes_chart
from meshscope.reports.charts.traffic import torus_chart

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=4,dp=2", "--layers", "2", "--batch", "2")  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path, meshscope) -> Path:
    """A folder with the run `one`, which commands of the test see."""
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    assert meshscope("predict", *ASK, "--out", "one").status == 0
    return tmp_path


@pytest.mark.slow
def test_every_plot_is_written_twice(run, meshscope) -> None:
    document = json.loads(meshscope("export", "one", "--to", "plots", "--json").out)
    folder = run / "one-plots"
    images = sorted(folder.glob("*.png"))
    assert {p.stem for p in images} == {p.stem for p in folder.glob("*.svg")}
    assert {p.stem.partition("-")[0] for p in images} >= {
        "volume", "sizes", "matrix", "torus",
    }  # fmt: skip
    assert document["note"] == f"{len(images)} plots"
    for image in images:
        assert image.read_bytes().startswith(PNG)
        parse(str(image.with_suffix(".svg")))
        assert b"<dc:date>" not in image.with_suffix(".svg").read_bytes()


def test_without_vl_convert_the_message_names_the_extra(run, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "meshscope.reports.charts.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingToolError, match="Install the extra"):
        export.command(
            run=run / "one",
            to=export.ExportFormat.PLOTS,
            out=run / "plots",
            force=False,
        )
    assert not (run / "plots").exists()


@pytest.mark.slow
def test_every_chart_of_the_report_is_drawn_without_a_browser() -> None:
    """A specification with an unknown field, parameter or expression would raise or draw nothing."""
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    from meshscope.reports.charts.pictures import chart_svg  # noqa: PLC0415  needs vl_convert

    spans = [
        TimeSpan(lane=lane, label=f"{lane}, fusion", start_s=start_s + 4e-4 * i, dur_s=1e-4)
        for lane, start_s in (("core", 1e-4), ("tp", 2e-4))
        for i in range(96)
    ]
    for low, high, n_bars in ((0.0, 0.04, 2 * 96), (0.0256, 0.0264, 2 * 2), (0.0, 40.0, 2)):
        svg = chart_svg(lanes_chart(spans, ["core", "tp"], (low, high), end=high, title="t"))
        bars = svg.partition("layer_0_marks")[2].partition("</g>")[0].count("<path")
        assert bars == n_bars, (low, high)
    ends = [
        ("0,0,0", "1,0,0", False, 4.0),
        ("1,0,0", "0,0,0", True, 4.0),
        ("0,0,0", "0,0,1", False, 2.0),
    ]
    links = [
        {
            "source": "compiled", "phase": "decode", "slice_index": 0, "from_chip": source, "to_chip": target,
            "dim": "x", "is_wrap": is_wrap, "load_bytes": load, "link_s": None,
        }
        for source, target, is_wrap, load in ends
    ]  # fmt: skip
    chart = torus_chart(pl.DataFrame(links), parse_topology("v5p:2x2x2"), Source.COMPILED)
    svg = chart_svg(chart)
    assert svg.partition("layer_0_marks")[2].partition("</g>")[0].count("<line") == 1 + 2 + 1
    assert "var(--" not in svg
