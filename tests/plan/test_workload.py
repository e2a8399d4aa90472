"""Workloads: decode steps and validation."""

from statistics import mean

import pytest

from meshscope.errors import SpecError
from meshscope.spec.workload import Workload


def test_prefill_produces_the_first_output_token() -> None:
    workload = Workload(prompt=1024, output=128)
    assert (workload.context, workload.n_decode_steps) == (1152, 127)


@pytest.mark.parametrize("output", [2, 5, 128])
def test_mean_context_is_the_mean_over_the_decode_steps(output: int) -> None:
    workload = Workload(prompt=1024, output=output)
    # The token of decode step i, the first output token in step 1, attends to itself, too.
    present = [1024 + step for step in range(1, workload.n_decode_steps + 1)]
    assert workload.mean_context == mean(present)


@pytest.mark.parametrize("name", ["batch", "prompt", "output"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}=0 is too small. Use at least 1"):
        Workload(**{name: 0})


def test_dtypes_are_xla_names() -> None:
    with pytest.raises(SpecError, match=r"weight_dtype='bfloat16' must be XLA's name"):
        Workload(weight_dtype="bfloat16")
