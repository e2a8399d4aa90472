"""Steps that vLLM's model code compiled to: what they communicate, in which part, and for how long."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import meshscope
from meshscope.backends.compile.worker import step_memory
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source

GOLDEN = Path(__file__).parents[1] / "golden" / "engines"
sys.path.insert(0, str(GOLDEN))

from engine_steps import CASES, hlo_text, replayed  # noqa: E402  a script beside the golden files

Replay = Callable[[str], meshscope.Run]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return lambda name: replayed(name, tmp_path / name)


def rows(run: meshscope.Run, phase: Phase) -> list[Collective]:
    return [r for r in run.record.rows if r.phase is phase and r.source is Source.COMPILED]


def wire_bytes(collectives: list[Collective]) -> float:
    return sum((row.wire_bytes or 0.0) * row.count for row in collectives)


def test_every_case_is_stored() -> None:
    assert {
        path.name for path in GOLDEN.iterdir() if path.is_dir() and "__" not in path.name
    } == set(CASES)


@pytest.mark.parametrize("release", ["0.12.0", "0.24.0", "0.32.0"])
def test_three_releases_reduce_after_embedding_attention_and_mlp(
    release: str, replay: Replay
) -> None:
    collectives = rows(replay(f"llama-{release}"), Phase.DECODE)

    reduced = [(row.layer, row.part) for row in collectives if row.kind is Kind.ALL_REDUCE]
    in_layers = [(layer, part) for layer in (0, 1) for part in (Part.ATTN, Part.MLP)]
    assert reduced == [(None, Part.EMBED), *in_layers]
    assert {row.part for row in collectives if row.kind is not Kind.ALL_REDUCE} == {Part.SAMPLE}


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_experts_of_deepseek_get_gathered_tokens_and_scatter_their_sums(
    phase: Phase, replay: Replay
) -> None:
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
    assert prefill_s(split) > 1.1 * prefill_s(whole)


def prefill_s(run: meshscope.Run) -> float:
    (time,) = (
        t for t in run.record.times if (t.phase, t.source) == (Phase.PREFILL, Source.COMPILED)
    )
    return time.step.value_s


def test_memory_counts_the_weights_that_only_small_programs_read() -> None:
    model = {"argument_bytes": 100, "output_bytes": 10, "alias_bytes": 10, "temp_bytes": 5}
    logits = {"argument_bytes": 40, "output_bytes": 1, "alias_bytes": 0, "temp_bytes": 7}

    memory = step_memory([model, logits], 130)

    assert memory == {"argument_bytes": 130, "output_bytes": 10, "alias_bytes": 10, "temp_bytes": 7}
    assert step_memory([model, logits], None) == model
