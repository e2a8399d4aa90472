"""Plots: one PNG and one SVG each, the same at every run, and a reason for what is not drawn."""

import json
import sys
from pathlib import Path
from xml.dom.minidom import parse

import pytest

from meshscope.analysis.roofline import DevicePeaks, Roofline, RooflinePoint
from meshscope.api.export import write_plot_folder
from meshscope.cli.main import main
from meshscope.errors import MissingToolError
from meshscope.events.enums import Phase, Source
from meshscope.store.read import read_run

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=4,dp=2", "--layers", "2", "--batch", "2")  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


def _meshscope(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["meshscope", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    monkeypatch.chdir(tmp_path)
    _meshscope(monkeypatch, "predict", *ASK, "--out", "one")
    return tmp_path


@pytest.mark.slow
def test_every_plot_is_written_twice_and_what_is_missing_says_why(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    _meshscope(monkeypatch, "export", "one", "--to", "plots", "--json")
    document = json.loads(capsys.readouterr().out)
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


def test_without_matplotlib_the_message_names_the_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("meshscope.reports.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingToolError, match="Install the extra"):
        write_plot_folder([read_run(run / "one")], run / "plots", force=False)
    assert not (run / "plots").exists()


def test_several_runs_stand_side_by_side(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = (ASK[0], "--plan", "tp=4,dp=4", *ASK[5:])
    _meshscope(monkeypatch, "predict", *ask, "--topology", "v6e-16", "--batch", "4", "--out", "two")
    capsys.readouterr()
    _meshscope(monkeypatch, "export", "one", "two", "--to", "plots", "--out", "both", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["runs"] == ["one", "two"]
    images = {path.stem for path in (run / "both").glob("*.svg")}
    assert images == {
        "cost-prefill", "cost-decode", "scaling-prefill", "scaling-decode",
        "volume-prefill", "volume-decode", "memory",
    }  # fmt: skip
    for name in images - {"scaling-prefill", "scaling-decode"}:
        text = (run / "both" / f"{name}.svg").read_text()
        assert all(f">{label}<" in text for label in ("dp=2,tp=4 v6e:2x4", "dp=4,tp=4 v6e:4x4")), (
            name
        )
    assert ">ideal scaling<" in (run / "both" / "scaling-decode.svg").read_text()


def test_roofline_labels_overlap_neither_each_other_nor_the_roof() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from meshscope.reports.plots import roofline  # noqa: PLC0415  needs matplotlib
    from meshscope.reports.plots.style import new_axes  # noqa: PLC0415

    peaks = DevicePeaks(flops_per_s=1e15, hbm_bytes_per_s=1e12, link_bytes_per_s=1e11)
    points = [
        RooflinePoint(
            source=source, phase=Phase.DECODE, part=part, flops_per_byte=x, flops_per_s=y, compute_s=1.0
        )
        for source in (Source.PREDICTED, Source.COMPILED)
        for part, x, y in (("mlp", 8.0, 8e12), ("attn", 8.1, 8.2e12), ("lm_head", 7.9, 7.5e12))
    ]  # fmt: skip
    axes = new_axes(3.2)
    roofline.draw_roofline(axes, Roofline(peaks=peaks, points=tuple(points)))
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert {"mlp", "attn"} <= set(boxes)
    assert len(axes.texts) == len(boxes)  # a part has one label, though two sources draw it
    roof = axes.lines[0].get_path().transformed(axes.transData)
    for name, box in boxes.items():
        assert not roof.intersects_bbox(box, filled=False), name
        assert not any(box.overlaps(other) for other in boxes.values() if other is not box), name


def test_the_legend_names_only_what_can_be_seen() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from meshscope.reports.plots.style import new_axes, stacked  # noqa: PLC0415  needs matplotlib

    axes = new_axes()
    stacked(axes, [("a", [("compute", 1.0), ("idle", 1e-4)]), ("b", [("compute", 0.5)])])
    assert set(axes.get_legend_handles_labels()[1]) == {"compute"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "perfetto", "--out", "x"), "--to perfetto takes one run, not 2"),
        (("--to", "plots"), "plots of 2 runs need a folder. Give one with --out DIR."),
    ],
)
def test_several_runs_are_one_export_only_as_plots(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshscope", "export", "one", "one", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["one"]
