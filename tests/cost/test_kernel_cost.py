"""Kernel costs from operands, declarations, lengths and the expected expert load; blocks and bundles of paged attention."""

from collections import Counter
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made import experiment_with
from tables import stored, table

from meshscope.cost.array_traffic import KernelWork, touched_traffic, traffic
from meshscope.cost.expert_load import ExpertLoad, expert_load
from meshscope.cost.kernels import attention_work
from meshscope.cost.op_cost import kernel_time, kernel_work
from meshscope.cost.paged import PagedBlocks, n_blocks
from meshscope.cost.rates import ArrayTraffic, Rates, rates_of
from meshscope.events.enums import REQUEST_PHASES
from meshscope.events.step_time import TimeBasis
from meshscope.hardware.chips import chip_of
from meshscope.plans.workload import SequenceLengths
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.parse import parse_hlo

V6E, V5E, V4 = (rates_of(chip_of(name)) for name in ("v6e", "v5e", "v4"))


def _module(text: str):
    header = "HloModule m, is_scheduled=true, num_partitions=1\n\n"
    return parse_hlo(header + text, "test.hlo")


def _kernel(
    operands: str, name: str, config: str = "", result: str = "bf16[8]"
) -> tuple[Computation, Instruction]:
    names = ", ".join(f"%p{i}" for i in range(operands.count(";") + 1))
    lines = "".join(
        f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands.split(";"))
    )
    entry = _module(
        f"ENTRY %main () -> f32[] {{\n{lines}  ROOT %{name} = {result} custom-call({names}), "
        f'custom_call_target="tpu_custom_call"{config}\n}}\n'
    ).entry
    return entry, entry.root


def _stated(flops: int, n_bytes: int) -> str:
    estimate = f'"cost_estimate":{{"flops":"{flops}","bytes_accessed":"{n_bytes}"}}'
    return f", backend_config={{{estimate}}}"


SPLASH = "s8[1,2,2];s8[1,2,2];bf16[8,8,1024,128];bf16[8,1,1024,128];bf16[8,1,1024,128]"
BANDED = "s8[1,8,2];s8[1,8,2];bf16[8,8,4096,64];bf16[8,1,4096,64];bf16[8,1,4096,64]"
WHOLE = ', metadata={op_name="jit(prefill)/attn/cond/branch_1_fun/whole_block/vmap(splash)"}'


@pytest.mark.parametrize(
    ("shapes", "kernel", "n_pairs", "width"),
    [
        # Batch 8, 8 heads, 1,024 positions in blocks of 512: three of four blocks.
        (SPLASH, ("splash_mha_fwd.3",), 64 * 1024 * 1024 * 3 // 4, 128),
        # A step of the ring of cp: the same operands, without a causal mask.
        (SPLASH, ("splash_mha_fwd_residuals.4", WHOLE), 64 * 1024 * 1024, 128),
        # gpt-oss on v6e-8 with tp=8: libtpu's grid has 8 rows of 2 blocks, so 15 of 64 blocks are computed.
        (BANDED, ("splash_mha_fwd.2",), 64 * 15 * 512 * 512, 64),
    ],
    ids=["causal", "an earlier block", "windowed"],
)
def test_splash_attention_computes_the_blocks_of_its_mask(shapes, kernel, n_pairs, width) -> None:
    """4 FLOPs a pair and width."""
    assert attention_work(*_kernel(shapes, *kernel), (), V6E).flops == 4 * n_pairs * width


@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 1219), ("v5e", 1487), ("v5p", 742)])
def test_splash_attention_takes_the_cycles_of_its_bundles(chip: str, cycles: int) -> None:
    work = attention_work(*_kernel(SPLASH, "splash_mha_fwd.3"), None, rates_of(chip_of(chip)))
    assert work.cycles == pytest.approx(64 * 3 * cycles)  # three of four blocks of 512 x 512


def test_ragged_dot_counts_the_expected_rows_and_experts():
    """A quarter of the rows and 1.5 of four experts; a stack of 20 experts reads no more."""
    load = ExpertLoad(rows=1024, experts=1.5)
    expert, rows, result = 2 * 128 * 256, 2 * 4096 * 128, 16  # the result has 8 numbers
    for n_experts in (4, 20):
        kernel = _kernel(
            f"s32[5];bf16[4096,128];bf16[{n_experts},128,256]", "ragged-dot-none.2", _stated(9, 9)
        )
        work = kernel_work(*kernel, V6E, experts=load)
        assert work.flops == 2 * 1024 * 128 * 256
        assert work.moved.hbm_bytes == pytest.approx(1.5 * expert + (rows + result) / 4)
        assert work.note is None


def test_scales_of_experts_are_no_rows():
    """The grouped matmul of 8-bit experts: scales of [experts, outputs] are as flat as the rows."""
    shapes = "s32[5];bf16[64,128];f8e4m3fn[4,128,256];f32[4,256]"
    kernel = _kernel(shapes, "grouped_matmul_m16_k128_n256.1", result="bf16[64,256]")
    work = kernel_work(*kernel, V6E, experts=ExpertLoad(rows=32, experts=2))
    assert work.flops == 2 * 32 * 128 * 256
    assert work.moved.hbm_bytes == 2 * 128 * 256 + 2 * 32 * (128 + 256)


@table
def test_experts_of_4_bits_take_the_longer_of_their_bytes_and_their_conversion(
    chip, scales, bundles, is_bound
) -> None:
    """Each of 32 experts has two blocks of 1,024 x 768 weights, whose bundles are known."""
    shapes = f"s32[33];s32[32];bf16[16,2048];s4[32,2048,768];{scales}"
    kernel = _kernel(shapes, "grouped_matmul_m16_k1024_n768.1", result="bf16[16,768]")
    rates = rates_of(chip_of(chip))

    work = kernel_work(*kernel, rates, experts=ExpertLoad(rows=16, experts=12.0))
    seconds = kernel_time(rates, work).seconds.value_s

    scale_bytes = 64 * 768 if scales.startswith("u8") else 2 * 16 * 768
    assert work.moved.hbm_bytes == 12 * (2048 * 768 // 2 + scale_bytes) + 2 * 16 * (2048 + 768)
    assert work.flops == 2 * 16 * 2048 * 768
    converted_s = 24 * bundles / rates.clock_hz
    assert (seconds == pytest.approx(converted_s, rel=0.02)) == is_bound
    assert seconds >= rates.hbm(work.moved).value_s


@pytest.mark.parametrize(("chip", "speedup"), [(V6E, 2), (V4, 1)])
def test_int8_rows_run_at_the_peak_of_their_dtype(chip: Rates, speedup: int):
    """Sums in int32 are written as they are; the products of many rows are longer than all bytes."""
    load, times = ExpertLoad(rows=8192, experts=1), []
    for dtype, of_sums in (("bf16", "bf16"), ("s8", "s32")):
        shapes = f"s32[5];{dtype}[8192,2048];s8[1,2048,8192]"
        kernel = _kernel(shapes, "ragged-dot-none.2", result=f"{of_sums}[8192,8192]")
        work = kernel_work(*kernel, chip, experts=load)
        assert work.flops == 2 * 8192 * 2048 * 8192
        times.append(kernel_time(chip, work).seconds.value_s)
    assert work.moved.hbm_written_bytes == 4 * 8192 * 8192
    assert times[0] == pytest.approx(speedup * times[1])


def test_rows_and_experts_are_capped():
    kernel = _kernel("s32[5];bf16[64,128];bf16[4,128,256]", "ragged-dot-none.2")
    work = kernel_work(*kernel, V6E, experts=ExpertLoad(rows=9999, experts=7))
    n_bytes = 2 * (4 * 128 * 256 + 64 * 128 + 8)
    assert (work.flops, work.moved.hbm_bytes) == (2 * 64 * 128 * 256, n_bytes)


TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
# DeepSeek-R1 of jax-llm-examples on v5e-64: 8 tokens x 8 experts, 32 of 256 experts in a device row, in 8
# blocks of 4 whose two buffers fill the kernel's VMEM.
R1 = TEXTS["R1"]


def test_a_grouped_matmul_reads_the_blocks_of_experts_that_64_draws_reach():
    """An expert is missed with (1 - 1/256)^64 = 77.8 %, a block of four with 36.7 %: 63.3 % are read."""
    entry = _module(R1).entry
    work = kernel_work(entry, entry.root, V5E)
    weights = 0.633 * 32 * 7168 * 256
    rows = (64 * 7168 + 64 * 256) * 2 / 8
    assert work.moved.hbm_bytes == pytest.approx(weights + rows, rel=2e-3)
    assert work.flops == 2 * 8 * 7168 * 256
    assert "64 rows over 256 experts" in str(work.note)
    # 46 us at the peak rate for all 32 experts, 0.633 of it and 85 % of the peak here
    seconds = kernel_time(V5E, work).seconds.value_s
    assert seconds == pytest.approx(0.633 * 58.72e6 / 819e9 / 0.85, rel=0.15)


def test_a_kernel_of_one_expert_a_block_reads_single_experts():
    """megablox: tiles of one expert; 16 rows over four experts reach 1 - 0.75^16 = 99 % of them."""
    kernel = _kernel("s32[4];bf16[16,128];s8[4,128,256]", "gmm.7", result="bf16[16,256]")
    work = kernel_work(*kernel, V6E)
    weights = (1 - 0.75**16) * 4 * 128 * 256
    assert work.moved.hbm_bytes == pytest.approx(weights + 2 * 16 * (128 + 256), abs=2)


def _ragged_paged(
    heads: int, tokens: int, sequences: int, *, pages: int, per_sequence: int, bq: int, bkvp: int
) -> tuple[Computation, Instruction]:
    """Llama-3.1-8B in tpu-inference 0.12: groups of four query heads, pages of 128."""
    q, cache = f"bf16[{heads},{tokens},2,2,128]", f"bf16[{pages},128,{heads},2,128]"
    lists = f"s32[{sequences}];s32[{sequences * per_sequence}];s32[{sequences + 1}]"
    shapes = f"s32[];{lists};{q};bf16[{tokens},{heads},2,128];{cache}"
    aliases = ", output_to_operand_aliasing={{0}: (4, {}), {1}: (6, {})}, metadata={}"
    return _kernel(shapes, f"RPA-bq_{bq}-bkvp_{bkvp}-p_128.1", aliases, f"({q}, {cache})")


@pytest.mark.parametrize(("heads", "bkvp", "bundles"), [(1, 9, 2278), (2, 9, 4153), (4, 8, 6833)])
def test_loop_bodies_of_ragged_paged_attention(heads: int, bkvp: int, bundles: int) -> None:
    """Bundles that libtpu 0.0.24 writes for blocks of 128 queries x 4 heads, alone in its loop."""
    kernel = _ragged_paged(heads, 128, 1, pages=8, per_sequence=1, bq=128, bkvp=bkvp)
    assert kernel_work(*kernel, V6E).cycles == pytest.approx(bundles + 300, rel=0.04)


def test_ragged_paged_attention_of_a_prefill():
    """8 sequences of 1,024 at TP8: 8 x 8 blocks of queries over one block of 1,152 keys each.

    A body takes 400 cycles, 0.178 for each key and 2.73 for each 1,000 of 512 x 1,152 scores; 300 to fetch.
    """
    kernel = _ragged_paged(1, 8192, 8, pages=72, per_sequence=9, bq=128, bkvp=9)
    work = kernel_work(*kernel, V6E)
    assert work.cycles == pytest.approx(64 * (300 + 400 + 1152 * (0.178 + 512 * 0.00273)))
    assert "8 sequences of 1024 queries and 1024 keys" in str(work.note)
    assert kernel_time(V6E, work).basis is TimeBasis.KERNEL_MODEL


def test_later_chunks_read_the_whole_context():
    lengths = SequenceLengths(n_sequences=1, n_queries=1024, n_keys=4096)
    kernel = _ragged_paged(1, 1024, 1, pages=72, per_sequence=32, bq=128, bkvp=8)
    work = kernel_work(*kernel, V6E, lengths=(lengths,))
    assert work.cycles == pytest.approx(8 * 4 * (300 + 400 + 1024 * (0.178 + 512 * 0.00273)))
    assert work.note is None


def test_the_size_of_a_paged_cache_does_not_matter():
    """64 sequences of 1,024 present keys (half of their pages): keys and values of 256 B each."""
    options = {"per_sequence": 16, "bq": 64, "bkvp": 16}
    small, large = (
        kernel_work(*_ragged_paged(1, 64, 64, pages=pages, **options), V6E)
        for pages in (1024, 40000)
    )
    assert small == large
    assert small.moved.hbm_bytes == pytest.approx(64 * 1024 * 512, rel=0.01)


def test_a_kernel_of_the_other_phase_has_no_sequences():
    q, cache = "bf16[1,64,2,2,128]", "bf16[512,128,1,2,128]"
    shapes = f"s32[64];s32[1024];s32[65];{q};bf16[64,1,2,128];{cache}"
    lengths = SequenceLengths(n_sequences=64, n_queries=1, n_keys=1000)
    works = [
        kernel_work(*_kernel(shapes, f"RPA{case}-p_128-bq_8-bkv_2048.1"), V6E, lengths=(lengths,))
        for case in "dmp"
    ]
    assert [work.moved.hbm_bytes > 0 for work in works] == [True, False, False]


def test_a_buffer_in_place_counts_with_what_is_touched():
    """A cache of 1 GB, a query and a result of 2 kB each: at most 4 kB of the cache."""
    aliases = ", output_to_operand_aliasing={{1}: (1, {})}"
    kernel = _kernel(
        "bf16[8,128];bf16[4096,1024,128]", "mine.1", aliases, "(bf16[8,128], bf16[4096,1024,128])"
    )
    touched = touched_traffic(*kernel)
    assert touched == ArrayTraffic(hbm_bytes=3 * 2048 + 2048, hbm_written_bytes=2048)


def test_an_unknown_kernel_has_a_bounded_interval():
    kernel = _kernel("bf16[4096,4096]", "mine.1", result="bf16[4096,4096]")
    work = kernel_work(*kernel, V6E)
    time = kernel_time(V6E, work)
    assert (work.basis, time.basis) == (TimeBasis.ROOFLINE, TimeBasis.ROOFLINE)
    seconds = time.seconds
    assert seconds.lower_s == pytest.approx(seconds.value_s / 4)
    assert seconds.upper_s == pytest.approx(seconds.value_s * 4)


def test_the_authors_estimate_counts_below_whole_operands():
    """A decode kernel states the bytes of the present positions; its operand is the whole cache."""
    kernel = _kernel("bf16[8,128];bf16[4096,1024,128]", "decode_attention.1", _stated(10, 4096))
    work = kernel_work(*kernel, V6E)
    stated = {"basis": TimeBasis.KERNEL_STATED, "flops": 10}
    assert work == KernelWork(**stated, moved=ArrayTraffic(hbm_bytes=4096))
    assert kernel_time(V6E, work).basis is TimeBasis.KERNEL_STATED


def test_stated_bytes_count_in_the_memory_of_the_operands():
    """One of two equal caches is in VMEM, so the HBM serves half of the bytes."""
    shapes = "bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)};bf16[4096,1024]{1,0:T(8,128)(2,1)}"
    work = kernel_work(*_kernel(shapes, "decode_attention_b2_k512_block.1", _stated(10, 4096)), V6E)
    assert work.moved == ArrayTraffic(hbm_bytes=2048, vmem_bytes=2048)


@pytest.mark.parametrize(("n", "basis"), [(7, TimeBasis.KERNEL_STATED), (0, TimeBasis.ROOFLINE)])
def test_declared_cost_of_zero_is_ignored(n: int, basis: TimeBasis):
    work = kernel_work(*_kernel("f32[8]", "a", _stated(n, n)), V6E)
    assert (work.basis, work.flops) == (basis, n)


UPDATES = TEXTS["UPDATES"]


def test_one_of_several_results_in_place_writes_its_update():
    """The row is read, written into the cache, and its double written: 3 x 256 KiB and the index."""
    module = _module(UPDATES)
    moved = traffic(Dataflow(module), module.entry, module.entry.root)
    assert moved.hbm_bytes == 3 * 1024 * 128 * 2 + 4


def test_decode_reads_the_mean_context():
    sizes = {"batch": 8, "prompt": 256, "output": 64}
    experiment = experiment_with("Qwen/Qwen3-30B-A3B", "dp=2,tp=4", "v6e-8", **sizes)
    lengths = [experiment.sequence_lengths(phase) for phase in REQUEST_PHASES]
    assert lengths == [
        SequenceLengths(n_sequences=4, n_queries=256, n_keys=256),
        SequenceLengths(n_sequences=4, n_queries=1, n_keys=288),
    ]


@table
def test_expert_load_counts_all_tokens_that_may_choose_an_expert(plan, rows_share) -> None:
    """A token chooses 8 of 128 experts; a device has a shard of all, or 16."""
    experiment = experiment_with("Qwen/Qwen3-30B-A3B", plan, "v6e-8", batch=8, prompt=256)
    prefill, decode = (expert_load(experiment, phase) for phase in REQUEST_PHASES)
    assert prefill.rows == 8 * 256 * 8 // rows_share
    assert prefill.experts == pytest.approx(128 / experiment.plan.ep)
    assert decode.rows == 8 * 8 // rows_share
    # Brute force: every token draws 8 of 128 experts; the layer waits for the device with most of them.
    n_local, draws = 128 // experiment.plan.ep, np.random.default_rng(3)
    drawn = [
        max(
            Counter(
                e // n_local for e in {*draws.random((8, 128)).argpartition(8)[:, :8].flat}
            ).values()
        )
        for _ in range(2000)
    ]
    assert decode.experts == pytest.approx(np.mean(drawn), rel=0.03)


V6E_FLOPS_PER_CYCLE = 918e12 / 1.75e9
NO_WINDOW = float(1 << 40)


def _form(queries: int, keys: int, *, skips_masked: bool) -> SimpleNamespace:
    """What a closed form knows of the blocks."""
    return SimpleNamespace(block_queries=queries, block_keys=keys, skips_masked=skips_masked)


def _counted(form: SimpleNamespace, prompt: int, chunk: int, window: int | None) -> int:
    """Every pair of blocks that the loops of the kernel run over."""
    n = 0
    for start in range(0, prompt, chunk):
        for first in range(start, start + chunk, form.block_queries):
            end = first + form.block_queries if form.skips_masked else start + chunk
            seen_from = first if form.skips_masked else start
            begin = 0 if window is None else max(seen_from - window, 0) // form.block_keys
            n += ceil(end / form.block_keys) - begin
    return n


@pytest.mark.parametrize(
    ("queries", "keys", "skips_masked"), [(128, 2048, False), (128, 256, False), (32, 1024, True)]
)
@pytest.mark.parametrize(
    ("prompt", "chunk"), [(1024, 1024), (8192, 2048), (8192, 8192), (6144, 2048)]
)
@pytest.mark.parametrize("window", [None, 4096])
def test_blocks_of_a_prompt_are_those_of_the_loops(
    queries: int,
    keys: int,
    prompt: int,
    chunk: int,
    window: int | None,
    *,
    skips_masked: bool,
) -> None:
    """Near the first positions a window counts one block more or less."""
    form = _form(queries, keys, skips_masked=skips_masked)
    n = n_blocks(form, float(prompt), float(chunk), min(window or NO_WINDOW, prompt))
    tolerance = 1e-9 if window is None else 0.15
    assert n == pytest.approx(_counted(form, prompt, chunk, window), rel=tolerance)


@table
def test_bundles_of_a_head_in_kernels_compiled_alone(
    version: str, n_rows: int, n_keys: int, n_kv_heads: int, bundles: int
) -> None:
    """tpu-inference 0.12 with libtpu 0.0.24, then 0.24 and SGLang-JAX with 0.0.42.1; all on v6e with heads of 128."""
    blocks = PagedBlocks(queries=n_rows // 2, keys=n_keys, version=version)
    cycles = blocks.cycles(
        n_heads=2,
        n_kv_heads=n_kv_heads,
        score_flops=4 * 128,
        flops_per_cycle=V6E_FLOPS_PER_CYCLE,
    )
    assert (cycles - 700) / n_kv_heads == pytest.approx(bundles, rel=0.08)


def test_counts_of_many_prompts_at_once_are_those_of_each() -> None:
    form = _form(32, 1024, skips_masked=True)
    prompts = np.array([1024.0, 6144.0])
    both = n_blocks(form, prompts, prompts, prompts)
    assert list(both) == [n_blocks(form, p, p, p) for p in prompts]
