"""Scopes of operations: ours, those of other programs, and the parts that they name."""

from functools import cache
from pathlib import Path

import pytest
from made_hlo import loop_text, module_text, rows_in, while_text
from tables import table

from meshscope.events.enums import Part, Phase
from meshscope.readers.hlo.attribution import Scope, same_name, scope_of
from meshscope.readers.hlo.parse import parse_hlo, read_hlo
from meshscope.readers.hlo.scopes import with_scopes

PROGRAMS = Path(__file__).parents[1] / "published/programs"
LLAMA_70B = "jax_llm_examples-llama-70b-int8-v5e_4x4-{}-cache2048-8layers"
LLAMA_8B = "tpu_inference_0.12-llama-8b-v6e_1x2-tp2-prefill8192-2layers"
R1 = "jax_llm_examples-deepseek-r1-int8-v5e_8x8-decode-batch8-cache2048-61layers"
GOLDEN = Path(__file__).parents[1] / "golden/hlo"


@cache
def _rows(name: str, mesh: str):
    phase = Phase.PREFILL if "prefill" in name else None
    module = with_scopes(read_hlo(PROGRAMS / f"{name}.hlo.txt.gz"))
    return rows_in(module, mesh, default_phase=phase)


def _layers(name: str, mesh: str) -> dict[str, list[int | None]]:
    rows = _rows(name, mesh)
    assert [row.axis_reason for row in rows if row.axis_reason] == []
    return {part: [r.layer for r in rows if r.part == part] for part in {r.part for r in rows}}


@pytest.mark.slow
def test_deepseek_r1_layer_by_layer() -> None:
    assert _layers(R1, "y=8,z=8") == {
        Part.ATTN: list(range(61)),
        Part.MLP: [0, 1, 2],
        Part.MOE_SHARED: list(range(3, 61)),
        Part.MOE_COMBINE: list(range(3, 61)),
        Part.SAMPLE: [None, None],
    }
    rows = _rows(R1, "y=8,z=8")
    assert {row.phase for row in rows} == {Phase.DECODE}
    assert {r.axis for r in rows if r.part is Part.MOE_SHARED} == {"z"}


LLAMA_LAYERS = {Part.ATTN: list(range(8)), Part.MLP: list(range(8)), Part.SAMPLE: [None, None]}


@pytest.mark.parametrize(
    ("name", "mesh", "layers"),
    [
        # By scopes and arguments.
        (LLAMA_70B.format("tp16-decode-batch8"), "tp=16", LLAMA_LAYERS),
        (LLAMA_70B.format("tp16-decode-batch128"), "tp=16", LLAMA_LAYERS),
        # Version 0.12 names neither scopes nor functions; its arguments name modules and layers.
        (LLAMA_8B, "model=2", {Part.EMBED: [None], Part.ATTN: [0, 1], Part.MLP: [0, 1]}),
        # Rotary embeddings are gathered over the data axis once, and the chosen tokens at the end.
        (
            LLAMA_70B.format("dp2tp8-decode-batch8"),
            "dp=2,tp=8",
            LLAMA_LAYERS | {Part.EMBED: [None], Part.SAMPLE: [None] * 3},
        ),
    ],
)
def test_every_collective_has_its_layer(name: str, mesh: str, layers: dict) -> None:
    assert _layers(name, mesh) == layers


ALL_REDUCE = (
    "  %{result} = f32[8] all-reduce(%{operand}), channel_id=1, replica_groups=[1,8]<=[8], "
    'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/decoder/{scope}/psum"}}\n'
)


def _scanned(scopes: list[str]):
    """A step that scans a body with an all-reduce in each of these scopes six times."""
    body = "".join(
        ALL_REDUCE.format(result=f"y.{n}", operand=f"y.{n - 1}" if n else "x", scope=scope)
        for n, scope in enumerate(scopes)
    )
    entry = "  %a = f32[8] parameter(0)\n  %zero = s32[] constant(0)\n" + while_text("l", "a")
    text = module_text(
        entry, loop_text("l", 6, body, f"y.{len(scopes) - 1}"), header=", num_partitions=8"
    ).replace("HloModule m", "HloModule jit_step")
    module = with_scopes(parse_hlo(text, "step.txt"))
    return rows_in(module, "tp=8", default_phase=Phase.DECODE)


@pytest.mark.parametrize("n_in_body", [1, 2])
def test_a_loop_over_layers_has_as_many_as_it_runs(n_in_body: int) -> None:
    """A body of two layers runs them in turn."""
    rows = _scanned(["self_attention", "mlp"] * n_in_body)
    for part in (Part.ATTN, Part.MLP):
        assert sorted(r.layer for r in rows if r.part == part) == list(range(6 * n_in_body))


def test_scopes_of_this_package_stay_as_they_are() -> None:
    module = read_hlo(GOLDEN / "v6e_tp8_decode_unroll.jax-0.10.2.txt.gz")
    assert with_scopes(module) is module


Range = list[int] | None


def test_pipeline_scopes_name_stages_and_microbatches() -> None:
    scope = scope_of(
        "jit(prefill)/shard_map/prefill/while/body/closed_call/cond/branch_1_fun/stages1-2by6/"
        "microbatches2of5/while/body/closed_call/layers6-11/mlp/psum"
    )

    assert scope == Scope(
        phase=Phase.PREFILL,
        layers=range(6, 12),
        part=Part.MLP,
        stages=range(1, 3),
        stage_layers=6,
        n_microbatches=2,
        n_ticks=5,
    )
    assert (scope.n_layers, scope.n_times) == (6, 30)
    assert scope.missing is None


@table
def test_parts_between_layers_belong_to_stages(path: str, stages: Range, part: Part) -> None:
    scope = scope_of(path)

    assert (scope.stages, scope.part, scope.n_times) == (stages and range(*stages), part, 1)


@table
def test_of_nested_parts_with_experts_the_innermost_counts(path: str, part: Part) -> None:
    assert scope_of(path).part is part


@table
def test_scope_is_read_from_the_path(
    op_name: str | None, phase: Phase | None, layers: Range, part: Part | None, missing: str | None
) -> None:
    scope = scope_of(op_name)
    assert scope == Scope(phase=phase, layers=layers and range(*layers), part=part)
    assert scope.missing == missing


def test_names_are_equal_up_to_uniquifiers() -> None:
    assert same_name("model.26/layers.0.3/mm", "model.1/layers.0.5/mm.4")
    assert not same_name("a/psum", "b/psum")
    assert not same_name(None, None)
