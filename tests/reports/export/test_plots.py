"""Plots: one PNG and one SVG each, the same at every run, and a reason for what is not drawn."""

import json
import re
import sys
from pathlib import Path
from xml.dom.minidom import parse

import pytest

from meshscope.api import export
from meshscope.api.options import JsonOutput
from meshscope.errors import MissingToolError
from meshscope.reports.charts.cost import waterfall_chart
from meshscope.reports.charts.timeline import TimeSpan, lanes_chart
from meshscope.reports.charts.traffic import Link, Torus, torus_chart

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=4,dp=2", "--layers", "2", "--batch", "2")  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path, meshscope) -> Path:
    """A folder with the run `one`, which commands of the test see."""
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    assert meshscope("predict", *ASK, "--out", "one").status == 0
    return tmp_path


@pytest.mark.slow
def test_every_plot_is_written_twice_and_what_is_missing_says_why(run, meshscope) -> None:
    document = json.loads(meshscope("export", "one", "--to", "plots", "--json").out)
    folder = run / "one-plots"
    images = sorted(folder.glob("*.png"))
    assert {p.stem for p in images} == {p.stem for p in folder.glob("*.svg")}
    assert {p.stem.partition("-")[0] for p in images} >= {
        "volume", "sizes", "matrix", "torus", "intervals", "memory",
    }  # fmt: skip
    assert document["note"].startswith(
        f"{len(images)} plots; no timeline: the run keeps no timeline"
    )
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
            output=JsonOutput(),
        )
    assert not (run / "plots").exists()


@pytest.mark.usefixtures("run")
def test_bytes_that_are_unknown_draw_no_volume_and_say_why(meshscope) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "pid": 0}
    event = {**kernel, "tid": 7, "ts": 1, "dur": 5, "args": {"device": 0, "stream": 7}}
    Path("trace.json").write_text(json.dumps({"traceEvents": [event]}))
    assert meshscope("import", "trace.json", "--out", "two").status == 0
    outcome = meshscope("export", "two", "--to", "plots", "--out", "plots", "--force")
    note = " ".join(outcome.err.split())
    assert "no volume: the devices, bytes or times of the collectives are unknown" in note


def test_every_chart_of_the_report_is_drawn_without_a_browser() -> None:
    """A specification with an unknown field, parameter or expression would raise or draw nothing."""
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    from meshscope.reports.charts.pictures import chart_svg  # noqa: PLC0415  needs vl_convert

    loop = ((3, 0.0128), (32, 0.0004))
    spans = [
        TimeSpan(lane="core", label="mlp, fusion", start_s=1e-4, dur_s=1e-4, repeats=loop),
        TimeSpan(lane="tp", label="all_reduce", start_s=2e-4, dur_s=1e-4, repeats=loop),
    ]
    for low, high, n_bars in ((0.0, 0.04, 2 * 96), (0.0256, 0.0264, 2 * 2), (0.0, 40.0, 2)):
        svg = chart_svg(lanes_chart(spans, ["core", "tp"], (low, high), end=high, title="t"))
        bars = svg.partition("layer_0_marks")[2].partition("</g>")[0].count("<path")
        assert bars == n_bars, (low, high)
    torus = Torus(
        phase="decode", sizes=(2, 1, 2), wraps=(True, False, False), n_slices=1,
        chips={(0, (0, 0, 0)): "0", (0, (1, 0, 0)): "1", (0, (0, 0, 1)): "2", (0, (1, 0, 1)): "3"},
        links=(
            Link(slice_index=0, source=(0, 0, 0), target=(1, 0, 0), is_wrap=False, load_bytes=4.0, link_s=None),
            Link(slice_index=0, source=(1, 0, 0), target=(0, 0, 0), is_wrap=True, load_bytes=4.0, link_s=None),
            Link(slice_index=0, source=(0, 0, 0), target=(0, 0, 1), is_wrap=False, load_bytes=2.0, link_s=None),
        ),
    )  # fmt: skip
    svg = chart_svg(torus_chart([torus], "v6e"))
    assert svg.partition("layer_0_marks")[2].partition("</g>")[0].count("<line") == 1 + 2 + 1
    steps = [{"mlp": 2.0, "exposed over tp": 1.0}, {"mlp": 1.0, "exposed over tp": 1.5}]
    svg = chart_svg(waterfall_chart(["a", "b"], {"step": steps}))
    texts = re.findall(r">([^<>]+)</text>", svg)
    assert {"3 s", "\u22121 s", "+500 ms", "2.5 s, 0.833 x"} <= set(texts)
    assert "var(--" not in svg
