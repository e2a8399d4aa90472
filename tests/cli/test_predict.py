"""`predict`: prints, and keeps a run only when asked."""

import json
from pathlib import Path

import pytest

from meshscope.cli import COMMANDS
from meshscope.store.read import read_run

ASK = (
    *("Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8", "--batch", "8"),
    *("--prompt", "1024"),
)


def test_json_is_the_only_thing_on_standard_output(meshscope) -> None:
    status, out, err = meshscope("predict", *ASK, "--json")
    document = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert (document["run"], document["source"]) == (None, "predicted")
    attention = next(row for row in document["collectives"] if row["part"] == "attn")
    assert attention["layers"] == list(range(64))
    assert (attention["layer"], attention["count"]) == (None, 64)
    # 8 sequences of 1024 tokens, 5120 wide, 2 bytes each
    assert attention["payload_bytes"] == 8 * 1024 * 5120 * 2


def test_a_kept_run_shows_what_was_printed(meshscope) -> None:
    printed = meshscope("predict", *ASK, "--out", "kept")
    assert meshscope("show", "kept") == printed
    assert printed.out.count("run  kept\n") == 1


def test_a_kept_run_has_the_same_document(meshscope) -> None:
    printed = json.loads(meshscope("predict", *ASK, "--out", "kept", "--json").out)
    shown = json.loads(meshscope("show", "kept", "--json").out)
    assert shown == printed
    assert shown["run"] == "kept"


def test_a_run_in_the_way_is_kept_and_replaced_with_force(meshscope) -> None:
    meshscope("predict", *ASK, "--out", "kept")
    other = ("predict", *ASK, "--layers", "2", "--out", "kept")
    refused = meshscope(*other)
    assert (refused.status, refused.out) == (1, "")
    assert refused.err == (
        "meshscope: 'kept' exists. Use --force to replace it, or another --out to keep both.\n"
    )
    assert read_run(Path("kept")).manifest.experiment.n_layers == 64
    assert meshscope(*other, "--force").status == 0
    assert read_run(Path("kept")).manifest.experiment.n_layers == 2


def test_the_manifest_holds_the_command_that_makes_it_again(meshscope) -> None:
    meshscope("predict", *ASK, "--out", "kept")
    assert read_run(Path("kept")).manifest.command == (
        "meshscope",
        "predict",
        *ASK,
        "--out",
        "kept",
    )


def test_dtype_sets_all_three_and_each_may_differ(meshscope) -> None:
    def dtypes(*options: str) -> list[str]:
        out = meshscope("predict", *ASK, "--json", *options).out
        workload = json.loads(out)["experiment"]["workload"]
        return [workload[f"{name}_dtype"] for name in ("weight", "activation", "cache")]

    assert dtypes() == ["bf16", "bf16", "bf16"]
    assert dtypes("--dtype", "float32") == ["f32", "f32", "f32"]
    assert dtypes("--weight-dtype", "int8", "--cache-dtype", "fp8") == ["s8", "bf16", "f8e4m3fn"]


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
    ask = ("Llama-3.1-8B", "--topology", "v6e-8", "--plan", "pp=2,tp=4", "--batch", "8")

    document = json.loads(meshscope("predict", *ask, "--microbatches", "4", "--json").out)
    text = meshscope("predict", *ask, "--microbatches", "4").out

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
    full = meshscope("predict", *ask, "--microbatches", "4", "--full").out
    assert "; 4 micro-batches in prefill" in " ".join(full.split())
    assert "stage" in next(line for line in text.splitlines() if line.startswith("collective"))
