"""Phase, layer and part of programs of other engines, by the names in their text and their data flow.

Expected counts come from the architectures: DeepSeek-R1 has 61 layers, of which the first 3 are dense.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from meshscope.errors import SpecError
from meshscope.events.enums import Part, Phase
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.attribution import read_rules, scope_of
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo, read_hlo
from meshscope.readers.hlo.scopes import with_scopes

PROGRAMS = Path(__file__).parents[1] / "published/programs"
LLAMA_70B = "jax_llm_examples-llama-70b-int8-v5e_4x4-{}-cache2048-8layers"
LLAMA_8B = "tpu_inference_0.12-llama-8b-v6e_1x2-tp2-prefill8192-2layers"
R1 = "jax_llm_examples-deepseek-r1-int8-v5e_8x8-decode-batch8-cache2048-61layers"
GOLDEN = Path(__file__).parents[1] / "golden/hlo"


@cache
def _rows(name: str, axes: tuple[tuple[str, int], ...]):
    module = with_scopes(read_hlo(PROGRAMS / f"{name}.hlo.txt.gz"))
    return collectives_of(
        module,
        mesh=Mesh(axes=axes),
        n_steps_of={},
        crosses_slices=lambda _: None,
        default_phase=Phase.PREFILL if "prefill" in name else None,
    )


def _layers(name: str, axes: tuple[tuple[str, int], ...]) -> dict[str, list[int | None]]:
    rows = _rows(name, axes)
    return {part: [r.layer for r in rows if r.part == part] for part in {r.part for r in rows}}


@pytest.mark.slow
def test_deepseek_r1_layer_by_layer() -> None:
    assert _layers(R1, (("y", 8), ("z", 8))) == {
        Part.ATTN: list(range(61)),
        Part.MLP: [0, 1, 2],
        Part.MOE_SHARED: list(range(3, 61)),
        Part.MOE_COMBINE: list(range(3, 61)),
        Part.SAMPLE: [None, None],
    }
    rows = _rows(R1, (("y", 8), ("z", 8)))
    assert {row.phase for row in rows} == {Phase.DECODE}
    assert {r.axis for r in rows if r.part is Part.MOE_SHARED} == {"z"}


@pytest.mark.parametrize("plan", ["tp16-decode-batch8", "tp16-decode-batch128"])
def test_llama_by_scopes_and_arguments(plan: str) -> None:
    layers = _layers(LLAMA_70B.format(plan), (("tp", 16),))
    assert layers == {
        Part.ATTN: list(range(8)),
        Part.MLP: list(range(8)),
        Part.SAMPLE: [None, None],
    }


def test_tpu_inference_by_the_weights_that_it_reads() -> None:
    """Version 0.12 names neither scopes nor functions; its arguments name modules and layers."""
    layers = _layers(LLAMA_8B, (("model", 2),))
    assert layers == {Part.EMBED: [None], Part.ATTN: [0, 1], Part.MLP: [0, 1]}


def test_what_several_layers_use_is_before_them() -> None:
    """Rotary embeddings are gathered over the data axis once, and the chosen tokens at the end."""
    layers = _layers(LLAMA_70B.format("dp2tp8-decode-batch8"), (("dp", 2), ("tp", 8)))
    assert layers[Part.EMBED] == [None]
    assert layers[Part.ATTN] == list(range(8))
    assert layers[Part.SAMPLE] == [None] * 3


def test_everything_is_attributed() -> None:
    for name, axes in (
        (LLAMA_70B.format("dp2tp8-decode-batch8"), (("dp", 2), ("tp", 8))),
        (R1, (("y", 8), ("z", 8))),
        (LLAMA_8B, (("model", 2),)),
    ):
        assert [row.axis_reason for row in _rows(name, axes) if row.axis_reason] == []


STEP = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}}

%condition (c: (s32[], bf16[8,64])) -> pred[] {{
  %c = (s32[], bf16[8,64]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c), index=0
  %n.1 = s32[] constant(6)
  ROOT %less.1 = pred[] compare(%i.1, %n.1), direction=LT
}}

%body (p: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {{
  %p = (s32[], bf16[8,64]{{1,0}}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p), index=0
  %x.2 = bf16[8,64]{{1,0}} get-tuple-element(%p), index=1
  %one.2 = s32[] constant(1)
  %next.2 = s32[] add(%i.2, %one.2)
{body}
  ROOT %out.2 = (s32[], bf16[8,64]{{1,0}}) tuple(%next.2, %y.{last})
}}

ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {{
  %x = bf16[8,64]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[8,64]{{1,0}}) tuple(%zero, %x)
  %while.1 = (s32[], bf16[8,64]{{1,0}}) while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"6"}}}}
  ROOT %y = bf16[8,64]{{1,0}} get-tuple-element(%while.1), index=1
}}
"""
ALL_REDUCE = (
    "  %{result} = bf16[8,64]{{1,0}} all-reduce(%{operand}), channel_id=1, replica_groups=[1,8]<=[8], "
    'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/decoder/{scope}/psum"}}'
)


def _scanned(scopes: list[str]):
    """A step that scans a body with an all-reduce in each of these scopes six times."""
    lines = [
        ALL_REDUCE.format(result=f"y.{n}", operand=f"y.{n - 1}" if n else "x.2", scope=scope)
        for n, scope in enumerate(scopes)
    ]
    text = STEP.format(body="\n".join(lines), last=len(scopes) - 1)
    return collectives_of(
        with_scopes(parse_hlo(text, "step.txt")),
        mesh=Mesh(axes=(("tp", 8),)),
        n_steps_of={},
        crosses_slices=lambda _: None,
        default_phase=Phase.DECODE,
    )


def test_a_loop_over_layers_has_as_many_as_it_runs() -> None:
    rows = _scanned(["self_attention", "mlp"])
    layers = {part: [r.layer for r in rows if r.part == part] for part in (Part.ATTN, Part.MLP)}
    assert layers == {Part.ATTN: list(range(6)), Part.MLP: list(range(6))}


def test_a_loop_body_of_two_layers_runs_them_in_turn() -> None:
    rows = _scanned(["self_attention", "mlp", "self_attention", "mlp"])
    assert Counter(r.layer for r in rows if r.part == Part.ATTN) == dict.fromkeys(range(12), 1)


def test_scopes_of_this_package_stay_as_they_are() -> None:
    module = read_hlo(GOLDEN / "v6e_tp8_decode_unroll.jax-0.10.2.txt.gz")
    assert with_scopes(module) is module


def test_rules_of_the_user_come_first(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        '[[rules]]\nop_name = "vocab_out"\npart = "sample"\n'
        "[[rules]]\nmodule = 'decode'\nphase = \"prefill\"\n"
    )
    module = read_hlo(PROGRAMS / f"{LLAMA_70B.format('tp16-decode-batch8')}.hlo.txt.gz")
    scoped = with_scopes(module, [read_rules(path)])
    scopes = [scope_of(i.op_name) for i in scoped.entry.instructions if i.scope]
    assert {scope.phase for scope in scopes} == {Phase.PREFILL}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = 3", "rules: expected a list"),
        ("[[rules]]\npart = 'attn'", "a rule needs a pattern"),
        ("[[rules]]\nop_name = 'x'", "a rule needs a phase, a part or a group (?P<layer>...)"),
        ("[[rules]]\nop_name = '('\npart = 'attn'", "'(' is not a regular expression"),
        ("[[rules]]\nop_name = 'x'\npart = 'nose'", "rules[0].part: expected one of 'embed'"),
        ("[[rules]", "Give TOML with [[rules]]"),
    ],
    ids=["no list", "no pattern", "no result", "bad pattern", "bad part", "no TOML"],
)
def test_bad_rules_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        read_rules(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
