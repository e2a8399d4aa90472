"""`meshscope check`: budgets of models and saved runs."""

import json
from pathlib import Path

import pytest
from programs import SLICE, SPLIT, data_parallel
from tables import table
from typer.testing import CliRunner, Result

import meshscope
from meshscope.api.check import command
from meshscope.cli import typer_command

pytestmark = [pytest.mark.slow, pytest.mark.tpu]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose products gather their weights."""
    out = tmp_path_factory.mktemp("runs") / "split"
    meshscope.compile(data_parallel, *SPLIT, topology=SLICE, mesh="dp=4", out=out)
    return out


@pytest.fixture
def home(compiled: Path, tmp_path: Path) -> Path:
    """A folder with this run."""
    (tmp_path / "split").symlink_to(compiled)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "budget.toml"
    path.write_text(text)
    return path


BROKEN = """\
[[program]]
name = "train"
run = "split"

[[program.budget]]
kind = "all_gather"
axis = "dp"
count = 0
max_wire_bytes = 1e6

[[program.budget]]
max_memory_bytes = 1e6
min_flops = 1e9
"""


def checked(path: Path, *options: str) -> Result:
    import typer  # noqa: PLC0415

    app = typer.Typer()
    app.command()(typer_command(command))
    return CliRunner().invoke(app, [str(path), *options])


def test_a_broken_limit_exits_with_1_and_names_the_collective(home: Path) -> None:
    result = checked(written(home, BROKEN))
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 80
    assert lines[0].endswith("budget.toml: 2 of 4 limits not kept")
    assert lines[1] == "FAIL train: all_gather over dp: count 1, exactly 0"
    assert lines[2] == "     step: 1 x all_gather bf16[256,512] over dp, 197 kB sent each by the"
    assert lines[3].startswith("       partitioner at ")
    assert "ok   train: all_gather over dp: wire_bytes 197 kB, at most 1 MB" in lines
    assert "FAIL train: flops 4.194e+06, at least 1e+09" in lines


def test_json_has_every_check(home: Path) -> None:
    document = json.loads(checked(written(home, BROKEN), "--json").output)
    assert document["is_kept"] is False
    assert [(c["limit"], c["is_kept"], c["line"]) for c in document["checks"]] == [
        ("count", False, 8),
        ("max_wire_bytes", True, 9),
        ("max_memory_bytes", True, 12),
        ("min_flops", False, 13),
    ]
    assert document["checks"][0]["collectives"][0]["wire_bytes"] == 256 * 512 * 2 * 3 / 4


def test_sarif_and_github_name_the_place(home: Path) -> None:
    path = written(home, BROKEN)
    sarif = json.loads(checked(path, "--format", "sarif").output)
    results = sarif["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == ["count", "min_flops"]
    region = results[1]["locations"][0]["physicalLocation"]
    assert region == {"artifactLocation": {"uri": str(path)}, "region": {"startLine": 13}}
    annotations = checked(path, "--format", "github").output.splitlines()
    assert annotations[0].startswith("::error file=")
    assert "title=count::train: all_gather over dp: count 1, exactly 0%0A" in annotations[0]


def test_models_saved_runs_and_predictions_have_budgets_too(tmp_path: Path) -> None:
    meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", out=tmp_path / "run")
    text = """\
topology = "v6e-8"
plan = "tp=8"

[[program]]
model = "Qwen/Qwen3-4B"
predict = true
budget = [{phase = "decode", axis = "tp", kind = "all_reduce", count = 73}]

[[program]]
run = "run"
[[program.budget]]
phase = "decode"
max_step_s = 1.0
"""
    path = written(tmp_path, text)
    checks = [check for program in meshscope.check(path).programs for check in program.checks]
    assert [check.is_kept for check in checks] == [True, True]
    assert checked(path).exit_code == 0


@table
def test_bad_input_is_one_message_with_its_line(home, old, new, message) -> None:
    """`new` instead of `old` in a valid file, or alone."""
    text = new if old is None else BROKEN.replace(old, new)
    with pytest.raises(meshscope.MeshscopeError) as caught:
        meshscope.check(written(home, text))
    assert message in str(caught.value)
