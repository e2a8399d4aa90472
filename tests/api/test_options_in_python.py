"""Every option of a command is a parameter of its Python function, and the other way round, or is named here."""

import inspect
from pathlib import Path

import pytest
import typer
from tables import stored, table

import meshscope
from meshscope.cli import COMMANDS, SETTINGS, typer_command

FUNCTIONS = {"import": "import_", "serve-sim": "serve_sim"}
PRINTED = {
    "as_json",
    "full",
    "rows",
    "as_format",
    "as_sarif",
}  # forms of the text: a result has all


def options(command: str) -> set[str]:
    app = typer.Typer(**SETTINGS, add_completion=False)
    app.command(command)(typer_command(COMMANDS[command].load()))
    return {str(one.name) for one in typer.main.get_command(app).params}


@table
def test_the_command_line_and_python_have_the_same_options(
    command: str, only_command: dict[str, str], only_python: dict[str, str]
) -> None:
    function = getattr(meshscope, FUNCTIONS.get(command, command))
    asked, parameters = options(command) - PRINTED, set(inspect.signature(function).parameters)
    assert asked - parameters == set(only_command)
    assert parameters - asked == set(only_python)


def test_the_table_has_every_command_with_a_function() -> None:
    names = {FUNCTIONS.get(command, command): command for command in COMMANDS}
    rows = stored(Path(__file__).with_suffix(".yaml"))[
        test_the_command_line_and_python_have_the_same_options.__name__
    ]
    assert {c for name, c in names.items() if name in meshscope.__all__} == {
        one for one, *_ in rows[1:]
    }


def test_serve_sim_writes_a_report_in_python(tmp_path) -> None:
    """The command had --out, and the function nothing."""
    asked = {"topology": "v6e-8", "plan": "tp=8", "layers": 1, "rate": 1, "requests": 20}
    out = tmp_path / "served.br.yaml"
    served = meshscope.serve_sim("Qwen/Qwen3-4B", **asked, out=out)
    assert "version: 0.2.1" in out.read_text().replace("'", "").replace('"', "")
    assert not {"out", "force"} & set(served.as_dict()["request"])
    with pytest.raises(meshscope.MeshscopeError, match="force=True"):
        meshscope.serve_sim("Qwen/Qwen3-4B", **asked, out=out)
    with pytest.raises(meshscope.MeshscopeError, match="of out"):
        meshscope.serve_sim("Qwen/Qwen3-4B", **asked, force=True)


def test_a_launch_command_gives_options_that_others_replace() -> None:
    """Numbers are numbers, and a model that is given is the command's no more."""
    command = "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 4 --max-num-seqs 16"
    load = {"topology": "v6e-4", "rate": 1, "requests": 20, "layers": 1}
    asked = meshscope.serve_sim(from_command=command, **load).request
    assert (asked.model, asked.plan, asked.server) == ("Qwen/Qwen3-8B", "tp=4", "vllm-tpu")
    assert asked.max_sequences == 16
    asked = meshscope.serve_sim(
        "Qwen/Qwen3-4B", from_command=command, **load, plan="dp=2,tp=2"
    ).request
    assert (asked.model, asked.plan) == ("Qwen/Qwen3-4B", "dp=2,tp=2")
    with pytest.warns(UserWarning, match="not simulated: --enable-lora"):
        meshscope.serve_sim(from_command=f"{command} --enable-lora", **load)
    with pytest.raises(meshscope.MeshscopeError, match="no known server"):
        meshscope.serve_sim(from_command="sglang serve Qwen", **load)
