"""Kernel choices for each part of a program, by model, plan, workload and slice."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from made import experiment_with

import meshscope
from meshscope.cost import closed_form
from meshscope.errors import SpecError
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.plans.kernel_choice import Kernels, splash_block
from meshscope.plans.program import Partitioner, Program

SPLASH, RAGGED = "splash attention", "XLA's ragged dot kernel"
GROUPED = "grouped matmul that converts weights in VMEM"
CUDNN = "cuDNN attention"
DECODE = "flash decode attention"
LLAMA, QWEN_MOE, GPT_OSS = "Llama-3.1-8B", "Qwen3-30B-A3B", "gpt-oss-120b"
DEEPSEEK, DEEPSEEK_SPARSE = "DeepSeek-V3.1-Base", "DeepSeek-V3.2"


AUTO = {"partitioner": Partitioner.AUTO}
OFF_TPU = "plain: the kernels run on TPU only"
ONE_HOT = "plain: one-hot dispatch has no grouped matmul"
UNALIGNED = "plain: prompt=100 is not a multiple of 128"
F16 = "the kernels support bf16 and f32, not f16"
MASKS = "plain: splash attention has no data-dependent masks"


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
            self.model, self.plan, self.topology, **self.options, program=Program(**self.program)
        )


CASES = [
    Case(LLAMA, (SPLASH, DECODE)),
    *(Case(model, (SPLASH, DECODE, RAGGED)) for model in (QWEN_MOE, GPT_OSS, DEEPSEEK)),
    Case(DEEPSEEK_SPARSE, (MASKS, DECODE, RAGGED)),
    *(
        Case(QWEN_MOE, (SPLASH, DECODE, experts), {"weight_dtype": dtype}, topology=topology)
        for topology, dtype, experts in (
            ("v5e-8", "f8e4m3fn", GROUPED),
            ("v6e-8", "f8e5m2", GROUPED),
            ("v6e-8", "s8", RAGGED),
            ("tpu7x-8", "s8", GROUPED),
            ("tpu7x-8", "f8e4m3fn", RAGGED),
        )
    ),
    *(
        Case(LLAMA, (f"plain: {prefill}", f"plain: {decode}"), options, plan=plan)
        for prefill, decode, options, plan in (
            (
                "prompt=128 over cp=2 is not a multiple of 128",
                "the share of the cache under cp=2 has fewer than 128 positions (74)",
                {"output": 20},
                "cp=2,tp=4",
            ),
            (
                "prompt=100 is not a multiple of 128",
                "the cache has fewer than 128 positions (120)",
                {"prompt": 100, "output": 20},
                "tp=8",
            ),
            (F16, F16, {"activation_dtype": "f16"}, "tp=8"),
        )
    ),
    Case(LLAMA, (SPLASH, DECODE), {"prompt": 256}, plan="cp=2,tp=4"),
    Case(LLAMA, (SPLASH, DECODE), {"prompt": 1100}),
    Case(LLAMA, (UNALIGNED, DECODE), {"prompt": 100}),
    *(
        Case(model, kernels, {"batch": 8, "prompt": 512, "decode_tokens": n_tokens}, plan=plan)
        for model, plan, n_tokens, kernels in (
            (LLAMA, "tp=8", 5, (SPLASH, DECODE)),
            (
                LLAMA,
                "cp=2,tp=4",
                5,
                (SPLASH, "plain: 5 tokens a step under cp=2 have positions on several devices"),
            ),
            (
                DEEPSEEK,
                "dp=8",
                9,
                (
                    SPLASH,
                    "plain: 1152 queries of a head exceed the 1024 that VMEM has room for",
                    RAGGED,
                ),
            ),
            (
                DEEPSEEK_SPARSE,
                "tp=8",
                2,
                (MASKS, "plain: an indexer chooses other positions for each of 2 tokens", RAGGED),
            ),
        )
    ),
    Case(
        LLAMA,
        (SPLASH, "plain: the kernel reads caches in bf16, f32, int8, fp8, fp8_e5m2, not f16"),
        {"cache_dtype": "f16"},
    ),
    *(
        Case(QWEN_MOE, (SPLASH, DECODE, experts), program=AUTO | form)
        for form, experts in (
            ({}, ONE_HOT),
            ({"dispatch": DispatchForm.ONE_HOT_PINNED}, ONE_HOT),
            ({"dispatch": DispatchForm.GATHERED}, RAGGED),
        )
    ),
    Case(QWEN_MOE, (OFF_TPU,) * 3, topology="cpu:8"),
    *(
        Case(
            model,
            (prefill, *[OFF_TPU] * (1 if model == LLAMA else 2)),
            options,
            topology="h200:8",
            plan=plan,
        )
        for model, prefill, plan, options in (
            (LLAMA, CUDNN, "tp=8", {}),
            (QWEN_MOE, CUDNN, "tp=8", {"prompt": 100}),
            (GPT_OSS, "plain: cuDNN attention has no attention sinks", "tp=8", {}),
            (DEEPSEEK, "plain: cuDNN attention supports grouped-query attention only", "tp=8", {}),
            (LLAMA, "plain: cp splits the sequence", "cp=2,tp=4", {}),
            (
                LLAMA,
                "plain: cuDNN attention supports bf16 and f16, not f32",
                "tp=8",
                {"activation_dtype": "f32"},
            ),
        )
    ),
    Case(LLAMA, ("plain: --kernels off",) * 2, program={"kernels": Kernels.OFF}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.topology}")
def test_kernel_choices_and_their_manifest_entries(case: Case) -> None:
    stored = case.experiment.as_dict()
    names = ("prefill_attention", "decode_attention", "experts")
    assert stored["kernels"] == dict(zip(names, case.expected, strict=False))
    assert experiment_from_dict(stored) == case.experiment


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(LLAMA, topology="cpu:8"),
            (
                "--kernels on: no kernel for prefill attention, because the kernels run on TPU "
                "only; decode attention, because the kernels run on TPU only "
                "(meta-llama/Llama-3.1-8B, plan 'tp=8', cpu:8). Use --kernels auto or off."
            ),
        ),
        (
            Case(LLAMA, options={"prompt": 100}),
            "prefill attention, because prompt=100 is not a multiple of 128",
        ),
        (
            Case(QWEN_MOE, program=AUTO),
            "the experts, because one-hot dispatch has no grouped matmul",
        ),
    ],
)
def test_kernels_on_is_refused_if_a_kernel_cannot_be_used(case: Case, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _ = case._replace(program={**case.program, "kernels": Kernels.ON}).experiment
    assert message in str(caught.value)


def test_kernels_on_equals_auto_if_all_kernels_can_be_used() -> None:
    forced = Case(QWEN_MOE, program={"kernels": Kernels.ON}).experiment
    assert forced.kernels == Case(QWEN_MOE).experiment.kernels


def test_the_block_size_is_the_largest_divisor_of_the_prompt() -> None:
    prompts = (128, 256, 384, 512, 1024, 8192, 100, 130)
    assert [splash_block(n) for n in prompts] == [128, 256, 128, 512, 512, 512, None, None]


def test_closed_form_chooses_the_block_of_the_program() -> None:
    prompts = [100, 128, 640, 1023, 1024, 1025, 1100, 2000, 3000, 4100, 8200, 65_500, 131_000]
    blocks = closed_form._splash_block(np.array(prompts, float))
    assert [int(block) or None for block in blocks] == [splash_block(n) for n in prompts]


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
