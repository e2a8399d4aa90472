"""Steps that MaxText's engine compiled to, stored as HLO: what they communicate, and in which part."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import meshscope
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"
sys.path.insert(0, str(GOLDEN))

from engine_steps import hlo_text, replayed  # noqa: E402  a script beside the golden files

NAME = "llama-maxtext"
IN_LAYERS = [(layer, part) for layer in (0, 1) for part in (Part.ATTN, Part.MLP)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> meshscope.Run:
    return replayed(NAME, tmp_path_factory.mktemp("runs") / NAME)


def rows(run: meshscope.Run, phase: Phase) -> list[Collective]:
    return [r for r in run.record.rows if r.phase is phase and r.source is Source.COMPILED]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_every_collective_has_its_axis_layer_and_part(phase: Phase, run: meshscope.Run) -> None:
    collectives = rows(run, phase)

    assert {row.axis for row in collectives} == {"tp"}
    assert all(row.part is not None for row in collectives)
    in_layers = {Part.ATTN, Part.MLP}
    assert all((row.layer is not None) == (row.part in in_layers) for row in collectives)


def test_decode_sums_after_embedding_attention_and_mlp(run: meshscope.Run) -> None:
    sums = [
        (row.layer, row.part, row.shape)
        for row in rows(run, Phase.DECODE)
        if row.kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER} and row.dtype == "bf16"
    ]

    assert [(layer, part) for layer, part, _ in sums] == [(None, Part.EMBED), *IN_LAYERS]
    assert {shape for *_, shape in sums} == {(64, 1, 4096), (64, 4096)}


def test_scales_of_norms_are_gathered_in_every_layer(run: meshscope.Run) -> None:
    """MaxText splits them over `tensor`."""
    gathered = [
        (row.layer, row.part)
        for row in rows(run, Phase.DECODE)
        if row.kind is Kind.ALL_GATHER and row.shape == (8, 1, 512)
    ]

    assert sorted(gathered, key=str) == sorted(IN_LAYERS, key=str)


def test_a_batch_prefills_prompt_by_prompt(run: meshscope.Run) -> None:
    counts = Counter(row.count for row in rows(run, Phase.PREFILL))

    assert all(count % 64 == 0 for count in counts)
    embedded = [row for row in rows(run, Phase.PREFILL) if row.part is Part.EMBED]
    assert [(row.shape, row.count) for row in embedded] == [((1, 1024, 4096), 64)]


def test_both_steps_have_times_and_memory(run: meshscope.Run) -> None:
    document = run.as_dict()

    assert document["time"]["prefill_s"] == pytest.approx(0.069, rel=0.1)
    assert document["time"]["decode_step_s"] == pytest.approx(745e-6, rel=0.1)
    assert document["memory"]["fits"] is True
    assert document["unattributed"]["count"] == 0


def test_import_reads_the_same_dump_with_the_axes_of_maxtext(
    run: meshscope.Run, tmp_path: Path
) -> None:
    text = tmp_path / "decode.hlo.txt"
    text.write_text(hlo_text(NAME, "decode"))

    imported = meshscope.import_([text], topology="v6e-8", mesh="tensor=8", out=tmp_path / "run")

    def summary(collectives: list[Collective]) -> Counter[tuple[object, ...]]:
        return Counter((r.phase, r.kind, r.layer, r.part, r.shape) for r in collectives)

    assert {row.axis for row in imported.record.rows} == {"tensor"}
    assert summary(rows(imported, Phase.DECODE)) == summary(rows(run, Phase.DECODE))


def test_a_gather_of_scales_takes_two_thirds_of_a_sum(run: meshscope.Run) -> None:
    exposed = {
        kind: [
            row.exposed_s for row in rows(run, Phase.DECODE) if row.kind is kind and row.layer == 0
        ]
        for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
    }

    gathers, sums = exposed[Kind.ALL_GATHER], exposed[Kind.ALL_REDUCE]
    assert (len(gathers), len(sums)) == (2, 2)
    assert gathers[0] is not None
    assert sums[0] is not None
    assert gathers[0] / sums[0] == pytest.approx(2 / 3, abs=0.05)


def test_prefill_multiplies_every_position_with_the_vocabulary() -> None:
    text = hlo_text(NAME, "prefill")

    assert "[1024,16032]" in text
    assert "tpu_custom_call" in text  # splash attention


def test_decode_attends_without_a_kernel_and_samples_from_whole_logits() -> None:
    text = hlo_text(NAME, "decode")

    assert "tpu_custom_call" not in text
    assert "f32[64,1,128256]" in text


def test_experts_of_mixtral_are_summed_over_devices_before_they_are_combined(
    tmp_path: Path,
) -> None:
    mixture = replayed("mixtral-maxtext", tmp_path / "run")
    collectives = rows(mixture, Phase.DECODE)
    sums = [row for row in collectives if row.part is Part.MOE_EXPERTS]

    assert [(row.kind, row.layer, row.shape) for row in sums] == [
        (Kind.ALL_REDUCE, layer, (64, 1, 4096, 8)) for layer in (0, 1)
    ]
    assert all(row.axis == "tp" and row.part is not None for row in collectives)


def test_all_layers_are_attributed(tmp_path: Path) -> None:
    """The layers of a program share one trace, so the reader counts them."""
    whole = replayed("llama-maxtext-32", tmp_path / "run")
    layers = [row.layer for row in rows(whole, Phase.DECODE) if row.part is Part.ATTN]

    assert sorted(layer for layer in layers if layer is not None) == sorted([*range(32)] * 2)
    assert whole.as_dict()["unattributed"]["count"] == 0
