"""`meshscope explore`: what the page holds, and what is refused. A browser test compares its figures with `predict`."""

import base64
import gzip
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.api.explore import explored_slices
from meshscope.api.plan import PlanRequest
from meshscope.serving import grid
from meshscope.serving.prices import LIST_NOTE, parse_prices
from meshscope.serving.slices import slice_name

MODEL = "Qwen/Qwen3-4B"
FEW = dict[str, Any](topology="v6e-1", batch="1:4", prompt="256,512", output="64")


def document(path: Path) -> dict[str, Any]:
    """What the page computes with."""
    packed = re.search(r'id="plans">([A-Za-z0-9+/=]+)<', path.read_text("utf-8"))
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_a_page_holds_what_was_asked_for(tmp_path: Path) -> None:
    path = meshscope.explore(
        MODEL, **FEW, dtype="bf16", weight_dtype="int8,fp8", cache_dtype="bf16", prices="v6e=2.7", out=tmp_path / "a.html"
    )  # fmt: skip
    held = document(path)
    assert held["settings"] == {
        "weights": ["int8", "fp8"],
        "caches": ["bf16"],
        "batches": [1, 2, 4],
        "prompts": [256, 512],
        "outputs": [64],
    }
    (only,) = held["slices"]
    assert (only["name"], [one["plan"] for one in only["plans"]]) == ("v6e-1", ["tp=1"])
    assert held["prices"] == {"v6e": 2.7}
    with pytest.raises(meshscope.MeshscopeError, match="force=True"):
        meshscope.explore(MODEL, **FEW, out=path)
    assert meshscope.explore(MODEL, **FEW, out=path, force=True) == path


def test_prices_are_the_list_prices_by_default(tmp_path: Path) -> None:
    path = meshscope.explore(MODEL, **FEW, out=tmp_path / "a.html")
    assert document(path)["prices"] == parse_prices("list")
    assert LIST_NOTE[1:] in path.read_text("utf-8")


@pytest.mark.slow
def test_a_server_has_figures_at_each_batch(meshscope, tmp_path: Path) -> None:
    line = f"explore {MODEL} --topology v6e-1 --concurrency 1:4 --prompt 256 --output 64 --weight-dtype bf16"
    outcome = meshscope(
        *line.split(), "--cache-dtype", "bf16", "--server", "vllm-tpu@2026.08", "--out", "p.html"
    )
    assert outcome.status == 0, outcome.err
    held = document(tmp_path / "p.html")
    (plan,) = held["slices"][0]["plans"]
    sizes, rates = held["tables"][plan["served_rate"]]
    assert (held["server"], sizes) == ("vllm-tpu@2026.08", [1, 1, 3, 1, 1])
    assert 0 < rates[0] < rates[1] < rates[2]


@pytest.mark.slow
def test_a_launch_command_names_the_server(meshscope, tmp_path: Path) -> None:
    line = "explore --topology v6e-1 --batch 1 --prompt 256 --output 64 --weight-dtype bf16 --out p.html"
    launch = "vllm serve Qwen/Qwen3-4B --kv-cache-dtype fp8"
    outcome = meshscope(*line.split(), "--from-command", launch)
    assert outcome.status == 0, outcome.err
    held = document(tmp_path / "p.html")
    assert (held["model"], held["server"]) == ("Qwen/Qwen3-4B", "vllm-tpu@2026.08")
    assert held["settings"]["caches"] == ["fp8"]


def test_a_name_cannot_leave_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads(
        (Path(__file__).parents[1] / "model/data/configs/Qwen--Qwen3-4B.json").read_text()
    )
    hostile = tmp_path / "</script><img src=x onerror=alert(1)>.json"
    hostile.parent.mkdir(parents=True)
    hostile.write_text(json.dumps(config))
    page = meshscope.explore(str(hostile), **FEW, out="b.html")
    assert "<img" not in page.read_text("utf-8")
    # What a user pastes into a shell is the file that was given, and nothing else.
    command = tmp_path / "it's $(touch a); `touch b`.json"
    command.write_text(json.dumps(config))
    held = document(meshscope.explore(command, **FEW, out="c.html"))
    assert shlex.split(" ".join(held["command"])) == ["meshscope", "predict", str(command)]


@table
def test_bad_input_is_one_message_with_the_remedy(
    changed: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(meshscope.MeshscopeError, match=re.escape(remedy)):
        meshscope.explore(MODEL, **{**FEW, **changed}, out=tmp_path / "c.html")
    assert list(tmp_path.iterdir()) == []


def test_a_chip_stands_for_its_smallest_slices_with_room() -> None:
    space = PlanRequest(model="meta-llama/Llama-3.3-70B-Instruct", topology="v6e-8").space()
    slices = map(slice_name, explored_slices("v6e,v5p-16", space))
    assert list(slices) == ["v6e-4", "v6e-8", "v6e-16", "v6e-32", "v5p-16"]
    small = PlanRequest(model="deepseek-ai/DeepSeek-V3.1", topology="v5e-8").space()
    with pytest.raises(meshscope.MeshscopeError, match="narrower weight_dtype="):
        meshscope.explore(small.model.name, topology="v5e-4", out="unused.html")


def test_the_command_says_where_the_page_is(meshscope, tmp_path: Path) -> None:
    line = f"explore {MODEL} --topology v6e-1 --batch 1 --prompt 256 --output 64 --out page.html"
    outcome = meshscope(*line.split(), "--json")
    size = (tmp_path / "page.html").stat().st_size
    assert json.loads(outcome.out) == {"path": "page.html", "file_bytes": size}


def test_the_progress_names_the_slice_and_counts_each_once(tmp_path: Path, monkeypatch) -> None:
    """Each slice is searched for several lengths of requests."""
    monkeypatch.setattr(grid, "REPORT_S", 0.0)
    steps = list[tuple[str, float | None]]()
    asked = FEW | {"topology": "v6e-1,v6e-4"}

    def progress(_: str, step: str, left_s: float | None) -> None:
        steps.append((step, left_s))

    meshscope.explore(MODEL, **asked, out=tmp_path / "p.html", progress=progress)
    counted = {
        step.partition(" combinations ")[2] for step, _ in steps if "combinations on" in step
    }
    assert counted == {"on v6e:1x1, slice 1 of 2", "on v6e:2x2, slice 2 of 2"}
    assert {left_s for _, left_s in steps} == {None}
