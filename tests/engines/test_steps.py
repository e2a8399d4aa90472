"""Steps that the engines' model code compiled to: what they communicate, in which part, and for how long."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from tables import table

import meshscope
from meshscope.backends.compile.worker import step_memory
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.units import format_shape

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"
sys.path[:0] = [str(GOLDEN), str(Path(__file__).parents[2] / "docs")]

from engine_steps import CASES, SGLANG, hlo_text, replayed  # noqa: E402  a script beside the golden files
from engine_tables import SGLANG_MAIN, served_errors  # noqa: E402  the tables of docs/evidence/engines.md

pytestmark = pytest.mark.slow

Replay = Callable[[str], meshscope.Run]


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


@table
def test_a_decode_step_has_these_collectives(name, with_words, expected, replay) -> None:
    """The collectives with these words, of layer, part, kind and array, in order."""
    texts = [
        f"{row.layer} {row.part} {row.kind} {row.dtype}{format_shape(row.shape)}"
        for row in rows(replay(name), Phase.DECODE)
    ]
    assert [text for text in texts if with_words in text] == expected


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


def test_fp8_weights_are_arguments() -> None:
    text = hlo_text("qwen-0.32.0-fp8", "decode")
    weights = re.findall(r" = (f8e4m3fn\[\d+,\d+\])\S* parameter\(", text)
    assert Counter(weights)["f8e4m3fn[3200,5120]"] >= 2  # down_proj of two layers


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


@table
def test_maxtext_attends_with_a_kernel_in_prefill_only(phase, contains, lacks) -> None:
    text = hlo_text(MAXTEXT, phase)
    assert [words for words in contains if words not in text] == []
    assert [words for words in lacks if words in text] == []


def test_memory_counts_the_weights_that_only_small_programs_read() -> None:
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")
    model, logits = (
        dict(zip(names, sizes, strict=True)) for sizes in ((100, 10, 10, 5, 3), (40, 1, 0, 7, 2))
    )
    memory = step_memory([model, logits], 130)
    assert memory == dict(zip(names, (130, 10, 10, 7, 5), strict=True))
    assert step_memory([model, logits], None) == {**model, "code_bytes": 5}


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


def test_release_0_0_2_keeps_embedding_and_head_whole_on_every_device(replay: Replay) -> None:
    old, new = replay("qwen-sglang-0.0.2"), replay("qwen-sglang-main")
    assert {row.part for row in rows(old, Phase.DECODE)} == {Part.ATTN, Part.MLP}
    assert head_s(old) > 4 * head_s(new)


def head_s(run: meshscope.Run) -> float:
    parts = time_of(run, Phase.DECODE).parts
    return sum(part.compute_s for part in parts if part.part == Part.LM_HEAD)


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


def test_all_layers_are_attributed(replay: Replay) -> None:
    """The layers of a program share one trace, so the reader counts them."""
    whole = replay("llama-maxtext-32")
    layers = [row.layer for row in rows(whole, Phase.DECODE) if row.part is Part.ATTN]
    assert sorted(layer for layer in layers if layer is not None) == sorted([*range(32)] * 2)
    assert whole.as_dict()["unattributed"]["count"] == 0
