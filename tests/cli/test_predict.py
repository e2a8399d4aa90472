"""`predict`: rows of a pipeline, the command that a run keeps, and the help of every command."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import words_of

from meshscope.cli import COMMANDS
from meshscope.store.read import read_run


def test_the_manifest_holds_the_command_that_makes_it_again(meshscope) -> None:
    words = words_of("$predict --out kept")
    meshscope(*words)
    assert read_run(Path("kept")).manifest.command == ("meshscope", *words)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options(meshscope, name: str) -> None:
    status, out, err = meshscope(*name.split(), "--help")
    assert (status, err) == (0, "")
    assert f"Usage: meshscope {name} " in out
    words = " ".join(out.split())
    assert COMMANDS[name].summary in words
    assert [line for line in out.splitlines() if line.startswith("  -h, --help ")] != []
    assert "--as-json" not in out


def test_a_pipeline_has_rows_by_stage(meshscope) -> None:
    """32 layers on two stages; a device sends in each of 4 + 2 - 1 ticks."""
    ask = words_of(
        "predict Llama-3.1-8B --topology v6e-8 --plan pp=2,tp=4 --batch 8 --microbatches 4"
    )
    document = json.loads(meshscope(*ask, "--json").out)
    text, full = (meshscope(*ask, *options).out for options in ((), ("--full",)))
    prefill = [row for row in document["collectives"] if row["phase"] == "prefill"]
    stages = [(row["stage"], row["part"], row["layers"][:1], row["count"]) for row in prefill]
    assert stages == [
        (0, "embed", [], 4),
        (0, "attn", [0], 4 * 16),
        (0, "mlp", [0], 4 * 16),
        (0, "stage", [], 5),
        (1, "attn", [16], 4 * 16),
        (1, "mlp", [16], 4 * 16),
        (1, "lm_head", [], 1),
        (None, "sample", [], 1),
    ]
    assert document["totals"]["prefill"]["count"] == sum(row["count"] for row in prefill)
    assert document["experiment"]["microbatches"] == {"prefill": 4, "decode": 1}
    assert "; 4 micro-batches in prefill" in " ".join(full.split())
    assert "stage" in next(line for line in text.splitlines() if line.startswith("collective"))
