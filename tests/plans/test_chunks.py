"""Chunks of a prompt, and the blocks of kernels."""

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from made import experiment_with
from tables import cases, table

import meshscope
from meshscope.cost.memory import predicted_memory
from meshscope.cost.predicted import predicted_times, with_default_chunk
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.plans.caches import ContextForm
from meshscope.plans.chunks import PrefillChunks, chunk_option, divisors
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.plans.kernel_choice import splash_block
from meshscope.plans.program import Engine, Program


def _experiment(
    chunk: int | None = None, *, plan: str = "dp=2,tp=4", model: str = "Qwen/Qwen3-8B", **facts: Any
) -> Experiment:
    sizes = {"batch": 16, "prompt": 1024} | facts
    return experiment_with(model, plan, "v6e-8", prefill_chunk=chunk, **sizes)


@table
def test_a_chunk_has_the_whole_sequences_that_fit(chunk, expected: PrefillChunks) -> None:
    experiment = _experiment(chunk)
    assert experiment.prefill_chunks == expected
    assert experiment.n_chunks(Phase.DECODE) == 1
    assert experiment.n_sequences(Phase.DECODE) == 8
    assert expected.count * expected.n_tokens == 8 * 1024


@table
def test_the_default_chunk_is_the_largest_divisor_up_to_8192_tokens(batch, prompt, expected):
    experiment = _experiment(batch=batch, prompt=prompt).with_auto_chunk()
    assert experiment.workload.prefill_chunk == expected


def test_each_chunk_of_a_prompt_has_a_program_that_starts_where_it_does() -> None:
    programs = _experiment(256).programs(Phase.PREFILL)
    assert [program.start for program in programs] == [0, 256, 512, 768]
    assert [program.name for program in programs][-2:] == ["prefill_at512", "prefill"]


def test_a_chunk_may_have_whole_windows_of_compressed_positions() -> None:
    experiment = _experiment(512, plan="tp=8", model="deepseek-ai/DeepSeek-V4-Flash")
    assert experiment.n_chunks(Phase.PREFILL) == 16 * 2


def test_prompts_are_cut_into_shorter_chunks_if_only_those_fit() -> None:
    """The scores of compressed attention with 262,144 entries: 89.8 GiB of a device for chunks of 7,936 tokens."""
    model = "deepseek-ai/DeepSeek-V4-Flash"
    whole = _experiment(plan="tp=8", model=model, batch=1, prompt=1_047_552)
    stored = replace(whole.workload, weight_dtype=whole.model.default_weight_dtype)
    whole = replace(whole, workload=stored)
    longest, chosen = whole.with_auto_chunk(), with_default_chunk(whole)
    assert longest.workload.prefill_chunk == 7936
    assert chosen.workload.prefill_chunk < 7936
    assert predicted_memory(chosen).fits
    assert not predicted_memory(longest).fits


@table
def test_auto_cuts_prompts_that_cp_splits_where_that_is_faster(
    plan, prompt, context: ContextForm, chunk
) -> None:
    program = Program(context=context)
    model = "meta-llama/Llama-3.1-8B"
    whole = _experiment(plan=plan, prompt=prompt, program=program, model=model)
    assert with_default_chunk(whole).workload.prefill_chunk == chunk
    cut = whole.with_auto_chunk()
    if cut.prefill_chunks.is_cut:
        of_whole, of_cut = (predicted_times(e)[0].step.value_s for e in (whole, cut))
        assert (of_cut < of_whole) == (chunk is not None)


def test_auto_leaves_short_prompts_of_cp_in_one_chunk() -> None:
    whole = _experiment(plan="cp=2,tp=4", batch=64)
    assert with_default_chunk(whole) == whole


@table
def test_programs_without_chunks_refuse_one_and_have_none_by_default(
    plan, program: Program | None, engine: Engine, message
) -> None:
    with pytest.raises(SpecError, match=rf"--prefill-chunk 2048 is not supported: .*{message}"):
        _experiment(2048, plan=plan, program=program, engine=engine)
    whole = _experiment(plan=plan, program=program, engine=engine, batch=64)
    assert whole.with_auto_chunk() == whole


@table
def test_the_option_is_a_positive_number_auto_or_off(value: str | int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chunk_option(value)


def test_divisors_are_complete_and_sorted() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


class Case(NamedTuple):
    """Kernels of prefill attention, decode attention and experts, if the model has any."""

    model: str
    expected: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    program: dict[str, Any] = {}  # noqa: RUF012
    topology: str = "v6e-8"
    plan: str = "tp=8"

    @property
    def experiment(self) -> Experiment:
        return experiment_with(
            self.model,
            self.plan,
            self.topology,
            **self.options,
            program=msgspec.convert(self.program, Program),
        )


CASES: list[Case] = cases(__file__, Case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.topology}")
def test_kernel_choices_and_their_manifest_entries(case: Case) -> None:
    stored = case.experiment.as_dict()
    names = ("prefill_attention", "decode_attention", "experts")
    assert stored["kernels"] == dict(zip(names, case.expected, strict=False))
    assert experiment_from_dict(stored) == case.experiment


def test_the_block_size_is_the_largest_divisor_of_the_prompt() -> None:
    prompts = (128, 256, 384, 512, 1024, 8192, 100, 130)
    assert [splash_block(n) for n in prompts] == [128, 256, 128, 512, 512, 512, None, None]


def test_a_padded_prompt_takes_the_time_and_memory_of_whole_blocks() -> None:
    padded, whole = (
        meshscope.predict(
            "meta-llama/Llama-3.1-8B",
            topology="v6e-8",
            plan="cp=2,tp=4",
            prompt=prompt,
            output=8,
            prefill_chunk="off",
        )
        for prompt in (131_000, 130_048)
    )

    assert padded.time.ttft_s == pytest.approx(whole.time.ttft_s, rel=2e-2)
    assert padded.memory.total_bytes == pytest.approx(whole.memory.total_bytes, rel=2e-2)
    assert padded.memory.fits
