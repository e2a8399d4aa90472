"""Kernel choices for each part of a program, by model, plan, workload and slice."""

from typing import Any, NamedTuple

import msgspec
import pytest
from made import experiment_with
from tables import cases

import meshscope
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.plans.kernel_choice import splash_block
from meshscope.plans.program import Program


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
