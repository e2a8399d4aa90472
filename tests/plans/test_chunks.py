"""The chunks of a device's prefill, those that the default chooses, and those that are refused."""

from dataclasses import replace

import pytest
from made import experiment_with

from meshscope.cost.memory import predicted_memory
from meshscope.cost.predicted import predicted_times, with_default_chunk
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.plans.caches import ContextForm
from meshscope.plans.chunks import PrefillChunks, chunk_option, divisors
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine, Frontend, Partitioner, Program


def _experiment(
    chunk: int | None = None,
    *,
    plan: str = "dp=2,tp=4",
    model: str = "Qwen/Qwen3-8B",
    batch: int = 16,
    prompt: int = 1024,
    program: Program | None = None,
    engine: Engine = Engine.MESHSCOPE,
) -> Experiment:
    return experiment_with(
        model,
        plan,
        "v6e-8",
        batch=batch,
        prompt=prompt,
        prefill_chunk=chunk,
        program=program,
        engine=engine,
    )


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (None, PrefillChunks(n_sequences=8, n_positions=1024)),
        (8192, PrefillChunks(n_sequences=8, n_positions=1024)),
        (100_000, PrefillChunks(n_sequences=8, n_positions=1024)),
        (4096, PrefillChunks(n_sequences=4, n_positions=1024, n_sequence_chunks=2)),
        (5000, PrefillChunks(n_sequences=4, n_positions=1024, n_sequence_chunks=2)),
        (1024, PrefillChunks(n_sequences=1, n_positions=1024, n_sequence_chunks=8)),
        (
            256,
            PrefillChunks(n_sequences=1, n_positions=256, n_sequence_chunks=8, n_position_chunks=4),
        ),
    ],
)
def test_a_chunk_has_the_whole_sequences_that_fit(chunk, expected) -> None:
    experiment = _experiment(chunk)
    assert experiment.prefill_chunks == expected
    assert experiment.n_chunks(Phase.DECODE) == 1
    assert experiment.n_sequences(Phase.DECODE) == 8
    assert expected.count * expected.n_tokens == 8 * 1024


@pytest.mark.parametrize(
    ("batch", "prompt", "expected"),
    [
        (16, 1024, None),  # 8,192 tokens on a rank
        (32, 1024, 8192),
        (24, 1024, 6 * 1024),  # 12 sequences: six of them, as eight do not divide 12
        (24, 100, None),
        (2, 8192, None),
        (4, 8192, 8192),
        (2, 32768, 8192),
        (2, 10240, 5120),  # the largest divisor up to 8,192 that is a multiple of 128
        (2, 8193, None),
        (4, 8193, 8193),  # no divisor is a multiple of 128: one whole prompt at a time
    ],
)
def test_the_default_chunk_is_the_largest_divisor_up_to_8192_tokens(
    batch, prompt, expected
) -> None:
    experiment = _experiment(batch=batch, prompt=prompt).with_auto_chunk()
    assert experiment.workload.prefill_chunk == expected


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (
            3 * 1024,
            "3 prompts of 1024 tokens do not divide the 8 sequences of a device. Use 2048 or 4096",
        ),
        (7 * 1024 + 5, "7 prompts of 1024 tokens do not divide .* Use 4096 or 8192"),
        (1000, "--prefill-chunk 1000 does not divide prompt=1024. Use 512 or 1024"),
        (5, "does not divide prompt=1024. Use 4 or 8"),
    ],
)
def test_a_chunk_that_does_not_divide_is_refused_with_the_nearest(chunk: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _experiment(chunk)


def test_sp_divides_the_positions_of_a_chunk() -> None:
    with pytest.raises(SpecError, match=r"or tp=4 does not divide it \(sp\). Use 4"):
        _experiment(2, plan="dp=2,tp=4,sp")


def test_each_chunk_of_a_prompt_has_a_program_that_starts_where_it_does() -> None:
    programs = _experiment(256).programs(Phase.PREFILL)
    assert [program.start for program in programs] == [0, 256, 512, 768]
    assert [program.name for program in programs][-2:] == ["prefill_at512", "prefill"]


@pytest.mark.parametrize(
    ("chunk", "prompt", "message"),
    [
        (64, 1024, "a window of 128 compressed positions does not divide it. Use 128"),
        (500, 1024, "does not divide prompt=1024, or a window of 128 .* Use 256 or 512"),
        (500, 1000, "a window of 128 compressed positions does not divide it. Use 1000"),
    ],
)
def test_a_chunk_has_whole_windows_of_compressed_positions(chunk, prompt, message) -> None:
    model = "deepseek-ai/DeepSeek-V4-Flash"
    assert _experiment(512, plan="tp=8", model=model).n_chunks(Phase.PREFILL) == 16 * 2
    with pytest.raises(SpecError, match=message):
        _experiment(chunk, plan="tp=8", model=model, prompt=prompt)


def test_prompts_are_cut_into_shorter_chunks_if_only_those_fit() -> None:
    """The scores of compressed attention with 262,144 entries: 89.8 GiB of a device for chunks of 7,936 tokens."""
    model = "deepseek-ai/DeepSeek-V4-Flash"
    whole = _experiment(plan="tp=8", model=model, batch=1, prompt=1_047_552)
    stored = replace(whole.workload, weight_dtype=whole.model.default_weight_dtype)
    whole = replace(whole, workload=stored)
    longest, chosen = whole.with_auto_chunk(), with_default_chunk(whole)

    assert longest.workload.prefill_chunk == 7936
    assert chosen.workload.prefill_chunk is not None
    assert chosen.workload.prefill_chunk < 7936
    assert predicted_memory(chosen).fits
    assert not predicted_memory(longest).fits


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "cp=2,tp=4", "the indexer of .* Use 1024"),
        ("deepseek-ai/DeepSeek-V4-Flash", "cp=2,tp=4", "compresses the positions of .* Use 1024"),
        ("Qwen/Qwen3-32B", "cp=2,tp=4", r"cp=2 does not divide it\. Use 12 or 18"),
        ("Qwen/Qwen3-32B", "cp=2,tp=4,sp", r"cp=2 x tp=4 does not divide it \(sp\)\. Use 8 or 24"),
    ],
)
def test_chunks_that_cp_cannot_split_are_refused(model: str, plan: str, message: str) -> None:
    is_odd = "Qwen" in model
    with pytest.raises(SpecError, match=message):
        _experiment(15 if is_odd else 4, plan=plan, model=model, prompt=1080 if is_odd else 1024)


@pytest.mark.parametrize(
    ("plan", "prompt", "context", "chunk"),
    [
        ("cp=2,tp=4", 65_536, ContextForm.AUTO, 8192),
        ("cp=2,tp=4", 130_048, ContextForm.AUTO, 1024),
        ("cp=2,tp=4", 130_048, ContextForm.RING, None),
        ("cp=2,tp=4", 130_944, ContextForm.AUTO, None),  # no chunk divides it
        ("cp=2,tp=4", 16_384, ContextForm.AUTO, None),  # whole, it is faster
        ("cp=2,tp=4", 8192, ContextForm.AUTO, None),
    ],
)
def test_auto_cuts_prompts_that_cp_splits_where_that_is_faster(
    plan, prompt, context, chunk
) -> None:
    program = Program(context=context)
    model = "meta-llama/Llama-3.1-8B"
    whole = _experiment(plan=plan, prompt=prompt, program=program, model=model)
    assert with_default_chunk(whole).workload.prefill_chunk == chunk

    cut = whole.with_auto_chunk()
    if cut.has_cut_prompts:
        of_whole, of_cut = (predicted_times(e)[0].step.value_s for e in (whole, cut))
        assert (of_cut < of_whole) == (chunk is not None)


def test_auto_leaves_short_prompts_of_cp_in_one_chunk() -> None:
    whole = _experiment(plan="cp=2,tp=4", batch=64)
    assert with_default_chunk(whole) == whole


@pytest.mark.parametrize(
    ("plan", "program", "engine", "message"),
    [
        ("pp=2,tp=4", None, Engine.MESHSCOPE, "micro-batches of a pipeline"),
        ("tp=8", Program(frontend=Frontend.TORCHXLA), Engine.MESHSCOPE, "traces a whole prompt"),
        ("tp=8", Program(partitioner=Partitioner.AUTO), Engine.MESHSCOPE, "no rows of one device"),
        ("tp=8", None, Engine.VLLM, "prefills all sequences in one step"),
    ],
)
def test_programs_without_chunks_refuse_one_and_have_none_by_default(
    plan, program, engine, message
) -> None:
    with pytest.raises(SpecError, match=rf"--prefill-chunk 2048 is not supported: .*{message}"):
        _experiment(2048, plan=plan, program=program, engine=engine)
    whole = _experiment(plan=plan, program=program, engine=engine, batch=64)
    assert whole.with_auto_chunk() == whole


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "--prefill-chunk 0 is too small. Use at least 1 token, or off"),
        (-8, "--prefill-chunk -8 is too small"),
        ("big", "--prefill-chunk 'big' is not a number of tokens. Use a number, auto or off"),
    ],
)
def test_the_option_is_a_positive_number_auto_or_off(value: str | int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chunk_option(value)


def test_divisors_are_complete_and_sorted() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
