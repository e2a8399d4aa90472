"""Steps that the engines' model code compiled to: what they communicate, in which part, and for how long."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

import meshscope
from meshscope.backends.compile.worker import step_memory
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import StepTime

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"
sys.path[:0] = [str(GOLDEN), str(Path(__file__).parents[2] / "docs")]

from engine_steps import CASES, SGLANG, hlo_text, replayed  # noqa: E402  a script beside the golden files
from engine_tables import SGLANG_MAIN, served_errors  # noqa: E402  the tables of docs/evidence/engines.md

Replay = Callable[[str], meshscope.Run]
IN_LAYERS = [(layer, part) for layer in (0, 1) for part in (Part.ATTN, Part.MLP)]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    runs: dict[str, meshscope.Run] = {}

    def run(name: str) -> meshscope.Run:
        if name not in runs:
            runs[name] = replayed(name, tmp_path_factory.mktemp("runs") / name)
        return runs[name]

    return run


@pytest.fixture
def run(replay: Replay) -> meshscope.Run:
    return replay(MAXTEXT)


def rows(run: meshscope.Run, phase: Phase) -> list[Collective]:
    return [r for r in run.record.rows if r.phase is phase and r.source is Source.COMPILED]


def time_of(run: meshscope.Run, phase: Phase) -> StepTime:
    (time,) = (t for t in run.record.times if (t.phase, t.source) == (phase, Source.COMPILED))
    return time


def wire_bytes(collectives: list[Collective]) -> float:
    return sum((row.wire_bytes or 0.0) * row.count for row in collectives)


def test_every_case_is_stored() -> None:
    assert {
        path.name for path in GOLDEN.iterdir() if path.is_dir() and "__" not in path.name
    } == set(CASES)


@pytest.mark.parametrize("release", ["0.12.0", "0.24.0", "0.32.0"])
def test_three_releases_reduce_after_embedding_attention_and_mlp(release, replay) -> None:
    collectives = rows(replay(f"llama-{release}"), Phase.DECODE)
    reduced = [(row.layer, row.part) for row in collectives if row.kind is Kind.ALL_REDUCE]
    assert reduced == [(None, Part.EMBED), *IN_LAYERS]
    assert {row.part for row in collectives if row.kind is not Kind.ALL_REDUCE} == {Part.SAMPLE}


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_experts_of_deepseek_get_gathered_tokens_and_scatter_their_sums(phase, replay) -> None:
    run = replay("deepseek-0.32.0")
    collectives = rows(run, phase)
    assert {row.axis for row in collectives} == {"dp"}
    assert Kind.ALL_TO_ALL not in {row.kind for row in collectives}
    n_chunks = 8 if phase is Phase.PREFILL else 1
    in_layers = Counter[tuple[Kind, int]]()
    for row in collectives:
        if row.layer is not None and row.dtype == "bf16":
            in_layers[row.kind, row.layer] += row.count
    gathers = {(Kind.ALL_GATHER, layer): n_chunks for layer in range(4)}
    assert in_layers == gathers | {(Kind.REDUCE_SCATTER, 3): n_chunks}


def test_dense_layers_of_deepseek_gather_tokens_and_use_only_their_own() -> None:
    text = hlo_text("deepseek-0.32.0", "decode")
    kept = re.findall(r" = f8e4m3fn\[8,7168\]\S* fusion\([^)]*%all-gather\.\d+", text)
    assert len(kept) == 3  # of 64 gathered rows
    assert " = f8e4m3fn[18432,7168]" in text, "the weights are whole"


def test_gpt_oss_sums_the_rows_of_all_chosen_experts(replay: Replay) -> None:
    collectives = rows(replay("gpt-oss-0.32.0"), Phase.DECODE)
    summed = [r for r in collectives if r.kind is Kind.ALL_REDUCE and r.shape == (64, 4, 2880)]
    assert [(row.layer, row.part) for row in summed] == [
        (0, Part.MOE_COMBINE),
        (1, Part.MOE_COMBINE),
    ]


def test_fp8_weights_are_arguments_and_their_scales_are_gathered(replay: Replay) -> None:
    text = hlo_text("qwen-0.32.0-fp8", "decode")
    collectives = rows(replay("qwen-0.32.0-fp8"), Phase.DECODE)
    weights = re.findall(r" = (f8e4m3fn\[\d+,\d+\])\S* parameter\(", text)
    assert Counter(weights)["f8e4m3fn[3200,5120]"] >= 2  # down_proj of two layers
    scales = [row for row in collectives if row.dtype == "f32"]
    assert [(row.kind, row.shape) for row in scales] == [(Kind.ALL_GATHER, (5120,))] * 4


def test_split_tokens_send_more_and_take_longer(replay: Replay) -> None:
    whole, split = replay("qwen-0.32.0"), replay("qwen-0.32.0-sp")

    kinds = {row.kind for row in rows(split, Phase.PREFILL)}
    assert Kind.ALL_REDUCE not in kinds
    assert Kind.REDUCE_SCATTER in kinds
    ratio = wire_bytes(rows(split, Phase.PREFILL)) / wire_bytes(rows(whole, Phase.PREFILL))
    assert 1.1 < ratio < 1.3
    in_layers = [row for row in rows(split, Phase.PREFILL) if row.layer == 0]
    assert sorted(f"{(row.wire_bytes or 0) / 1e6:.1f} MB" for row in in_layers) == [
        "73.4 MB",
        *["94.4 MB"] * 3,
    ]
    assert (
        time_of(split, Phase.PREFILL).step.value_s
        > 1.1 * time_of(whole, Phase.PREFILL).step.value_s
    )


def test_memory_counts_the_weights_that_only_small_programs_read() -> None:
    model = {"argument_bytes": 100, "output_bytes": 10, "alias_bytes": 10, "temp_bytes": 5}
    logits = {"argument_bytes": 40, "output_bytes": 1, "alias_bytes": 0, "temp_bytes": 7}
    memory = step_memory([model, logits], 130)
    assert memory == {"argument_bytes": 130, "output_bytes": 10, "alias_bytes": 10, "temp_bytes": 7}
    assert step_memory([model, logits], None) == model


# SGLang-JAX

STEPS = [name for name, case in CASES.items() if case.frontend == SGLANG and case.layers == 2]
MAIN = [name for name in STEPS if "main" in name]
ORDER = "0,1,2,3,7,6,5,4"  # of its devices on v6e-8
# Scopes that the front end enters; a server enters none of them.
SCOPES = re.compile(r"/(?:prefill|decode|layer\d+|embed|attn|mlp|lm_head|sample|moe\.\w+)(?=/)")


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
    assert in_model == [(None, Part.EMBED), *IN_LAYERS]
    sampled = [row.kind for row in collectives if row.part is Part.SAMPLE]
    probabilities, greatest = [Kind.ALL_REDUCE] * 2, [Kind.ALL_GATHER] * 2
    assert sampled == probabilities + greatest


def test_release_0_0_2_keeps_embedding_and_head_whole_on_every_device(replay: Replay) -> None:
    old, new = replay("qwen-sglang-0.0.2"), replay("qwen-sglang-main")
    assert {row.part for row in rows(old, Phase.DECODE)} == {Part.ATTN, Part.MLP}
    assert head_s(old) > 4 * head_s(new)


def head_s(run: meshscope.Run) -> float:
    parts = time_of(run, Phase.DECODE).parts
    return sum(part.compute_s for part in parts if part.part == Part.LM_HEAD)


def test_experts_over_tp_are_summed_once_a_layer(replay: Replay) -> None:
    collectives = rows(replay("qwen3-moe-sglang-main"), Phase.DECODE)
    combined = [row for row in collectives if row.part is Part.MOE_COMBINE]
    assert [(row.kind, row.layer) for row in combined] == [
        (Kind.ALL_REDUCE, 0),
        (Kind.ALL_REDUCE, 1),
    ]
    assert Kind.ALL_TO_ALL not in {row.kind for row in collectives}


@pytest.mark.parametrize("name", MAIN)
def test_a_server_s_own_dump_has_the_same_layers_and_parts(name, replay, tmp_path) -> None:
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


# MaxText

MAXTEXT = "llama-maxtext"


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


def test_import_reads_the_same_dump_with_the_axes_of_maxtext(run, tmp_path) -> None:
    text = tmp_path / "decode.hlo.txt"
    text.write_text(hlo_text(MAXTEXT, "decode"))
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
    assert sums[0] is not None
    assert gathers[0] / sums[0] == pytest.approx(2 / 3, abs=0.05)


def test_prefill_multiplies_every_position_with_the_vocabulary() -> None:
    text = hlo_text(MAXTEXT, "prefill")
    assert "[1024,16032]" in text
    assert "tpu_custom_call" in text  # splash attention


def test_decode_attends_without_a_kernel_and_samples_from_whole_logits() -> None:
    text = hlo_text(MAXTEXT, "decode")
    assert "tpu_custom_call" not in text
    assert "f32[64,1,128256]" in text


def test_experts_of_mixtral_are_summed_over_devices_before_they_are_combined(replay) -> None:
    mixture = replay("mixtral-maxtext")
    collectives = rows(mixture, Phase.DECODE)
    sums = [row for row in collectives if row.part is Part.MOE_EXPERTS]
    assert [(row.kind, row.layer, row.shape) for row in sums] == [
        (Kind.ALL_REDUCE, layer, (64, 1, 4096, 8)) for layer in (0, 1)
    ]
    assert all(row.axis == "tp" and row.part is not None for row in collectives)


def test_all_layers_are_attributed(replay: Replay) -> None:
    """The layers of a program share one trace, so the reader counts them."""
    whole = replay("llama-maxtext-32")
    layers = [row.layer for row in rows(whole, Phase.DECODE) if row.part is Part.ATTN]
    assert sorted(layer for layer in layers if layer is not None) == sorted([*range(32)] * 2)
    assert whole.as_dict()["unattributed"]["count"] == 0
