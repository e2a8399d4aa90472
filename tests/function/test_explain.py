"""Why the partitioner inserted a collective: shardings, cost, and the annotation that avoids it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs import (
    DECODE,
    SLICE,
    SPLIT,
    SUMMED,
    array,
    data_parallel,
    decode_until_all_end,
    summed,
)

import meshscope
from meshscope.analysis.insertion import Insertion
from meshscope.errors import RunError
from meshscope.reports.collectives import insertion_lines

SIZES = {"dp": 4, "tp": 2}
# The axis whose index chooses the slice; None for the same slice on every device.
WASTED = [
    ("dp", "did not make this reduce-scatter"),
    ("tp", "half of it is dropped over tp: slice before reducing"),
    (None, "half of it is dropped on each device: slice before reducing"),
]

pytestmark = [pytest.mark.slow, pytest.mark.tpu]


def test_a_gather_of_an_argument_names_it() -> None:
    run = meshscope.compile(data_parallel, *SPLIT, topology=SLICE, mesh="dp=4")
    (one,) = run.explain()
    assert one.operand == "split along dimension 0 over dp"
    assert str(one).startswith(f"all_gather over dp at {one.row.source_line}: split along")
    assert one.wanted == "whole on every device"
    assert (one.remedy or "").startswith("pass w whole (no dp in its PartitionSpec)")
    assert one.exposed_s == run.record.rows[0].exposed_s
    assert one.hidden_frac == pytest.approx(0.0, abs=1e-6)


def test_a_sum_of_which_shards_are_kept_is_a_reduce_scatter_that_was_not_made() -> None:
    run = meshscope.compile(summed, *SUMMED, topology=SLICE, mesh="tp=4")
    (one,) = run.explain()
    assert one.row.kind == "reduce_scatter"
    assert one.row.wire_bytes == 2 * 256 * 512 * 2 * 3 / 4  # executed as an all-reduce
    assert "did not make this reduce-scatter" in (one.remedy or "")


def test_a_collective_matmul_is_named_with_what_it_hides() -> None:
    """libtpu 0.0.42.1 decomposes a large product and not a small one."""
    (large,) = explained_product(rows=16384, columns=8192)
    assert (large.row.kind, large.row.algorithm) == ("all_gather", "windowed einsum")
    assert 0.2 < (large.hidden_frac or 0) < 0.6
    assert "a collective matmul: decomposed into permutes" in "\n".join(insertion_lines([large]))
    (small,) = explained_product(rows=1024, columns=512)
    assert small.row.algorithm != "windowed einsum"
    assert small.hidden_frac == pytest.approx(0.0, abs=1e-6)
    assert "no collective matmul: the product waits" in "\n".join(insertion_lines([small]))


def explained_product(*, rows: int, columns: int) -> tuple[Insertion, ...]:
    """What the partitioner inserts for a product whose left operand is split along the sum."""
    x, w = array(rows, columns, spec=P("tp")), array(rows, rows, spec=P(None, "tp"))
    return meshscope.compile(transposed_product, x, w, topology="v6e-8", mesh="tp=8").explain()


def transposed_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.einsum("td,te->ed", x, w), P("tp"))


def test_a_boolean_has_no_annotation() -> None:
    (one,) = meshscope.compile(decode_until_all_end, *DECODE, topology=SLICE, mesh="dp=4").explain()
    assert (one.remedy or "").startswith("no annotation avoids it")


def test_the_lines_start_with_the_sum(tmp_path: Path) -> None:
    run = meshscope.compile(
        data_parallel, *SPLIT, topology=SLICE, mesh="dp=4", out=tmp_path / "run"
    )
    lines = list(insertion_lines(run.explain()))
    assert lines[0].startswith("the partitioner inserted 1 collective, exposed ")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("axis", "words"), WASTED)
def test_a_users_own_sum_that_is_sliced_is_named(axis: str | None, words: str) -> None:
    """Only what the partitioner inserted was explained."""

    def sliced(x: jax.Array) -> jax.Array:
        y = jax.lax.psum(x, "dp")
        at = 0 if axis is None else jax.lax.axis_index(axis) * (2048 // SIZES[axis])
        n = 1024 if axis is None else 2048 // SIZES[axis]
        return jax.lax.dynamic_slice_in_dim(y, at, n) * 2

    def program(x: jax.Array) -> jax.Array:
        return jax.shard_map(sliced, in_specs=P("dp"), out_specs=P(axis), check_vma=False)(x)

    x = array(4 * 2048, 1024, spec=P("dp"))
    run = meshscope.compile(program, x, topology="v6e-8", mesh="dp=4,tp=2")
    (one,) = run.explain()
    assert words in (one.remedy or "")
    lines = list(insertion_lines([one]))
    assert "1 collective of the program moves more than is kept" in lines


def test_a_run_without_a_program_says_so() -> None:
    run = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8")
    with pytest.raises(RunError, match=r"has no compiled program\. Compile one"):
        run.explain()
