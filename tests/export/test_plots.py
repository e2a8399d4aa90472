"""Plots: one PNG and one SVG each, the same at every run, and a reason for what is not drawn."""

import json
import sys
from pathlib import Path
from xml.dom.minidom import parse

import pytest

from meshscope.cli.export import _write_plots
from meshscope.cli.main import main
from meshscope.errors import MissingToolError
from meshscope.rundir.read import read_run

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
    for name in [n for n in sys.modules if n.startswith("meshscope.export.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingToolError, match="Install the extra"):
        _write_plots(read_run(run / "one"), run / "plots", force=False)
    assert not (run / "plots").exists()
