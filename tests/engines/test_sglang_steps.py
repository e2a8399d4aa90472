"""Steps that SGLang-JAX's model code compiled to: what they communicate, and in which part."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

import meshscope
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"
sys.path[:0] = [str(GOLDEN), str(Path(__file__).parents[2] / "docs")]

from engine_steps import CASES, SGLANG, hlo_text, replayed  # noqa: E402  a script beside the golden files
from engine_tables import SGLANG_MAIN, served_errors  # noqa: E402  the tables of docs/evidence/engines.md

Replay = Callable[[str], meshscope.Run]
STEPS = [name for name, case in CASES.items() if case.frontend == SGLANG and case.layers == 2]
MAIN = [name for name in STEPS if "main" in name]
ORDER = "0,1,2,3,7,6,5,4"  # of its devices on v6e-8
# Scopes that the front end enters; a server enters none of them.
SCOPES = re.compile(r"/(?:prefill|decode|layer\d+|embed|attn|mlp|lm_head|sample|moe\.\w+)(?=/)")


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return lambda name: replayed(name, tmp_path / name)


def rows(run: meshscope.Run, phase: Phase) -> list[Collective]:
    return [r for r in run.record.rows if r.phase is phase and r.source is Source.COMPILED]


@pytest.mark.parametrize("name", STEPS)
def test_every_collective_has_an_axis_a_part_and_its_layer(name: str, replay: Replay) -> None:
    run = replay(name)

    for phase in (Phase.PREFILL, Phase.DECODE):
        collectives = rows(run, phase)
        assert {row.axis for row in collectives} == {"tp"}
        assert None not in {row.part for row in collectives}
        in_layers = {Part.ATTN, Part.MLP, Part.MOE_COMBINE}
        assert {row.layer for row in collectives if row.part in in_layers} == {0, 1}


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_a_checkout_reduces_after_embedding_attention_and_mlp(model: str, replay: Replay) -> None:
    collectives = rows(replay(f"{model}-sglang-main"), Phase.DECODE)

    in_model = [(row.layer, row.part) for row in collectives if row.part is not Part.SAMPLE]
    in_layers = [(layer, part) for layer in (0, 1) for part in (Part.ATTN, Part.MLP)]
    assert in_model == [(None, Part.EMBED), *in_layers]
    sampled = [row.kind for row in collectives if row.part is Part.SAMPLE]
    probabilities, greatest = [Kind.ALL_REDUCE] * 2, [Kind.ALL_GATHER] * 2
    assert sampled == probabilities + greatest


def test_release_0_0_2_keeps_embedding_and_head_whole_on_every_device(replay: Replay) -> None:
    old, new = replay("qwen-sglang-0.0.2"), replay("qwen-sglang-main")

    assert {row.part for row in rows(old, Phase.DECODE)} == {Part.ATTN, Part.MLP}
    assert head_s(old) > 4 * head_s(new)


def head_s(run: meshscope.Run) -> float:
    (time,) = (
        t for t in run.record.times if (t.phase, t.source) == (Phase.DECODE, Source.COMPILED)
    )
    return sum(part.compute_s for part in time.parts if part.part == Part.LM_HEAD)


def test_experts_over_tp_are_summed_once_a_layer(replay: Replay) -> None:
    collectives = rows(replay("qwen3-moe-sglang-main"), Phase.DECODE)

    combined = [row for row in collectives if row.part is Part.MOE_COMBINE]
    assert [(row.kind, row.layer) for row in combined] == [
        (Kind.ALL_REDUCE, 0),
        (Kind.ALL_REDUCE, 1),
    ]
    assert Kind.ALL_TO_ALL not in {row.kind for row in collectives}


@pytest.mark.parametrize("name", MAIN)
def test_a_server_s_own_dump_has_the_same_layers_and_parts(
    name: str, replay: Replay, tmp_path: Path
) -> None:
    """The rules of `import` find them in the engine's own names."""
    texts: list[str] = []
    for program in ("decode", "decode.sample"):
        text = hlo_text(name, program)
        path = tmp_path / f"{program}.txt"
        path.write_text(re.sub(r'op_name="[^"]*"', without_scopes, text), encoding="utf-8")
        texts.append(f"decode={path}")

    imported = meshscope.import_(
        texts,
        topology="v6e-8",
        mesh="data=1,tensor=8",
        device_order=ORDER,
        out=tmp_path / "imported",
    )

    compiled = rows(replay(name), Phase.DECODE)
    assert [place(row) for row in imported.record.rows] == [place(row) for row in compiled]


def place(row: Collective) -> tuple[object, ...]:
    return row.layer, row.part, row.kind, row.payload_bytes


def without_scopes(match: re.Match[str]) -> str:
    return SCOPES.sub("", match[0])


def test_steps_of_sglang_jax_are_within_fifteen_percent() -> None:
    """Prefill and decode of Qwen3-8B on one v6e and on four."""
    errors = [abs(error) for error in served_errors(SGLANG_MAIN)]
    assert median(errors) < 0.10
    assert max(errors) < 0.15
