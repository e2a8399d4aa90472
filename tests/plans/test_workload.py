"""Workloads: decode steps and validation."""

from statistics import mean

import pytest
from tables import table

from meshscope.errors import SpecError
from meshscope.plans.workload import Workload


def test_prefill_produces_the_first_output_token() -> None:
    workload = Workload(prompt=1024, output=128)
    assert (workload.context, workload.n_decode_steps) == (1152, 127)


@pytest.mark.parametrize("output", [2, 5, 128])
def test_mean_context_is_the_mean_over_the_decode_steps(output: int) -> None:
    workload = Workload(prompt=1024, output=output)
    # The token of decode step i, the first output token in step 1, attends to itself, too.
    present = [1024 + step for step in range(1, workload.n_decode_steps + 1)]
    assert workload.mean_context == mean(present)


@pytest.mark.parametrize(("output", "n_tokens"), [(17, 4), (128, 2), (5, 4)])
def test_mean_context_of_several_tokens_is_that_of_the_last(output: int, n_tokens: int) -> None:
    """Steps may start behind any number of accepted tokens, and end before the last output token."""
    workload = Workload(prompt=1024, output=output, decode_tokens=n_tokens)
    present = [1024 + start + n_tokens - 1 for start in range(1, output - n_tokens + 1)]
    assert workload.mean_context == mean(present)


def test_a_decode_step_is_no_longer_than_the_output() -> None:
    assert Workload(output=5, decode_tokens=4).n_decode_steps == 1
    with pytest.raises(
        SpecError, match=r"output=4 leave no decode step .* Use 1 to 3, or a longer"
    ):
        Workload(output=4, decode_tokens=4)


@pytest.mark.parametrize("name", ["batch", "prompt", "output"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}=0 is too small. Use at least 1"):
        Workload(**{name: 0})


def test_dtypes_are_xla_names() -> None:
    with pytest.raises(SpecError, match=r"weight_dtype='bfloat16' must be XLA's name"):
        Workload(weight_dtype="bfloat16")


@table
def test_sizes_and_dtypes_beyond_any_hardware_are_refused(values, remedy) -> None:
    with pytest.raises(SpecError, match=remedy):
        Workload(**values)
